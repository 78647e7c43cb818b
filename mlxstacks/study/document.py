"""The document that a result is: a head, figures for machines, and blocks for people."""

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

RESULT = "result.json"

Kind = Literal["text", "count", "number", "change", "share", "points", "p", "bytes", "seconds"]
"""How a column's numbers are shown. count: 1,234; number: with `digits` behind the point, else four
significant ones; change: the same with its sign; share: 0.123 as 12.3%; points: 0.123 as +12.3 (a
difference of shares); p: two significant digits."""


def _cell(value: Any) -> Any:
    """An interval that lacks an end is none: the estimate alone."""
    if value is None or isinstance(value, str | int | float):
        return value
    numbers = isinstance(value, list | tuple) and all(
        isinstance(v, int | float | None) for v in value
    )
    if not numbers or len(value) not in (2, 3):
        raise ValueError(
            f"{value!r:.80} is no cell; give text, a number, an interval of two numbers, an "
            "estimate with its interval of three, or None"
        )
    if None in value:
        return value[0] if len(value) == 3 else None
    return value


Cell = Annotated[
    str | int | float | bool | tuple[float, float] | tuple[float, float, float] | None,
    BeforeValidator(_cell),
]
"""None: no value. Two numbers: an interval; three: an estimate with its interval."""


Columns = Mapping[str, Kind | tuple[Kind, int]]
"""Name -> kind, or kind and digits."""
# Files and anchors are named so.
Id = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,59}$")]


def problem_of(error: ValidationError) -> str:
    """The first of what a pydantic model refuses, in one line: its place and why."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, (*first["loc"], "")))[:-1]
    why = first["msg"].removeprefix("Value error, ")
    return f"{ascii(place)[1:-1]:.200}: {why}" if place else why


def counted(count: int, what: str) -> str:
    """1 row, 2 rows, 1,000 rows."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _plain(value: Any, place: str = "") -> Any:
    """Numbers and arrays of numpy, MLX and torch as Python's own, NaN as None, as JSON has neither.

    Raises: ValueError: what JSON cannot hold, by its place.
    """
    if isinstance(value, str | int | BaseModel | None):
        return value
    if type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return None
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError(f"{place}: {value} cannot be written to JSON; None is no value")
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {
            _plain(key): _plain(each, f"{place}.{key}".strip(".")) for key, each in value.items()
        }
    if isinstance(value, list | tuple | Iterator):
        each = [_plain(part, f"{place}.{at}") for at, part in enumerate(value)]
        return each if isinstance(value, list) else tuple(each)
    if isinstance(value, PurePath):
        return str(value)
    if callable(to_list := getattr(value, "tolist", None)):
        return _plain(to_list(), place)
    raise ValueError(
        f"{place}: {type(value).__name__} cannot be written to JSON; give text, numbers, lists "
        "or dicts of them, or None"
    )


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain_values(cls, fields: Any, info: ValidationInfo) -> Any:
        return fields if info.mode == "json" else _plain(fields)


class Column(_Part):
    name: str
    kind: Kind = "text"
    digits: int | None = Field(None, ge=0, le=12)


# What a header has beside the name of its figure: the level of an interval, the unit of what is a
# fraction here.
_AROUND_A_NAME = re.compile(r",? *\(?\d+%( interval)?\)?|, points")
_IN_WORDS = {"%": " percent ", "/": " per ", " - ": " minus "}


def plain_names(columns: Iterable[Column]) -> list[str]:
    """Names for a program: lower case with underscores, the unit of bytes and seconds at the end;
    `points` of a difference of shares is `difference`, for a program has the fraction.

    Law: identifiers, no two the same.
    """
    names: list[str] = []
    for column in columns:
        name = _AROUND_A_NAME.sub("", column.name).replace("'", "")
        for sign, word in _IN_WORDS.items():
            name = name.replace(sign, word)
        letters = unicodedata.normalize("NFKC", name).lower()
        name = "".join(letter if f"a{letter}".isidentifier() else "_" for letter in letters)
        name = re.sub("_+", "_", name).strip("_")
        name = name or ("interval" if column.name else "mark")
        if column.kind == "points":
            name = re.sub("(?<![^_])points(?![^_])", "difference", name)
        if column.kind in ("bytes", "seconds") and column.kind not in name.split("_"):
            name = f"{name}_{column.kind}"
        name = name if name.isidentifier() else f"column_{name}"
        names.append(name if name not in names else f"{name}_{len(names) + 1}")
    return names


