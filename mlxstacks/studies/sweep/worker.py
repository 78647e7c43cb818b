"""The process of one cell: trains, then measures what a fuse would keep of the adapter.

    python -m mlxstacks.studies.sweep.worker < specification

What is trained already (its directory is there, so it is whole) is only measured.
"""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError, ResourceLimitError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.fuse.blocks import Decision
from mlxstacks.fuse.decide import decide
from mlxstacks.fuse.fidelity import Sums, fidelity
from mlxstacks.fuse.module import Module, gather_modules
from mlxstacks.fuse.report import tensor_bytes
from mlxstacks.fuse.rewrite import ModuleWork, measure_module
from mlxstacks.fuse.settings import FuseSettings, PolicyName
from mlxstacks.studies.train.run import run
from mlxstacks.study.child_process import Message, as_child
from mlxstacks.study.document import RESULT
from mlxstacks.study.run_directory import plain
from mlxstacks.training.loop import NonFiniteError
from mlxstacks.training.settings import TrainSettings

# Of the report of `train`, what a sweep compares.
_FIGURES = (
    "trained_parameters", "adapter_bytes", "widths_tokens", "base_in_float32", "step", "best_step",
    "first_validation_loss", "best_validation_loss", "seconds", "resumed_from_step", "peak_bytes",
    "validation", "history", "counted_buffers",
)  # fmt: skip

_MOST_WORKERS = 8
# `[metal::malloc]` and its kind, what Metal says of a command buffer, what CUDA says.
_NO_MEMORY = ("malloc", "insufficient memory", "out of memory")


def work(specification: Message, send: Callable[[Message], None]) -> Message:
    """Train and measure: the result, or why there is none."""
    settings = TrainSettings.model_validate(specification["train"])
    target = Path(str(settings.save_path))
    try:
        if not target.exists():
            run(settings, progress=lambda done, total, what="": send(
                {"done": done, "total": total, "what": what}
            ))  # fmt: skip
    except ResourceLimitError as error:
        return {"status": "refused", "reason": str(error)}
    except InputError as error:
        return {"status": "wrong", "reason": str(error)}
    except (NonFiniteError, RuntimeError) as error:
        # MLX has no type of its own for memory or buffers that are not to be had.
        no_memory = any(words in str(error).lower() for words in _NO_MEMORY)
        if not (isinstance(error, NonFiniteError) or no_memory):
            raise
        return {"status": "failed", "reason": str(error)}
    report = json.loads((target / RESULT).read_text(encoding="utf-8"))["data"]
    figures = {name: report.get(name) for name in _FIGURES}
    last = report["validation"][-1]["validation_loss"] if report["validation"] else None
    figures["last_validation_loss"] = last
    survival = measure_survival(
        Path(str(settings.model)), target, specification["policies"], settings.seed
    )
    return {"status": "trained", "figures": figures, "survival": survival}


def measure_survival(
    model: Path, adapter: Path, policies: Sequence[PolicyName], seed: int = 0
) -> dict[str, dict[str, Any]]:
    """What of an adapter each way of fusing would keep, by policy: the figures that a fuse would
    report, of all modules together and by module, and the bytes that the model would grow by.
    Measured on all weights; nothing is written.

    Law: equal to the totals of its report, for any number of workers.
    Raises: InputError when the adapter does not fit the model.
    """
    checkpoint = open_checkpoint(model)
    workers = max(1, min(os.cpu_count() or 1, _MOST_WORKERS))
    survival: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(workers) as pool:
        for policy in policies:
            settings = FuseSettings(
                model=str(model), adapter_path=(str(adapter),), requant=policy, seed=seed
            )

            def all_rows(
                module: Module, decisions: dict[int, Decision], settings: FuseSettings = settings
            ) -> dict[int, Sums]:
                return measure_module(ModuleWork(module, decisions), pool, workers, settings)

            sums: dict[str, Sums] = {}
            extra_bytes = 0
            for module in gather_modules(checkpoint, settings)[0]:
                decisions = decide(module, settings, all_rows).decisions
                [stage] = decisions
                sums[module.path] = all_rows(module, decisions)[stage]
                extra_bytes += tensor_bytes(module, decisions[stage])
                extra_bytes -= sum(info.nbytes for info in module.tensors())
            survival[policy] = {
                "policy": policy,
                **fidelity(sum(sums.values(), Sums())).as_json(),
                "extra_bytes": extra_bytes,
                "modules": {path: fidelity(each).as_json() for path, each in sums.items()},
            }
    return survival


def main() -> None:
    specification, send = as_child()
    send(plain(work(specification, send)))


if __name__ == "__main__":
    main()
