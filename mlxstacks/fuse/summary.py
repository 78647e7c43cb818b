"""Per-stage reports from the decisions and the sums of a fuse."""

from mlxstacks.files.shards import tensor_nbytes
from mlxstacks.fuse.decide import Choice, policy_name
from mlxstacks.fuse.fidelity import Sums, fidelity
from mlxstacks.fuse.module import Module
from mlxstacks.fuse.report import ModuleReport, StageReport, total_fidelity
from mlxstacks.fuse.rewrite import ModuleWork


def stage_report(
    stage: int,
    adapter: str,
    works: list[ModuleWork],
    choices: dict[str, Choice],
    sums: dict[str, dict[int, Sums]],
) -> StageReport:
    """The report of one adapter; `sums` is empty for a dry run."""
    modules, measured = [], []
    for work in works:
        module = work.module
        if stage not in module.stages:
            continue
        decision = work.decisions[stage]
        module_sums = sums.get(module.path, {}).get(stage)
        if module_sums is not None:
            measured.append(module_sums)
        earlier = [work.decisions[s].bits for s in sorted(work.decisions) if s < stage]
        before = earlier[-1] if earlier else module.stored.bits
        modules.append(
            ModuleReport(
                path=module.path,
                stage=stage,
                policy=policy_name(decision),
                bits_before=before,
                bits_after=decision.bits,
                base=module.stages[stage].base,
                bytes_before=tensor_bytes(module, before),
                bytes_after=tensor_bytes(module, decision.bits),
                fidelity=fidelity(module_sums) if module_sums is not None else None,
                tried=choices[module.path].tried.get(stage, {}),
            )
        )
    return StageReport(adapter, modules, total_fidelity(measured) if measured else None)


def tensor_bytes(module: Module, bits: int | None) -> int:
    """Bytes of a module's tensors at `bits`, or of its plain weight for None."""
    return entries_bytes(module.outputs(bits))


def entries_bytes(entries: list[tuple[str, str, tuple[int, ...]]]) -> int:
    """Bytes of tensors given by (name, dtype, shape)."""
    return sum(tensor_nbytes(dtype, shape) or 0 for _, dtype, shape in entries)
