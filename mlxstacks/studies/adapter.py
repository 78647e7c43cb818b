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
from mlxstacks.study.document import Column, Table
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
    names = ("module", "kind", "lora_a", "lora_b", "dtype")
    rows = [
        (m.path, m.kind, _shape(m.lora_a), _shape(m.lora_b), m.dtype, m.delta_rms)
        for m in summary.modules
    ]
    return Result(
        kind="adapter show",
        title="What an adapter holds",
        status="done",
        settings=settings.model_dump(mode="json"),
        data=asdict(summary),
        blocks=(
            Table.of_facts("adapter", "Adapter", facts),
            Table(
                id="modules",
                title="Modules",
                columns=(
                    *(Column(name=name) for name in names),
                    Column(name="delta rms", kind="number"),
                ),
                rows=tuple(rows),
            ),
        ),
    )


def zero(settings: AdapterZeroSettings) -> Result:
    """Raises: as `zero_adapter_command`."""
    return _written("adapter zero", settings, zero_adapter_command(settings))


def convert(settings: AdapterConvertSettings) -> Result:
    """Raises: as `convert_adapter`."""
    return _written("adapter convert", settings, convert_adapter(settings))


def _written(
    kind: str, settings: AdapterZeroSettings | AdapterConvertSettings, written: AdapterWritten
) -> Result:
    counts = ("modules", "parameters")
    return Result(
        kind=kind,
        title="An adapter, written",
        status="done",
        settings=settings.model_dump(mode="json"),
        data=asdict(written),
        blocks=(
            Table(
                id="written",
                title=f"From {written.adapter_path}",
                columns=(
                    Column(name="format"),
                    *(Column(name=name, kind="count") for name in counts),
                    Column(name="weights", kind="bytes"),
                ),
                rows=(
                    (
                        FORMATS[written.format],
                        written.modules,
                        written.parameters,
                        written.weight_bytes,
                    ),
                ),
            ),
        ),
        directory=written.save_path,
    )


def _text(name: str) -> Column:
    return Column(name=name)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
