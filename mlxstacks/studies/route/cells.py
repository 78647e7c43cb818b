"""Cells, tables and plots that the results of `mlxstacks route` share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxstacks.study.document import Cell, Column, Plot, Series, Table

Estimate = Mapping[str, Any]
"""`value`, `mean`, `rate` or `share`, with `low` and `high` (of a share in `interval`) or None."""


Head = str | tuple[str, str] | tuple[str, str, int]
"""Of a column: name, kind and digits; a name alone is of text."""
RATE: tuple[Head, ...] = ("number", "count"), ("of", "count"), ("share", "share", 0)


def table(
    id: str, title: str, heads: Iterable[Head], rows: Iterable[Sequence[Cell]], **options: Any
) -> Table:
    """options: of `Table`."""
    specs = [(head,) if isinstance(head, str) else head for head in heads]
    columns = [dict(zip(("name", "kind", "digits"), spec, strict=False)) for spec in specs]
    return Table(
        id=id, title=title, columns=tuple(Column.model_validate(one) for one in columns),
        rows=tuple(map(tuple, rows)), **options,
    )  # fmt: skip


def cell(estimate: Estimate | None) -> Cell:
    """The estimate with its interval, alone where it has none, None where nothing was measured."""
    if estimate is None:
        return None
    value, low, high = triple(estimate)
    if value is None or low is None or high is None:
        return value
    return value, low, high


def triple(estimate: Estimate) -> tuple[float | None, float | None, float | None]:
    key = next(key for key in ("value", "mean", "rate", "share") if key in estimate)
    bounds = estimate.get("interval") or estimate
    return estimate[key], bounds.get("low"), bounds.get("high")


def rate_row(rate: Estimate | None) -> tuple[Cell, Cell, Cell]:
    """Count, of how many, share with interval."""
    return (None, None, None) if rate is None else (rate["count"], rate["n"], cell(rate))


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
    triples = [[x and scale * x for x in triple(estimate)] for estimate in estimates.values()]
    values, lows, highs = zip(*triples, strict=True)
    listed = ", ".join(
        f"{name} {'not measured' if value is None else f'{value:.4g}'}"
        for name, value in zip(estimates, values, strict=True)
    )
    return Plot(
        id=id, title=title, kind="intervals", categories=tuple(estimates), x_label=x_label,
        series=(Series(label=x_label, y=values, low=lows, high=highs),),
        alt=f"{title}; {x_label}: {listed}.", **options,
    )  # fmt: skip


def in_words(estimate: Estimate, digits: int = 3) -> str:
    """`-0.123 [-0.150, -0.100]`; of one row, which has no interval, so."""
    value, low, high = triple(estimate)
    if low is None or high is None:
        return f"{value:+.{digits}f}, one row"
    return f"{value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def rate_in_words(rate: Estimate) -> str:
    """`3 of 4 (75%, 30 to 95)`."""
    value, low, high = triple(rate)
    if value is None or low is None or high is None:
        return f"{rate['count']} of {rate['n']}"
    return (
        f"{rate['count']} of {rate['n']} ({100 * value:.0f}%, {100 * low:.0f} to {100 * high:.0f})"
    )
