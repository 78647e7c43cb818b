"""Cells and plots that the results of `mlxstacks route` share."""

from collections.abc import Mapping
from typing import Any

from mlxstacks.study.document import Cell, Columns, Estimate, Plot, Series, cell_of, triple_of

RATE: Columns = {"number": "count", "of": "count", "share": ("share", 0)}


def rate_cells(rate: Estimate | None) -> tuple[Cell, Cell, Cell]:
    """Count, of how many, share with interval: the columns RATE."""
    return (None, None, None) if rate is None else (rate["count"], rate["n"], cell_of(rate))


def interval_plot(
    id: str,
    title: str,
    estimates: Mapping[str, Estimate],
    x_label: str,
    *,
    scale: float = 1.0,
    **options: Any,
) -> Plot:
    """A row with its interval for each estimate, times `scale`. options: of `Plot`."""
    series = Series.of_intervals(x_label, map(triple_of, estimates.values()), scale=scale)
    listed = ", ".join(
        f"{name} {'not measured' if value is None else f'{value:.4g}'}"
        for name, value in zip(estimates, series.y, strict=True)
    )
    return Plot(
        id=id, title=title, kind="intervals", categories=tuple(estimates), x_label=x_label,
        series=(series,),
        alt=f"{title}; {x_label}: {listed}.", **options,
    )  # fmt: skip


def in_words(estimate: Estimate, digits: int = 3) -> str:
    """`-0.123 (-0.150 to -0.100)`; of one row, which has no interval, so."""
    value, low, high = triple_of(estimate)
    if low is None or high is None:
        return f"{value:+.{digits}f} (one row)"
    return f"{value:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def rate_in_words(rate: Estimate) -> str:
    """`3 of 4 (75%, 30 to 95)`."""
    count = f"{rate['count']} of {rate['n']}"
    value, low, high = triple_of(rate)
    if value is None or low is None or high is None:
        return count
    return f"{count} ({100 * value:.0f}%, {100 * low:.0f} to {100 * high:.0f})"
