"""`mlxstacks adapter show | zero | convert`: what files/adapter_commands.py did, as results."""

from dataclasses import asdict

from mlxstacks.files.adapter_commands import (
    AdapterWritten,
    convert_adapter,
    show_adapter,
    zero_adapter_command,
)
from mlxstacks.files.settings import (
    AdapterConvertSettings,
    AdapterShowSettings,
    AdapterZeroSettings,
)
from mlxstacks.study.document import Columns, Table
from mlxstacks.study.result import Result

FORMATS = {"mlx": "mlx-lm", "peft": "PEFT"}


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


def _written(
    kind: str, settings: AdapterZeroSettings | AdapterConvertSettings, written: AdapterWritten
) -> Result:
    table = Table.of(
        "written", f"From {written.adapter_path}",
        {"format": "text", "modules": "count", "parameters": "count", "weights": "bytes"},
        [(FORMATS[written.format], written.modules, written.parameters, written.weight_bytes)],
    )  # fmt: skip
    return Result(
        kind=kind, title="An adapter, written", status="done", blocks=(table,),
        settings=settings.model_dump(mode="json"), data=asdict(written),
        directory=written.save_path,
    )  # fmt: skip
