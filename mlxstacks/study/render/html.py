"""Results as HTML, for the page of `mlxstacks report` and for notebooks. Nothing in it runs, and
nothing is loaded from outside. The template is page.html.j2; here is what it shows.
"""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from mlxstacks.errors import InputError
from mlxstacks.files.outputs import PLACES
from mlxstacks.study.document import Cell, Column, Document, Plot, Table, Text
from mlxstacks.study.render.figures import INK, PAPER, RULE, SERIES, WITHOUT, png_of, svg_of
from mlxstacks.study.render.words import (
    LONGEST,
    NO_VALUE,
    NOT_MEASURED,
    POWER,
    beginning,
    capital,
    clean,
    format_cell,
    listed,
    made_of,
    nbytes,
    number,
    short,
)

# Only the style in the page itself applies.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
EXPLORATORY = "EXPLORATORY"
# A longer table is cut, and says so; all of it is in the result file.
MOST_ROWS = 150
_LONG_BESIDE = 24  # rows of several results; more are folded
# Of a verdict in a row of the summary, in characters: its gain, and what stands against that.
_LONGEST_BEGINNING = 640
_LONGEST_VERDICT = 20_000
# As wide as this, in pixels, a plot gets a row of its own.
_WIDE = 560
_OPTION = re.compile(r"(?<![\w-])--[a-z0-9]+(?:-[a-z0-9]+)+")
# Names and other cells up to this long stay on one line.
_SHORT_NAME, _SHORT_CELL = 28, 16
_STANDINGS = {
    "confirmatory": "confirmatory", "exploratory": EXPLORATORY, "planned": "planned only",
    "no plan": "no plan: described, not tested",
}  # fmt: skip
# Of a notebook, which is saved with all its results.
_LARGE_PLOT_BYTES, _MOST_PLOT_BYTES = 120_000, 400_000
_NOTEBOOK_STYLE = (
    ".mlxstacks .verdict{border-left:.3rem solid #888;padding:.1rem .8rem;margin:.5rem 0}"
    ".mlxstacks .outcome{font-weight:650}.mlxstacks .tags{padding:0}"
    ".mlxstacks .tags li{display:inline;list-style:none;margin-right:1em}"
    ".mlxstacks .exploratory{font-weight:650}"
    ".mlxstacks .plots{display:flex;flex-wrap:wrap;gap:1rem}.mlxstacks figure{margin:0}"
    ".mlxstacks figure img{max-width:100%;height:auto}"
    ".mlxstacks figure .scroll{max-height:26rem;overflow-y:auto}"
    ".mlxstacks .scroll{overflow-x:auto}.mlxstacks caption{text-align:left;font-weight:600}"
    # JupyterLab and nbconvert set every cell to the right, by two classes.
    ".mlxstacks th,.mlxstacks td{text-align:left!important}"
    ".mlxstacks .number{text-align:right!important}"
    ".mlxstacks .note,.mlxstacks .missing{opacity:.75}"
)
Pair = tuple[str, str | None]
Picture = tuple[str, Markup, bool]
"""(anchor, SVG, whether it gets a row of its own)"""


@dataclass(frozen=True)
class Section:
    """A result as the template shows it. slug: of its anchors. repeat: file and text of its recipe,
    where to run it, and a note; {} where the result has no settings, None where nothing is said.
    """

    slug: str
    name: str
    result: Document
    pictures: Sequence[Picture] = ()
    repeat: Mapping[str, str] | None = None
    source: Sequence[Pair] = ()
    files: Sequence[Pair] = ()

    @property
    def exploratory(self) -> bool:
        return self.result.standing.status == "exploratory"

    @property
    def standing(self) -> str:
        planned = self.result.status == "planned" and not self.exploratory
        return _STANDINGS["planned" if planned else self.result.standing.status]

    @property
    def heading(self) -> str:
        return self.result.standing.mark(f"{self.result.title}: {short(self.name, 80)}")

    @property
    def asked(self) -> Pair | None:
        hypothesis = (self.result.plan or {}).get("hypothesis")
        if isinstance(hypothesis, str):
            return "Hypothesis", hypothesis
        return ("Question", self.result.question) if self.result.question else None

    @property
    def made_of(self) -> str:
        return short(made_of(self.result), 120)

    @property
    def beginning(self) -> str:
        """Whole sentences of the verdict, as many as a row of the summary holds."""
        return beginning(self.result.verdict, _LONGEST_BEGINNING)

    @property
    def more(self) -> bool:
        verdict = " ".join(clean(self.result.verdict, _LONGEST_VERDICT).split())
        return len(self.beginning) < len(verdict)

    @property
    def blocks(self) -> list[Text | dict[str, Any]]:
        return [
            _table(block) if isinstance(block, Table) else block
            for block in self.result.shown_blocks
            if not isinstance(block, Plot)
        ]

    @property
    def notes(self) -> list[str]:
        gates = {"Gate not met": self.result.failed_gate, "Failed": self.result.failure}
        return [f"{name}: {why}" for name, why in gates.items() if why] + [*self.result.notes]

    @property
    def environment(self) -> list[Pair]:
        about = self.result.environment
        versions = listed(f"{name} {version}" for name, version in about.versions.items())
        return [
            ("device", about.device), ("versions", versions or None),
            ("seconds", number(about.seconds)), ("highest memory", nbytes(about.peak_bytes)),
            *self.source,
        ]  # fmt: skip

    @property
    def plan(self) -> list[Pair]:
        plan = {k: v for k, v in (self.result.plan or {}).items() if k != "hypothesis"}
        return [("SHA-256", self.result.plan_sha256), *_pairs(plan)] if plan else []

    @property
    def settings(self) -> list[Pair]:
        return _pairs(self.result.settings)


