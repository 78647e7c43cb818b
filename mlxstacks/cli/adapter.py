"""Prints what the adapter commands return."""

from typing import TYPE_CHECKING

from mlxstacks.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.files.adapter_commands import AdapterSummary, AdapterWritten


def render_summary(console: "Console", summary: "AdapterSummary") -> None:
    """A head of facts and one row a module."""
    ranks = sorted({module.rank for module in summary.modules})
    facts: dict[str, output.Cell] = {
        "adapter": summary.adapter_path,
        "format": {"mlx": "mlx-lm", "peft": "PEFT"}[summary.format],
        "base": summary.base_model or "not named",
        "scale": summary.scale,
        "rank": ", ".join(map(str, ranks)),
        "parameters": summary.parameters,
    }
    console.print(output.details(facts))
    prefix = output.common_prefix([module.path for module in summary.modules])
    rows: list[list[output.Cell]] = [
        [
            module.path.removeprefix(prefix),
            module.kind,
            _shape(module.lora_a),
            _shape(module.lora_b),
            module.dtype,
            module.delta_rms,
        ]
        for module in summary.modules
    ]
    title = f"below {prefix.rstrip('.')}" if prefix else None
    columns = ["module", "kind", "lora_a", "lora_b", "dtype", "delta rms"]
    console.print(output.table(columns, rows, title=title))


def render_written(console: "Console", written: "AdapterWritten") -> None:
    """One sentence: what was written, from what, how large."""
    names = {"mlx": "mlx-lm", "peft": "PEFT"}
    console.print(
        f"Wrote {written.save_path} in {names[written.format]} format: {written.modules} modules, "
        f"{written.parameters:,} parameters, {output.bytes_text(written.weight_bytes)} "
        f"(from {written.adapter_path}).",
        markup=False,
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
