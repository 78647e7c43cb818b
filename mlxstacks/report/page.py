"""The page: a head, a summary of all runs, a section for each; no script, nothing from outside."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from mlxstacks.report.content import Block, Cell, Plot, Raw, Table, Words
from mlxstacks.report.html import Markup, missing, of_class, tag, text
from mlxstacks.report.runs import EXPLORATORY, Run, short_hash
from mlxstacks.report.style import STYLE
from mlxstacks.study.render.words import NOT_MEASURED, beginning, clean, listed, nbytes, short

# Nothing is loaded, nothing runs; only the style in the page itself applies.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
_LONGEST_VERDICT = 20_000
# Of a verdict in a row of the summary, in characters.
_LONGEST_BEGINNING = 360
# As wide as this, in pixels, a plot gets a row of its own.
_WIDE = 560
_NUMBER = re.compile(
    r"(below )?[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( ?%| [kMG]?B| bytes)?"
    r"( of [\d,]+)?(, \d+%)?( \(.*\)| to .*)?"
)
# What stands for a number that there is none of.
_STAND_INS = ("", NOT_MEASURED, "no claim", "nothing to lose", "not fused", "no delta")
# Names and other cells up to this long stay on one line.
_SHORT_NAME, _SHORT_CELL = 28, 16
_NO_PLAN = "no plan: described, not tested"


@dataclass(frozen=True)
class Page:
    """What is printed. pictures: name of a plot, as `plot_name`, to its SVG for the page.

    recipes: slug -> path of the recipe beside the page. notes: of the whole page.
    """

    title: str
    runs: Sequence[Run]
    pictures: Mapping[str, str] = field(default_factory=dict)
    recipes: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    date: str | None = None
    version: str = ""


def plot_name(run: Run, plot: Plot) -> str:
    """Of its files and anchors; in a page each once."""
    return f"{run.slug}-{slug_of(plot.name)}"


def slug_of(name: str) -> str:
    """Letters, digits and dashes, for anchors and file names."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "run"


def page_html(page: Page) -> str:
    """The document. Law: equal pages give equal text."""
    head = tag(
        "head",
        tag("meta", attributes={"charset": "utf-8"}),
        tag("meta", attributes={"http-equiv": "Content-Security-Policy", "content": POLICY}),
        tag("meta", attributes={"name": "viewport",
                                "content": "width=device-width, initial-scale=1"}),
        tag("meta", attributes={"name": "color-scheme", "content": "light dark"}),
        tag("meta", attributes={"name": "referrer", "content": "no-referrer"}),
        # without it a browser asks the server for an icon
        tag("link", attributes={"rel": "icon", "href": "data:,"}),
        tag("title", page.title),
        tag("style", Markup(STYLE)),
    )  # fmt: skip
    body = tag(
        "body",
        of_class("a", "skip", "To the results", href="#summary"),
        of_class("div", "layout", _contents(page), _main(page)),
    )
    document = tag("html", head, body, attributes={"lang": "en"})
    return f"<!DOCTYPE html>\n{document}\n"


def _contents(page: Page) -> Markup:
    entries = [tag("li", tag("a", "Summary", attributes={"href": "#summary"}))]
    for run in page.runs:
        kind = of_class("span", "quiet", f" {run.kind.title.lower()}")
        link = tag("a", short(run.source.name, 40), attributes={"href": f"#{run.slug}"})
        entries.append(tag("li", link, kind))
    return tag("nav", tag("strong", "Contents"), tag("ul", entries),
               attributes={"aria-label": "Contents"})  # fmt: skip


def _main(page: Page) -> Markup:
    marked = sum(run.standing == EXPLORATORY for run in page.runs)
    said = f"{_count(len(page.runs), 'result')}, {marked or 'none'} exploratory."
    parts = [tag("h1", page.title), of_class("p", "quiet", said)]
    if page.date:
        parts.append(of_class("p", "quiet", page.date))
    parts += [of_class("p", "notice", note) for note in page.notes]
    parts.append(_summary(page))
    parts += [_section(page, run) for run in page.runs]
    made = f"Made by mlxstacks {page.version} report from result files, whose hashes are above."
    parts.append(tag("footer", tag("p", made)))
    return tag("main", parts)


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _summary(page: Page) -> Markup:
    columns = ("Run", "Outcome", "Verdict", "Standing", "Plan")
    head = tag("tr", [tag("th", column, attributes={"scope": "col"}) for column in columns])
    rows = []
    for run in page.runs:
        link = tag("a", short(run.source.name, 60), attributes={"href": f"#{run.slug}"})
        kind = of_class("div", "quiet", run.kind.title)
        cells = (
            of_class("span", "outcome", short(run.content.outcome, 160)),
            _beginning(run),
            _standing(run),
            tag("code", short_hash(run.plan_sha256)) if run.plan_sha256 else text("none"),
        )
        rows.append(tag(
            "tr", tag("th", link, kind, attributes={"scope": "row"}),
            [tag("td", cell, attributes={"data-label": column})
             for column, cell in zip(columns[1:], cells, strict=True)],
        ))  # fmt: skip
    caption = tag("caption", "What each run found, whichever way it went")
    table = of_class("table", "summary", caption, tag("thead", head), tag("tbody", rows))
    return tag(
        "section", tag("h2", "Summary"), of_class("div", "scroll", table),
        attributes={"id": "summary"},
    )  # fmt: skip