_ROUNDING = 1e-9


class Table(_Part):
    """The first column names the row. folded: a page shows it on a click, a console not at all."""

    block: Literal["table"] = "table"
    id: Id
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    folded: bool = False

    @classmethod
    def of_facts(cls, id: str, title: str, facts: Mapping[str, Cell]) -> "Table":
        """Two columns: what, and its value."""
        return cls.of(id, title, {"what": "text", "value": "text"}, facts.items())

    @classmethod
    def of(
        cls,
        id: str,
        title: str,
        columns: Columns,
        rows: "Iterable[Sequence[Cell] | Mapping[str, Cell]] | pandas.DataFrame",
        **more: Any,
    ) -> "Table":
        """rows: of cells, or dicts by the names of columns, or a data frame that has these. more:
        caption, folded.
        """
        if callable(records := getattr(rows, "to_dict", None)):
            if not hasattr(rows, "columns"):
                raise ValueError(
                    f"table {id}: rows are a series; give a data frame, .reset_index()"
                )
            rows = records("records")
        if not isinstance(columns, Mapping):
            raise ValueError(f"table {id}: columns are a dict, name -> {', '.join(get_args(Kind))}")
        parts = []
        for name, kind in columns.items():
            kind, digits = (kind, None) if isinstance(kind, str) else kind
            parts.append(Column(name=name, kind=kind, digits=digits))
        cells = [_cells_of(row, columns, id) for row in rows]
        return cls(id=id, title=title, columns=tuple(parts), rows=tuple(cells), **more)

    @model_validator(mode="after")
    def _rows_fit(self, info: ValidationInfo) -> "Table":
        if len({column.name for column in self.columns}) < len(self.columns):
            raise ValueError(f"table {self.id}: two columns have one name")
        for at, row in enumerate(self.rows):
            if len(row) != (count := len(self.columns)):
                raise ValueError(f"table {self.id}: row {at} has {len(row)} cells of {count}")
            for column, cell in zip(self.columns, row, strict=True):
                if info.mode == "python" and _is_impossible(column, cell):  # files are shown
                    what = f"{cell!r} is no {column.kind} ({column.name}){_why(cell)}"
                    raise ValueError(f"table {self.id}: row {at}: {what}")
        return self


def _cells_of(
    row: Sequence[Cell] | Mapping[str, Cell], columns: Columns, id: str
) -> Sequence[Cell]:
    if isinstance(row, str):
        raise ValueError(f"table {id}: {row!r:.60} is no row; a row is a tuple of cells, or a dict")
    if isinstance(row, Mapping):
        if lost := columns.keys() - row.keys():
            raise ValueError(
                f"table {id}: a row has no {min(lost)}; it has {', '.join(map(str, row))}"
            )
        return tuple(row[name] for name in columns)
    return tuple(row)


def _holds(low: Any, value: Any, high: Any) -> bool:
    """Whether an interval has the value in it, but for rounding."""
    return bool(low - _ROUNDING * abs(low) <= value <= high + _ROUNDING * abs(high))


def _is_impossible(column: Column, cell: Cell) -> bool:
    """An interval without its estimate inside, a p beyond 0 to 1, a part of a count, a number as
    text; rounding is none of these.
    """
    if isinstance(cell, str):
        return (
            column.kind != "text" and re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", cell) is not None
        )
    values = cell if isinstance(cell, tuple) else (cell,)
    numbers = [value for value in values if isinstance(value, int | float)]
    if isinstance(cell, tuple) and not _holds(cell[-2], cell[0], cell[-1]):
        return True
    if column.kind == "p":
        return not all(-_ROUNDING <= number <= 1 + _ROUNDING for number in numbers)
    is_whole = column.kind == "count" and not column.digits
    return is_whole and not all(float(number).is_integer() for number in numbers)


