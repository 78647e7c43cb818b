"""A result and what belongs to it, as files of a target."""

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from mlxstacks import memory
from mlxstacks.files.outputs import write_json
from mlxstacks.study.document import RESULT, Environment, Plot
from mlxstacks.study.integrity import of_file
from mlxstacks.study.render.figures import write_figures
from mlxstacks.study.render.markdown import to_markdown
from mlxstacks.study.result import Result

MARKDOWN = "result.md"


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("mlxstacks", "mlx", "mlx-lm", "numpy")}


def environment(seconds: float | None) -> Environment:
    """Of this process. seconds: None where it made only a part; then neither is known."""
    device = memory.device()
    return Environment(
        device=f"{device.name} ({device.kind})",
        versions=dict(_versions()),
        seconds=None if seconds is None else round(seconds, 1),
        peak_bytes=None if seconds is None else memory.peak_resident_bytes(),
    )


def write_result(
    result: Result,
    directory: Path,
    target: Path,
    plot_formats: Sequence[str] = (),
    sources: Iterable[Path] | None = None,
) -> Result:
    """Write result.json, sealed, with result.md and plots, to `directory`, where the files that the
    result was made from lie already; it becomes `target`. Returns what was written.

    sources: files of the directory for the provenance; None: all of them. Raises: OSError.
    """
    plots = {
        block.id: block for block in result.shown_blocks if isinstance(block, Plot) and plot_formats
    }
    provenance = dict(result.provenance)
    files = directory.rglob("*") if sources is None else sources
    for file in sorted(path for path in files if path.is_file()):
        name = str(file.relative_to(directory))
        if not file.name.startswith("."):
            provenance.setdefault(name, of_file(file))
    pictures, notes = write_figures(directory, plots, plot_formats) if plots else ([], [])
    result = result.model_copy(
        update={"provenance": provenance, "notes": (*result.notes, *notes)}
    ).sealed()
    (directory / MARKDOWN).write_text(to_markdown(result, pictures), encoding="utf-8")
    write_json(directory / RESULT, result.as_json())
    return result.model_copy(update={"directory": str(target)})