def _beginning(run: Run) -> Markup:
    """Whole sentences, as many as a row holds; all of them are in the run's own section."""
    verdict = run.content.verdict
    if not verdict:
        return missing()
    said = text(_capital(beginning(verdict, _LONGEST_BEGINNING)))
    if len(said) >= len(text(" ".join(verdict.split()), _LONGEST_VERDICT)):
        return said
    more = tag("a", "More", attributes={
        "href": f"#{run.slug}", "aria-label": f"More of {short(run.source.name, 60)}",
    })  # fmt: skip
    return Markup(f"{said} {more}")


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _standing(run: Run) -> Markup:
    if run.standing == EXPLORATORY:
        return of_class("span", "tag exploratory", "EXPLORATORY")
    return of_class("span", "tag", _NO_PLAN if run.standing == "no plan" else run.standing)


def _section(page: Page, run: Run) -> Markup:
    mark = f" ({EXPLORATORY})" if run.standing == EXPLORATORY else ""
    title = tag("h2", f"{run.kind.title}: {short(run.source.name, 80)}{mark}",
                attributes={"id": f"{run.slug}-title"})  # fmt: skip
    parts = [title, _verdict(run), _tags(run)]
    if run.reasons:
        reasons = [tag("li", reason) for reason in run.reasons]
        parts.append(of_class("div", "notice", tag("p", "Not what was planned:"),
                              tag("ul", reasons)))  # fmt: skip
    asked = "Question" if run.hypothesis == run.kind.question else "Hypothesis"
    parts.append(tag("p", tag("strong", f"{asked}: "), text(run.hypothesis)))
    plots = [block for block in run.content.blocks if isinstance(block, Plot)]
    if plots and page.pictures:
        figures = [_figure(page, run, plot) for plot in plots]
        parts.append(of_class("div", "plots", figures))
    parts += [_block(block) for block in run.content.blocks if not isinstance(block, Plot)]
    parts += [_listed("Power of the plan", run.power), _listed("Notes", run.notes)]
    parts += [_repeat(page, run), *_about(run)]
    return of_class(
        "section", "run", parts, id=run.slug, **{"aria-labelledby": f"{run.slug}-title"}
    )


def _verdict(run: Run) -> Markup:
    said = run.content.verdict
    words = tag("p", text(_capital(said), _LONGEST_VERDICT)) if said else tag("p", missing())
    return of_class("div", "verdict", of_class("p", "outcome", run.content.outcome), words)


def _tags(run: Run) -> Markup:
    tags = [_standing(run), of_class("span", "tag", f"status: {short(run.status, 40)}")]
    if run.plan_sha256:
        said = (text("plan "), tag("code", short_hash(run.plan_sha256)))
        tags.append(of_class("span", "tag", said, title=run.plan_sha256))
    return of_class("ul", "tags", [tag("li", one) for one in tags])


def _figure(page: Page, run: Run, plot: Plot) -> Markup:
    name = plot_name(run, plot)
    picture = page.pictures.get(name, "")
    width = re.search(r'style="width:(\d+)px"', picture)
    kind = "wide" if width and int(width.group(1)) > _WIDE else "plot"
    caption = tag("figcaption", plot.caption) if plot.caption else Markup("")
    scroll = of_class("div", "scroll", Markup(picture))
    return of_class("figure", kind, scroll, caption, id=name)


def _block(block: Block) -> Markup:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Words):
        return tag("div", tag("h3", block.title), [tag("p", words) for words in block.paragraphs])
    assert isinstance(block, Raw)
    return tag("details", tag("summary", block.title), tag("pre", text(block.text, 200_000)))


