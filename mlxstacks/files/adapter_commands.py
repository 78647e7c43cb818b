"""What is behind `mlxstacks adapter show | zero | convert | merge`."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from mlxstacks.errors import AdapterError, InputError
from mlxstacks.files.adapters import WEIGHTS, load_any_adapter, write_adapter, zero_adapter
from mlxstacks.files.checkpoint import Checkpoint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.gguf_adapters import GGUF_WEIGHTS, write_gguf
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.lora_modules import CONFIG, Adapter, delta_norm, read_config
from mlxstacks.files.merge_adapters import MergedModule, merge_adapters
from mlxstacks.files.outputs import check_target
from mlxstacks.files.peft_config import PEFT_WEIGHTS
from mlxstacks.files.peft_export import write_peft, write_zero_peft
from mlxstacks.files.settings import (
    AdapterConvertSettings,
    AdapterFormat,
    AdapterMergeSettings,
    AdapterShowSettings,
    AdapterZeroSettings,
)

_Settings = AdapterShowSettings | AdapterZeroSettings | AdapterConvertSettings


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """One adapted module. delta_rms: root mean square of scale * B A over the weight's numbers."""

    path: str
    kind: str
    lora_a: tuple[int, ...]
    lora_b: tuple[int, ...]
    dtype: str
    rank: int
    parameters: int
    delta_rms: float


@dataclass(frozen=True)
class AdapterSummary:
    """What an adapter holds, in mlx-lm's terms."""

    adapter_path: str
    format: AdapterFormat
    rank: int
    scale: float
    parameters: int
    base_model: str | None
    base_fingerprint: str | None
    metadata: dict[str, str]
    modules: tuple[ModuleSummary, ...]


@dataclass(frozen=True)
class AdapterWritten:
    """An adapter that was written, and from what.

    config_changes: what adapter_config.json, which is written again, no longer says as it was.
    """

    adapter_path: str
    save_path: str
    source_format: AdapterFormat
    format: AdapterFormat
    modules: int
    parameters: int
    weight_bytes: int
    config_changes: tuple[str, ...] = ()


def adapter_format(path: str | Path) -> AdapterFormat:
    """Which format a directory holds, by its weights' name; mlx where both are there. A file is
    GGUF."""
    directory = Path(path)
    if directory.suffix == ".gguf" and directory.is_file():
        return "gguf"
    peft_only = (directory / PEFT_WEIGHTS).exists() and not (directory / WEIGHTS).exists()
    return "peft" if peft_only else "mlx"


def show_adapter(settings: AdapterShowSettings) -> AdapterSummary:
    """Every module with shapes, rank and size of its delta. Raises: as `load_any_adapter`."""
    adapter = _load(settings, _model(settings))
    first = next(iter(adapter.modules.values()))
    base_model = adapter.config.get("model")
    return AdapterSummary(
        adapter_path=str(adapter.directory),
        format=adapter_format(adapter.directory),
        rank=first.rank,
        scale=first.scale,
        parameters=sum(m.parameters for m in adapter.modules.values()),
        base_model=base_model if isinstance(base_model, str) else None,
        base_fingerprint=adapter.base_fingerprint,
        metadata=adapter.metadata,
        modules=tuple(
            ModuleSummary(
                path=module.path,
                kind="switch" if module.is_switch else "dense",
                lora_a=module.lora_a.shape,
                lora_b=module.lora_b.shape,
                dtype=module.dtype,
                rank=module.rank,
                parameters=module.parameters,
                delta_rms=delta_norm(module) / math.prod(module.delta_shape) ** 0.5,
            )
            for module in adapter.modules.values()
        ),
    )


def zero_adapter_command(settings: AdapterZeroSettings) -> AdapterWritten:
    """Write the zero-delta copy, in the format that the adapter came in.

    Raises: as `load_any_adapter`, `write_adapter`.
    """
    source, target = _paths(settings)
    model = _model(settings)
    # Read whole first: what cannot be read is not copied either.
    adapter = _load(settings, model)
    kind = adapter_format(adapter.directory)
    if kind == "peft":
        write_zero_peft(source, target, settings.force)
    elif kind == "gguf":
        write_gguf(zero_adapter(adapter), target, model, force=settings.force)
    else:
        adapter = zero_adapter(adapter)
        write_adapter(adapter, target, settings.force)
    return _written(adapter, target, kind, kind)


