"""`mlxstacks adapter show | zero | convert | merge`: files/adapter_commands.py, as results."""

from dataclasses import asdict

from mlxstacks.files.adapter_commands import (
    AdapterWritten,
    convert_adapter,
    merge_command,
    show_adapter,
    zero_adapter_command,
)
from mlxstacks.files.settings import (
    AdapterConvertSettings,
    AdapterMergeSettings,
    AdapterShowSettings,
    AdapterZeroSettings,
)
from mlxstacks.study.document import Columns, Table, counted
from mlxstacks.study.result import Result

FORMATS = {"mlx": "mlx-lm", "peft": "PEFT", "gguf": "GGUF"}


def show(settings: AdapterShowSettings) -> Result:
    """A table of facts, and a row a module. Raises: as `show_adapter`."""
    summary = show_adapter(settings)
    ranks = sorted({module.rank for module in summary.modules})
    facts = {
        "adapter": summary.adapter_path,
        "format": FORMATS[summary.format],
        "base": summary.base_model or "not named",
        "scale": f"{summary.scale:g}",
        "rank": ", ".join(map(str, ranks)),
        "parameters": f"{summary.parameters:,}",
    }
    columns: Columns = {
        **dict.fromkeys(("module", "kind", "lora_a", "lora_b", "dtype"), "text"),
        "delta rms": "number",
    }
    rows = [
        (m.path, m.kind, _shape(m.lora_a), _shape(m.lora_b), m.dtype,
         m.delta_rms)
        for m in summary.modules
    ]  # fmt: skip
    return Result(
        kind="adapter show", title="What an adapter holds", status="done",
        settings=settings.model_dump(mode="json"), data=asdict(summary),
        blocks=(
            Table.of_facts("adapter", "Adapter", facts),
            Table.of("modules", "Modules", columns, rows),
        ),
    )  # fmt: skip


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def zero(settings: AdapterZeroSettings) -> Result:
    """Raises: as `zero_adapter_command`."""
    return _written("adapter zero", settings, zero_adapter_command(settings))


def convert(settings: AdapterConvertSettings) -> Result:
    """Raises: as `convert_adapter`."""
    return _written("adapter convert", settings, convert_adapter(settings))


def merge(settings: AdapterMergeSettings) -> Result:
    """A row a module, the largest error first. Raises: as `merge_command`."""
    written, modules = merge_command(settings)
    modules = sorted(modules, key=lambda module: -(module.error or 0.0))
    total = sum((m.norm or 0.0) ** 2 for m in modules)
    lost = sum(((m.norm or 0.0) * (m.error or 0.0)) ** 2 for m in modules)
    error = (lost / total) ** 0.5 if total else 0.0
    rank = max(module.rank for module in modules)
    names = ", ".join(settings.adapter_path)
    count = len(settings.adapter_path)
    many, where = counted(count, "adapter"), counted(len(modules), "module")
    words = f"{many} as one of rank {rank} in {where}"
    aim = {"concat": "sum", "svd": "sum"}.get(settings.method, f"merge by {settings.method}")
    verdict = f"{words}: exact, the sum of the weighted deltas."
    exact = settings.method == "concat"
    if not exact:
        worst = modules[0]
        verdict = (
            f"{words}: {100 * error:.2g}% of the {aim} is lost to the rank, most in {worst.path} "
            f"({100 * (worst.error or 0.0):.2g}%)."
        )
    columns: Columns = {
        "module": "text", "ranks merged": "text", "rank": "count", "norm": "number",
        "lost to the rank": ("share", 2),
    }  # fmt: skip
    rows = [(m.path, ", ".join(map(str, m.ranks)), m.rank, m.norm, m.error) for m in modules]
    caption = "norm: of what the method aims at; lost: of that, by Frobenius norms."
    return Result(
        kind="adapter merge", title="Adapters, merged", status="done", verdict=verdict,
        outcome="exact" if exact else f"{100 * error:.2g}% lost to the rank",
        settings=settings.model_dump(mode="json"), directory=written.save_path,
        data={
            **asdict(written), "adapter_path": names, "error": error,
            "modules": [asdict(module) for module in modules],
        },
        blocks=(
            Table.of("modules", "Modules", columns, rows, caption=caption, folded=exact),
        ),
    )  # fmt: skip


def _written(
    kind: str, settings: AdapterZeroSettings | AdapterConvertSettings, written: AdapterWritten
) -> Result:
    table = Table.of(
        "written", f"From {written.adapter_path}",
        {"format": "text", "modules": "count", "parameters": "count", "weights": "bytes"},
        [(FORMATS[written.format], written.modules, written.parameters, written.weight_bytes)],
    )  # fmt: skip
    config = "adapter_config.json is as it was."
    if written.format == "gguf":
        config = "llama.cpp takes adapter.gguf with --lora, beside a GGUF file of the same base."
    elif written.source_format != written.format:
        config = (
            f"adapter_config.json was made for {FORMATS[written.format]} from rank, scale, dropout "
            f"and the names of modules; other keys of {FORMATS[written.source_format]}'s are not "
            "in it."
        )
    elif written.config_changes:
        config = f"adapter_config.json was written again: {'; '.join(written.config_changes)}."
    return Result(
        kind=kind, title="An adapter, written", status="done", blocks=(table,), notes=(config,),
        settings=settings.model_dump(mode="json"), data=asdict(written),
        directory=written.save_path,
    )  # fmt: skip