def _table(block: Table) -> Markup:
    """A table with a caption; columns of numbers to the right; folded where it is long."""
    columns = range(len(block.columns))
    right = {c for c in columns if c and all(_is_number(row[c]) for row in block.rows)}
    head = [
        tag("th", name, attributes={"scope": "col"} | ({"class": "number"} if c in right else {}))
        for c, name in enumerate(block.columns)
    ]
    kinds = [_kind(block, c, c in right) for c in columns]
    rows = []
    for row in block.rows:
        first = tag("th", _cell(row[0]), attributes={"scope": "row", **kinds[0]})
        rest = [
            tag("td", _cell(cell), attributes=kinds[c]) for c, cell in enumerate(row[1:], start=1)
        ]
        rows.append(tag("tr", first, rest))
    if not rows:
        empty = tag("td", missing(), attributes={"colspan": str(len(block.columns))})
        rows = [tag("tr", empty)]
    caption = tag("caption", block.title)
    whole = tag("table", caption, tag("thead", tag("tr", head)), tag("tbody", rows))
    # reachable by keyboard, since it may have to be scrolled
    scroll = of_class("div", "scroll", whole, tabindex="0", role="region",
                      **{"aria-label": short(block.title, 100)})  # fmt: skip
    notes = [block.note] if block.note else []
    if block.hidden:
        notes.append(f"{block.hidden:,} more rows are in the result file.")
    below = of_class("p", "note", " ".join(notes)) if notes else Markup("")
    if block.folded:
        count = _count(len(block.rows) + block.hidden, "row")
        return tag("details", tag("summary", f"{block.title} ({count})"), scroll, below)
    return tag("div", scroll, below)


def _kind(block: Table, column: int, right: bool) -> dict[str, str]:
    """The class of a column's cells: of numbers, of what stays on one line, or none."""
    if right:
        return {"class": "number"}
    longest = max((len(str(row[column] or "")) for row in block.rows), default=0)
    return {"class": "name"} if longest <= (_SHORT_CELL if column else _SHORT_NAME) else {}


def _is_number(cell: Cell) -> bool:
    if cell is None or isinstance(cell, int | float):
        return True
    return cell in _STAND_INS or _NUMBER.fullmatch(cell) is not None


def _cell(cell: Cell) -> Markup:
    if cell is None:
        return missing()
    return text(f"{cell:,}" if isinstance(cell, int) else str(cell))


def _listed(title: str, lines: Sequence[str]) -> Markup:
    if not lines:
        return Markup("")
    return tag("div", tag("h3", title), tag("ul", [tag("li", _capital(line)) for line in lines]))


def _repeat(page: Page, run: Run) -> Markup:
    """The command that makes the run again, and the recipe it reads."""
    if run.recipe is None:
        return tag("div", tag("h3", "To repeat it"),
                   tag("p", "The result says no settings, so it has no command."))  # fmt: skip
    file = page.recipes.get(run.slug, "FILE")
    relative = run.recipe.relative
    here = "In the directory of this page; from elsewhere with the recipe's whole path:"
    there = "In the directory where this result was made, with the recipe's whole path:"
    where = tag("p", there if relative else here)
    recipe = tag("details", tag("summary", "The recipe"),
                 tag("pre", tag("code", text(run.recipe.text, 200_000))))  # fmt: skip
    command = tag("pre", tag("code", f"mlxstacks run {file}"))
    said = [f"It writes mlxstacks-out/{PurePath(file).stem} in the directory where it is run."]
    if run.recipe.of_nano:
        names = listed(run.recipe.of_nano)
        said.append(f"The built-in nano model's own are found anew on each machine: {names}.")
    if run.recipe.paths:
        names = listed(run.recipe.paths)
        said.append(f"Paths of the machine of this result, to be set on another: {names}.")
    if relative:
        said.append(
            "Other paths in it are relative to the directory where it is run: give the recipe's "
            f"whole path and run it where this result was made. They are: {listed(relative)}."
        )
    note = of_class("p", "note", " ".join(said))
    return tag("div", tag("h3", "To repeat it"), where, command, note, recipe)


def _about(run: Run) -> Iterable[Markup]:
    """Environment, plan, settings, files."""
    source = run.source
    where: list[tuple[str, Cell]] = [
        ("directory", source.path), ("result file", source.file), ("its SHA-256", source.sha256),
    ]  # fmt: skip
    yield _named("Environment", [*run.environment, *where])
    if run.plan:
        yield _named("The plan", [("SHA-256", run.plan_sha256), *run.plan])
    if run.settings:
        yield _named("Settings", run.settings)
    files = [(name, nbytes(count)) for name, count in source.files]
    if source.more_files:
        files.append((f"and {source.more_files:,} more files", ""))
    if files:
        yield _named("Files", files)


def _named(title: str, pairs: Sequence[tuple[str, Cell]]) -> Markup:
    rows = [
        tag("tr", tag("th", clean(name, 120), attributes={"scope": "row"}), tag("td", _cell(value)))
        for name, value in pairs
    ]
    caption = tag("caption", title)
    table = of_class("div", "scroll", tag("table", caption, tag("tbody", rows)))
    return tag("details", tag("summary", title), table)
