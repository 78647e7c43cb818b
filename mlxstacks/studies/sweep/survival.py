"""What of an adapter each way of fusing would keep: measured on all weights, nothing written."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.fuse.blocks import Decision
from mlxstacks.fuse.decide import decide
from mlxstacks.fuse.fidelity import Fidelity, Sums, fidelity
from mlxstacks.fuse.gather import gather_modules
from mlxstacks.fuse.module import Module
from mlxstacks.fuse.report import total_fidelity
from mlxstacks.fuse.rewrite import ModuleWork, measure_module
from mlxstacks.fuse.settings import FuseSettings, PolicyName
from mlxstacks.fuse.summary import tensor_bytes

_MOST_WORKERS = 8


@dataclass(frozen=True)
class Survival:
    """An adapter under one policy: figures of all modules together, and by module; bytes that the
    model would grow by.
    """

    policy: PolicyName
    total: Fidelity
    modules: dict[str, Fidelity]
    extra_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            **self.total.as_json(),
            "extra_bytes": self.extra_bytes,
            "modules": {path: found.as_json() for path, found in self.modules.items()},
        }


def measure_survival(
    model: Path, adapter: Path, policies: Sequence[PolicyName], seed: int = 0
) -> list[Survival]:
    """The figures that `mlxstacks fuse` would report, by policy.

    Law: equal to the totals of its report, for any number of workers.
    Raises: InputError when the adapter does not fit the model.
    """
    return [_measure(model, adapter, policy, seed) for policy in policies]


def _measure(model: Path, adapter: Path, policy: PolicyName, seed: int) -> Survival:
    settings = FuseSettings(
        model=str(model), adapter_path=(str(adapter),), requant=policy, seed=seed
    )
    checkpoint = open_checkpoint(model)
    modules, _ = gather_modules(checkpoint, settings)
    workers = max(1, min(os.cpu_count() or 1, _MOST_WORKERS))
    sums: dict[str, Sums] = {}
    extra = 0
    with ThreadPoolExecutor(workers) as pool:

        def all_rows(module: Module, decisions: dict[int, Decision]) -> dict[int, Sums]:
            return measure_module(ModuleWork(module, decisions), pool, workers, seed)

        for module in modules:
            choice = decide(module, settings, all_rows)
            [stage] = choice.decisions
            sums[module.path] = all_rows(module, choice.decisions)[stage]
            after = tensor_bytes(module, choice.decisions[stage].bits)
            extra += after - sum(info.nbytes for info in module.tensors())
    by_module = {path: fidelity(found) for path, found in sums.items()}
    return Survival(policy, total_fidelity(list(sums.values())), by_module, extra)