def convert_adapter(settings: AdapterConvertSettings) -> AdapterWritten:
    """Write the adapter in the format `settings.to`; also normalises one already in it.

    Raises: as `load_any_adapter`, `write_adapter`, `write_peft`, `write_gguf`.
    """
    _, target = _paths(settings)
    model = _model(settings)
    adapter = _load(settings, model, stream=settings.to == "gguf")
    if settings.to == "peft":
        whole = settings.peft_model == "whole"
        model_type = str(model.config.get("model_type")) if model else None
        name, experts = settings.base_model_name, settings.experts or "parameters"
        write_peft(adapter, target, name, settings.force, whole, model_type, experts)
    elif settings.to == "gguf":
        write_gguf(adapter, target, model, settings.base_model_name, settings.force)
    else:
        write_adapter(adapter, target, settings.force, share=settings.experts == "stacked")
    return _written(adapter, target, adapter_format(adapter.directory), settings.to)


def merge_command(settings: AdapterMergeSettings) -> tuple[AdapterWritten, list[MergedModule]]:
    """Write the merged adapter. Raises: as `load_any_adapter`, `merge_adapters`."""
    if not settings.adapter_path or settings.save_path is None:
        raise InputError("adapter_path and save_path are needed: what to read, where to write")
    target = user_path(settings.save_path)
    given = [user_path(path) for path in settings.adapter_path]
    if twice := [path for n, path in enumerate(given) if path.resolve() in _resolved(given[:n])]:
        raise InputError(f"{twice[0]} is given twice; --weights makes an adapter count more")
    check_target(target, force=settings.force, inputs=given)
    model = open_checkpoint(resolve_model(settings.model)) if settings.model else None
    adapters = [
        load_any_adapter(path, settings.peft_layout, model) for path in settings.adapter_path
    ]
    bases = {a.base_fingerprint: a.directory for a in adapters if a.base_fingerprint}
    if len(bases) > 1 and not settings.allow_base:
        named = "; ".join(f"{where}: {base[:19]}..." for base, where in bases.items())
        raise AdapterError(
            f"the adapters were trained on different bases ({named}); merge adapters of one base, "
            "or --allow-base"
        )
    apart = set.intersection(*(set(adapter.modules) for adapter in adapters)) == set()
    unknown = [adapter.directory for adapter in adapters if not adapter.base_fingerprint]
    if apart and unknown and not settings.allow_base:
        raise AdapterError(
            f"the adapters have no module in common, and {unknown[0]} does not record its base, so "
            "nothing says that they are of one model; --allow-base merges them all the same"
        )
    merged, modules = merge_adapters(
        adapters, settings.weights or [1.0] * len(adapters), settings.method, rank=settings.rank,
        density=settings.density, space=settings.space, seed=settings.seed,
    )  # fmt: skip
    write_adapter(merged, target, settings.force)
    return _written(merged, target, "mlx", "mlx"), modules


def _resolved(paths: list[Path]) -> set[Path]:
    return {path.resolve() for path in paths}


def _model(settings: _Settings) -> Checkpoint | None:
    return open_checkpoint(resolve_model(settings.model)) if settings.model is not None else None


def _load(settings: _Settings, model: Checkpoint | None, stream: bool = False) -> Adapter:
    if settings.adapter_path is None:
        raise InputError("adapter_path is not set; give the adapter's directory")
    return load_any_adapter(settings.adapter_path, settings.peft_layout, model, stream=stream)


def _paths(settings: AdapterZeroSettings | AdapterConvertSettings) -> tuple[Path, Path]:
    if settings.adapter_path is None or settings.save_path is None:
        raise InputError("adapter_path and save_path are needed: what to read, where to write")
    return user_path(settings.adapter_path), user_path(settings.save_path)


def _config_changes(source: Path, target: Path) -> tuple[str, ...]:
    """Key by key, what of the source's adapter_config.json is not in the target's as it was."""
    before, after = (read_config(path / CONFIG) for path in (source, target))
    return tuple(
        f"{key} from {json.dumps(before[key])} to {json.dumps(after[key])}"
        if key in after
        else f"{key} left out ({json.dumps(before[key])})"
        for key in before
        if key not in after or before[key] != after[key]
    )


def _written(
    adapter: Adapter, target: Path, source_format: AdapterFormat, kind: AdapterFormat
) -> AdapterWritten:
    weights = target / {"peft": PEFT_WEIGHTS, "gguf": GGUF_WEIGHTS, "mlx": WEIGHTS}[kind]
    return AdapterWritten(
        adapter_path=str(adapter.directory),
        save_path=str(target),
        source_format=source_format,
        format=kind,
        modules=len(adapter.modules),
        parameters=sum(m.parameters for m in adapter.modules.values()),
        weight_bytes=weights.stat().st_size,
        config_changes=(
            () if "gguf" in (source_format, kind) else _config_changes(adapter.directory, target)
        ),
    )