@dataclass(frozen=True)
class Page:
    """date: printed below the title. notes: of the whole page."""

    title: str
    runs: Sequence[Section]
    notes: Sequence[str] = ()
    date: str | None = None
    version: str = ""

    @property
    def counts(self) -> str:
        marks = sum(run.exploratory for run in self.runs)
        plural = "" if len(self.runs) == 1 else "s"
        return f"{len(self.runs)} result{plural}, {marks or 'none'} exploratory."

    @property
    def beside(self) -> list[dict[str, Any]]:
        """Tables that several results of a kind have, as one each: a row's runs below each other.
        A title says what is measured: tables under two titles stay apart, whatever their columns.
        What a result folds is left out, and what is long is folded. The caption names the settings
        that differ, and rows that not every run has.
        """
        shared: dict[tuple[str, ...], list[tuple[Section, Table]]] = {}
        for run in self.runs:
            for block in run.result.blocks:
                if isinstance(block, Table) and not block.folded:
                    columns = (column.name for column in block.columns)
                    names = (run.result.kind, block.id, block.title, *columns)
                    shared.setdefault(names, []).append((run, block))
        views = []
        for tables in shared.values():
            first = tables[0][1]
            if len(tables) == 1 or any(column.name == "run" for column in first.columns):
                continue
            rows: dict[Cell, list[tuple[Cell, ...]]] = {}
            for run, block in tables:
                name = run.result.standing.mark(run.name)
                for row in block.rows:
                    rows.setdefault(row[0], []).append((row[0], name, *row[1:]))
            settings = [run.result.settings for run, _ in tables]
            differing = [
                key
                for key in settings[0].keys() - PLACES
                if any(each.get(key) != settings[0][key] for each in settings)
            ]
            lacking = [str(row) for row, found in rows.items() if len(found) < len(tables)]
            caption = first.caption if len({t.caption for _, t in tables}) == 1 else ""
            for what, parts in ("Settings that differ", sorted(differing)), ("Not in all", lacking):
                caption += f" {what}: {listed(parts, most=6)}." if parts else ""
            whole = first.model_copy(update={
                "columns": (first.columns[0], Column(name="run"), *first.columns[1:]),
                "rows": tuple(chain.from_iterable(rows.values())),
                "folded": sum(map(len, rows.values())) > _LONG_BESIDE,
                "caption": caption.strip(),
            })  # fmt: skip
            views.append(_table(whole))
        return views


def page_html(page: Page) -> str:
    """The document. Law: equal pages give equal text."""
    return _environment().get_template("page.html.j2").render(page=page, policy=POLICY)


def result_html(result: Document) -> str:
    """A result as a part of a notebook: verdict, plots where matplotlib is installed, tables.

    Law: its plots take at most _MOST_PLOT_BYTES; a large one is a PNG, and those beyond are named.
    """
    slug, pictures, size = f"result-{result.seal[:12] or 'unsealed'}", list[Picture](), 0
    plots = [block for block in result.shown_blocks if isinstance(block, Plot)]
    try:
        for plot in plots:
            name = f"{slug}-{plot.id}"
            drawn = _image("svg+xml", _svg_file(svg_of(plot), name), name, plot.alt)
            if len(drawn[1]) > _LARGE_PLOT_BYTES:
                drawn = _image("png", png_of(plot), name, plot.alt)
            size += len(drawn[1])
            if size > _MOST_PLOT_BYTES:
                break
            pictures.append(drawn)
        note = ".plot(id) draws each."
    except ImportError:
        note = f"{WITHOUT}."
    if left := [plot.id for plot in plots[len(pictures) :]]:
        note = f"Not drawn here: {listed(left)}; {note}"
        result = result.model_copy(update={"notes": (*result.notes, note)})
    template: Any = _environment().get_template("page.html.j2").module
    section = template.section(Section(slug, result.directory or result.kind, result, pictures))
    page = Path(result.directory or "") / "index.html"
    if page.is_file():  # of `report`
        section += Markup('<p>The page: <a href="{0}">{0}</a></p>').format(clean(str(page)))
    return f'<div class="mlxstacks"><style>{_NOTEBOOK_STYLE}</style>{section}</div>'


def _image(kind: str, data: bytes, name: str, alt: str) -> Picture:
    """A plot as an <img>: of an SVG in its own markup, a notebook that is not trusted leaves only
    the labels.
    """
    image = Markup('<img alt="{}" src="data:image/{};base64,{}">')
    return name, image.format(clean(alt), kind, b64encode(data).decode()), True


