"""Figures as files, where matplotlib is installed (the extra `plots`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FORMATS = ("png", "svg")
Drawing = tuple[str, Callable[[Any], None]]
"""(name of the file, what draws on an empty figure)"""


def write_figures(
    directory: Path,
    drawings: Iterable[Drawing],
    formats: Sequence[str] = FORMATS,
    *,
    dpi: int = 150,
    style: Mapping[str, Any] | None = None,
) -> tuple[list[str], list[str]]:
    """Every drawing in every format; (names of the files, notes).

    style: settings of matplotlib.
    Law: equal drawings give equal bytes (of one version of matplotlib).
    """
    try:
        import matplotlib as library
    except ImportError:
        return [], ["No plots: matplotlib is not installed; pip install 'mlxstacks[plots]'."]
    # No window, no date, fixed ids in the SVG.
    settings: dict[Any, Any] = {"backend": "Agg", "svg.hashsalt": "mlxstacks", **(style or {})}
    names = []
    with library.rc_context(settings):
        from matplotlib.figure import Figure

        for name, draw in drawings:
            figure = Figure(layout="constrained")
            draw(figure)
            for suffix in formats:
                options = {"metadata": {"Date": None}} if suffix == "svg" else {"dpi": dpi}
                figure.savefig(directory / f"{name}.{suffix}", **options)
                names.append(f"{name}.{suffix}")
    return names, []
