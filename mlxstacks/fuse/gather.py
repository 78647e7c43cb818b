"""The modules that a list of adapters changes in a checkpoint."""

from fnmatch import fnmatchcase

from mlxstacks.errors import InputError
from mlxstacks.files.adapters import Match, load_any_adapter, match_adapter
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.fuse.module import Module
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.ops.affine import logical_width


def gather_modules(checkpoint: Checkpoint, settings: FuseSettings) -> list[Module]:
    """The modules that the adapters change, in the order of the checkpoint's tensors.

    Raises: AdapterError, CheckpointError for what does not fit; InputError for a pattern of `bits`
        that matches nothing.
    """
    stages: dict[str, dict[int, Match]] = {}
    for stage, path in enumerate(settings.adapter_path):
        adapter = load_any_adapter(path, settings.peft_layout, checkpoint)
        for match in match_adapter(adapter, checkpoint, allow_base=settings.allow_base):
            stages.setdefault(match.module.path, {})[stage] = match
    _check_patterns(settings, list(stages))
    order = {name: index for index, name in enumerate(checkpoint.tensors)}
    modules = [_module(path, by_stage) for path, by_stage in stages.items()]
    return sorted(modules, key=lambda module: order[module.weight.name])


def _module(path: str, stages: dict[int, Match]) -> Module:
    match = stages[min(stages)]
    input_dims = match.weight.shape[-1]
    if match.bits is not None:
        input_dims = logical_width(input_dims, match.bits)
    return Module(
        path=path,
        weight=match.weight,
        scales=match.scales,
        biases=match.biases,
        bits=match.bits,
        group_size=match.group_size,
        input_dims=input_dims,
        stages=stages,
    )


def _check_patterns(settings: FuseSettings, paths: list[str]) -> None:
    for pattern in settings.bits_patterns():
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise InputError(
                f"bits pattern {pattern!r} matches none of the adapter's modules: "
                + ", ".join(paths[:6])
                + (", ..." if len(paths) > 6 else "")
            )