def _svg_file(svg: str, name: str) -> bytes:
    """matplotlib's SVG as a file with paper and colours of its own, which are the page's."""
    colours = _environment().get_template("page.css").render().partition("\n* {")[0]
    drawn = str(picture(svg, name, "")[1])
    head, _, body = drawn.partition(">")
    head = re.sub(r'style="width:(\d+)px"', r'width="\1" xmlns="http://www.w3.org/2000/svg"', head)
    return f"{head}><style>{colours}</style>{body}".encode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("mlxstacks.study.render", "."),
        autoescape=True,
        finalize=lambda value: clean(value, LONGEST) if type(value) is str else value,
    )
    environment.filters["long"] = lambda text, longest: Markup(escape(clean(text, longest)))
    environment.filters["prose"] = _prose
    environment.filters["capital"] = capital
    environment.globals["no_value"] = Markup(f'<span class="missing">{NO_VALUE}</span>')
    environment.globals["power_title"] = POWER
    environment.globals["missing"] = Markup(f'<span class="missing">{NOT_MEASURED}</span>')
    return environment


def _prose(text: str, longest: int = LONGEST) -> Markup:
    """A text in which no option (`--save-path`) breaks at its hyphens."""
    whole = r'<span class="option">\g<0></span>'
    return Markup(_OPTION.sub(whole, str(escape(clean(text, longest)))))


def _pairs(values: Mapping[str, Any]) -> list[Pair]:
    """Names and values; parts of a nested one as `name.part`."""
    pairs: list[Pair] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            pairs += [
                (short(f"{name}.{inner}", 120), _plain(part)) for inner, part in value.items()
            ]
        else:
            pairs.append((short(name, 120), _plain(value)))
    return pairs


def _plain(value: Any) -> str:
    """A JSON value in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value) or ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return listed(f"{name}: {_plain(part)}" for name, part in value.items()) or "none"
    return listed(map(_plain, value)) or "none"


def _table(block: Table) -> dict[str, Any]:
    rows = [
        [format_cell(cell, column) for cell, column in zip(row, block.columns, strict=True)]
        for row in block.rows[:MOST_ROWS]
    ]
    hidden = len(block.rows) - len(rows)
    more = f"{hidden:,} more rows are in the result file." if hidden else ""
    columns = []
    for n, column in enumerate(block.columns):
        longest = max((len(row[n] or "") for row in rows), default=0)
        columns.append({
            "name": column.name,
            "right": column.kind != "text" and n > 0,
            "short": longest <= (_SHORT_CELL if n else _SHORT_NAME),
        })  # fmt: skip
    return {
        "title": block.title,
        "id": block.id,
        "columns": columns,
        "rows": rows,
        "count": f"{len(block.rows):,}",
        "note": f"{block.caption} {more}".strip(),
        "folded": block.folded,
    }  # fmt: skip


# --- plots ----------------------------------------------------------------------------------------

# Colour in matplotlib's file -> variable of the page's style.
_VARIABLES = {
    INK: "var(--ink)", RULE: "var(--rule)", PAPER: "var(--page)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)},
}  # fmt: skip
# matplotlib writes metadata with addresses and a style for the whole document.
_GONE = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>"
    r'|<style type="text/css">.*?</style>',
    re.DOTALL,
)
_VIEW = re.compile(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"')
_TAG = re.compile(r"<(?!!)[^>]*>")
_POINTS_IN_PIXELS = 4 / 3


def picture(svg: str, name: str, alt: str) -> Picture:
    """matplotlib's SVG as part of a page. name: unique in it; alt: what the picture shows.

    Laws: colours and ids change inside tags only, never in a label; no address is left.
    Raises: InputError for a text that is no SVG of matplotlib.
    """
    text = _GONE.sub("", svg)
    view = _VIEW.search(text)
    start, end = text.find("<svg"), text.rfind("</svg>")
    if view is None or start < 0 or end < start:
        raise InputError(f"{name}: matplotlib wrote no SVG with a viewBox; another version of it?")
    body = text[text.index(">", start) + 1 : end]
    known = re.compile("|".join(_VARIABLES), re.IGNORECASE)

    def of_page(match: re.Match[str]) -> str:
        """A tag with the page's colours, ids that begin with `name`, links without a namespace."""
        tag = match.group()
        tag = known.sub(lambda colour: _VARIABLES[colour.group().lower()], tag)
        tag = re.sub(r'\bid="', f'id="{name}-', tag).replace("url(#", f"url(#{name}-")
        return tag.replace('xlink:href="#', f'href="#{name}-')

    body = _TAG.sub(of_page, body)
    body = re.sub(r">\s*\n\s*<", "><", body).strip()
    width, height = (float(size) for size in view.groups())
    pixels = round(width * _POINTS_IN_PIXELS)
    head = Markup(
        '<svg viewBox="0 0 {:g} {:g}" role="img" aria-labelledby="{}-alt" style="width:{}px">'
        '<title id="{}-alt">{}</title>'
    ).format(width, height, name, pixels, name, clean(alt))
    return name, head + Markup(body + "</svg>"), pixels > _WIDE