def _why(cell: Cell) -> str:
    if isinstance(cell, str):
        return ": it is text"
    if isinstance(cell, tuple):
        return ": an interval is (low, high), or (estimate, low, high) with low <= estimate <= high"
    return ""


Estimate = Mapping[str, Any]
"""`value`, `mean`, `rate` or `share`, with `low` and `high` (of a share in `interval`) or None."""


def triple_of(estimate: Estimate) -> tuple[float | None, float | None, float | None]:
    """The value and the bounds of its interval."""
    key = next(key for key in ("value", "mean", "rate", "share") if key in estimate)
    bounds = estimate.get("interval") or estimate
    return estimate[key], bounds.get("low"), bounds.get("high")


def cell_of(estimate: Estimate | None) -> Cell:
    """The estimate with its interval, alone where it has none, None where nothing was measured."""
    if estimate is None:
        return None
    value, low, high = triple_of(estimate)
    return value if value is None or low is None or high is None else (value, low, high)


class Series(_Part):
    """One value for each category (intervals: with low and high), y over x (lines, points, or a
    frontier: low and high are a band or whiskers), or one row of a heat map.
    """

    label: str
    y: tuple[float | None, ...]
    x: tuple[float, ...] = ()
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()

    @classmethod
    def of_intervals(
        cls, label: str, cells: Iterable[Any], *, x: Sequence[float] = (), scale: float = 1
    ) -> "Series":
        """cells: estimates as a table has them, with low and high or alone, or None; each times
        `scale`.
        """
        rows = [
            cell if isinstance(cell, tuple | list) else (cell, None, None)
            for cell in map(_plain, cells)
        ]
        if odd := [row for row in rows if len(row) != 3]:
            raise ValueError(f"series {label}: {tuple(odd[0])!r:.80} is not (value, low, high)")
        y, low, high = (
            tuple(value if value is None or scale == 1 else scale * value for value in column)
            for column in zip(*rows, strict=True)
        )
        return cls(label=label, x=tuple(x), y=y, low=low, high=high)


class Plot(_Part):
    """categories: names of the rows of intervals and series, of the columns of a heat map, of the
    points of a frontier. limits: of the axis of values; the same on both sides of 0, a heat map has
    two-sided colours. references: name -> value of a dashed line. unit: what a heat map's shades
    mean, or bytes along x of a frontier. form: how its numbers are written. alt: what it shows, for
    who cannot see it.
    """

    block: Literal["plot"] = "plot"
    id: Id
    title: str
    kind: Literal["intervals", "series", "lines", "points", "frontier", "heat map"]
    series: tuple[Series, ...]
    categories: tuple[str, ...] = ()
    x_label: str = ""
    y_label: str = ""
    unit: str = ""
    form: Literal["{:.3g}", "{:.0f}", "{:.1f}", "{:.2f}", "{:+.2f}"] = "{:.3g}"
    limits: tuple[float | None, float | None] = (None, None)
    references: dict[str, float] = Field(default_factory=dict)
    alt: str

    @model_validator(mode="after")
    def _series_fit(self, info: ValidationInfo) -> "Plot":
        if self.kind == "heat map" and self.references and info.mode == "python":
            raise ValueError(f"plot {self.id}: a heat map has no references")
        low, high = self.limits
        if low is not None and high is not None and low >= high and info.mode == "python":
            raise ValueError(f"plot {self.id}: limits ({low:g}, {high:g}): low is less than high")
        for series in self.series:
            count = len(series.x) if self.kind in ("lines", "points") else len(self.categories)
            if self.kind == "frontier" and len(series.x) != count:
                raise ValueError(f"plot {self.id}: series {series.label} has not {count} places")
            ends = {len(series.low or series.y), len(series.high or series.y)}
            if {len(series.y), *ends} != {count}:
                of = "x" if self.kind in ("lines", "points") else "categories"
                raise ValueError(
                    f"plot {self.id}: series {series.label} has {len(series.y)} values and {count} "
                    f"{of}"
                )
            for y, low, high in zip(series.y, series.low, series.high, strict=False):
                is_whole = None not in (y, low, high) and info.mode == "python"
                if is_whole and not _holds(low, y, high):
                    where = f"plot {self.id}: series {series.label}"
                    raise ValueError(f"{where}: {y} is outside of {low} to {high}")
        return self


