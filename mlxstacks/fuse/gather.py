"""The modules that a list of adapters changes in a checkpoint."""

from fnmatch import fnmatchcase
from pathlib import Path

from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.files.adapters import Match, load_any_adapter, match_adapter
from mlxstacks.files.checkpoint import Checkpoint, read_json_object
from mlxstacks.files.lora_modules import Adapter, outside_config
from mlxstacks.files.manifest import binding_notes
from mlxstacks.fuse.module import Module
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.study.document import RESULT


def gather_modules(
    checkpoint: Checkpoint, settings: FuseSettings
) -> tuple[list[Module], list[str]]:
    """The modules that the adapters change, in the order of the checkpoint's tensors; and notes.

    A note says what a reader should know of the inputs: a base that an adapter names and that
    cannot be verified, a mismatch that was overridden, a model that is a fused one already.

    Raises: AdapterError, CheckpointError for what does not fit; InputError for a pattern of `bits`
        that matches nothing.
    """
    stages: dict[str, dict[int, Match]] = {}
    notes = _history_note(checkpoint)
    for stage, path in enumerate(settings.adapter_path):
        adapter = load_any_adapter(path, settings.peft_layout, checkpoint)
        matches = match_adapter(adapter, checkpoint, allow_base=settings.allow_base)
        notes += _base_note(path, adapter, matches, str(settings.model))
        if outside := outside_config(adapter):
            notes.append(
                f"{path}: its config leaves out {len(outside)} of its {len(adapter.modules)} "
                f"modules, {outside[0]} for one, and mlx-lm would not load it; all are fused here. "
                "Mend num_layers or keys, or remove what should not count."
            )
        for match in matches:
            stages.setdefault(match.module.path, {})[stage] = match
    _check_patterns(settings, list(stages))
    order = {name: index for index, name in enumerate(checkpoint.tensors)}
    modules = [
        Module(path, by_stage[min(by_stage)].stored, by_stage) for path, by_stage in stages.items()
    ]
    return sorted(modules, key=lambda module: order[module.stored.weight.name]), notes


def _base_note(path: str, adapter: Adapter, matches: list[Match], model: str) -> list[str]:
    """What is known of the base that the adapter was trained on, where that is not this one."""
    bases = {match.base for match in matches}
    if "overridden" in bases:
        return [f"{path} was trained on another base than this one; taken because of --allow-base."]
    if "verified by samples" in bases:
        return [f"{path}: {note}" for note in binding_notes(adapter.base_fingerprint)]
    named = adapter.config.get("model") or adapter.config.get("base_model_name_or_path")
    if "not verifiable" not in bases or not isinstance(named, str) or not named:
        return []
    if Path(named).name == Path(model).name:
        return []
    note = f"{path} says that it was trained on {named}, and this is {model}. "
    return [note + "It carries no fingerprint, so whether the two fit is not known."]


def _history_note(checkpoint: Checkpoint) -> list[str]:
    """A requantized model is not the base that it came from (spec/confound.md section 4)."""
    former, result = (checkpoint.directory / name for name in ("fuse_report.json", RESULT))
    try:
        is_fused = former.is_file() or read_json_object(result).get("kind") == "fuse"
    except CheckpointError:  # none, or somebody else's file of this name
        is_fused = False
    if not is_fused:
        return []
    return [f"{checkpoint.directory} is itself the result of a fuse; its report is inside."]


def _check_patterns(settings: FuseSettings, paths: list[str]) -> None:
    for pattern in settings.bits_patterns():
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise InputError(
                f"bits pattern {pattern!r} matches none of the adapter's modules: "
                + ", ".join(paths[:6])
                + (", ..." if len(paths) > 6 else "")
            )