class Text(_Part):
    """Paragraphs under a title."""

    block: Literal["text"] = "text"
    title: str
    paragraphs: tuple[str, ...]


Block = Annotated[Table | Plot | Text, Field(discriminator="block")]


class Environment(_Part):
    """Where a result was made. seconds, peak_bytes: None for a run that was resumed."""

    device: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    seconds: float | None = None
    peak_bytes: int | None = None


class Standing(_Part):
    """confirmatory: of a plan that was fixed before the first answer and kept. no plan: described,
    not tested.
    """

    status: Literal["confirmatory", "exploratory", "no plan", "planned"] = "no plan"
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, reasons: Iterable[str]) -> "Standing":
        """Of a result with a plan. reasons: why it is only exploratory."""
        why = tuple(reasons)
        return cls(status="exploratory" if why else "confirmatory", reasons=why)

    def mark(self, title: str) -> str:
        """A title of a table or plot, with the word where it must not be missed."""
        return f"{title} (EXPLORATORY)" if self.status == "exploratory" else title

    def in_words(self) -> str:
        """One sentence for a verdict, of a result with a plan."""
        if not self.reasons:
            return "As planned beforehand."
        return f"Exploratory, not what was planned: {'; '.join(self.reasons)}."


class Document(_Part):
    """kind: the command. question: what it asks. outcome: a few words; verdict: whole sentences.
    plan: what was fixed before the first answer; power: what it can find. provenance: file ->
    `sha256`, or `answers` and `digest` of an answer log. data: all figures, units in the names.
    failed_gate: why the command ends with 3; failure: why with 1, although the document is whole.
    directory: where it was written or read, next_steps: what is named -> a command to run next; no
    part of the document.
    """

    kind: str
    title: str
    question: str = ""
    schema_version: Literal[1] = 1
    status: Literal["planned", "done"]
    outcome: str = ""
    verdict: str = ""
    standing: Standing = Standing()
    settings: dict[str, Any] = Field(default_factory=dict)
    plan: dict[str, Any] | None = None
    plan_sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    power: tuple[str, ...] = ()
    environment: Environment = Environment()
    provenance: dict[str, dict[str, Any]] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    notes: tuple[str, ...] = ()
    failed_gate: str | None = None
    failure: str | None = None
    seal: str = ""
    directory: str | None = Field(default=None, exclude=True)
    next_steps: dict[str, str] = Field(default_factory=dict, exclude=True)

    @property
    def tested_plan(self) -> str | None:
        """The hash of a plan that the result was held to; None where it only describes."""
        return None if self.standing.status == "no plan" else self.plan_sha256

    @property
    def shown_outcome(self) -> str:
        """The outcome for people, a gate that was not met first."""
        return ("gate not met: " if self.failed_gate else "") + (self.outcome or self.status)

    @property
    def shown_blocks(self) -> tuple[Block, ...]:
        """The blocks as people see them: of an exploratory result each is marked in its title, a
        plot in its alt as well.
        """
        return tuple(
            block.model_copy(
                update={
                    name: self.standing.mark(getattr(block, name))
                    for name in ("title", *["alt"] * isinstance(block, Plot))
                }
            )
            for block in self.blocks
        )

    @model_validator(mode="after")
    def _ids_are_unique(self) -> "Document":
        ids = [block.id for block in self.blocks if not isinstance(block, Text)]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise ValueError(
                f"two blocks have the id {twice[0]!r}; tables and plots need different ones"
            )
        return self
