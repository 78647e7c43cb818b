"""From results to a directory: index.html, figures/, recipes/, report.json."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, staged_directory, write_json
from mlxstacks.report.content import Plot
from mlxstacks.report.find import Source, Sources, find_sources
from mlxstacks.report.page import Page, page_html, plot_name, slug_of
from mlxstacks.report.runs import EXPLORATORY, Run, run_of
from mlxstacks.report.settings import ReportSettings
from mlxstacks.report.svg import inline_svg
from mlxstacks.study.render.drawings import STYLE
from mlxstacks.study.render.figures import write_figures
from mlxstacks.study.render.words import clean

INDEX, FIGURES, RECIPES, REPORT = "index.html", "figures", "recipes", "report.json"


@dataclass(frozen=True)
class Report:
    """status: "planned" or "done". figures: files written in figures/; notes: of the whole page."""

    status: str
    save_path: str
    settings: dict[str, Any]
    runs: tuple[Run, ...]
    figures: tuple[str, ...] = ()
    page_bytes: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> str:
        marked = sum(run.standing == EXPLORATORY for run in self.runs)
        said = f"{len(self.runs)} result{'' if len(self.runs) == 1 else 's'}, {marked} exploratory"
        then = "planned only, nothing was written" if self.status == "planned" else "see the page"
        return f"{said}; {then}."

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "report",
            "status": self.status,
            "save_path": self.save_path,
            "settings": self.settings,
            "runs": [_run_json(run) for run in self.runs],
            "figures": list(self.figures),
            "page_bytes": self.page_bytes,
            "versions": {"mlxstacks": version("mlxstacks")},
            "notes": list(self.notes),
            "verdict": self.verdict,
        }


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "name": run.source.name,
        "path": run.source.path,
        "file": run.source.file,
        "sha256": run.source.sha256,
        "kind": run.source.kind,
        "status": run.status,
        "outcome": run.content.outcome,
        "verdict": run.content.verdict,
        "standing": run.standing,
        "reasons": list(run.reasons),
        "plan_sha256": run.plan_sha256,
    }


def write_report(
    settings: ReportSettings, *, dry_run: bool = False, notes: Sequence[str] = ()
) -> Report:
    """The page of `settings.runs`, in `settings.save_path`; with `dry_run` only read and checked.

    Law: equal results give equal bytes. Raises: InputError for a run without a result, a result
    that is damaged or unknown, and a target that cannot be written.
    """
    if settings.save_path is None or not settings.runs:
        raise InputError("report needs runs and save_path")
    target = user_path(settings.save_path)
    sources = find_sources(settings.runs)
    inputs = [Path(source.path) for source in sources.found]
    check_target(target, force=settings.force, inputs=inputs)
    runs = tuple(_runs(sources))
    said = (*notes, *sources.notes)
    if dry_run:
        return planned(settings, runs, said)
    shown = _shown(settings)
    with staged_directory(target, force=settings.force, inputs=inputs) as directory:
        figures, pictures, more = _write_figures(directory, runs, settings.formats)
        page = Page(
            clean(settings.title, 200), runs, pictures, _write_recipes(directory, runs),
            (*said, *more), settings.date, version("mlxstacks"),
        )  # fmt: skip
        data = page_html(page).encode("utf-8")
        (directory / INDEX).write_bytes(data)
        report = Report("done", str(target), shown, runs, tuple(figures), len(data), (*said, *more))
        write_json(directory / REPORT, report.as_json())
    return report


def planned(
    settings: ReportSettings, runs: Sequence[Run] = (), notes: Sequence[str] = ()
) -> Report:
    """What would be written. Touches nothing."""
    target = user_path(settings.save_path or "")
    return Report("planned", str(target), _shown(settings), tuple(runs), notes=tuple(notes))


def _shown(settings: ReportSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude={"force", "save_path"})


def _runs(sources: Sources) -> list[Run]:
    """Each with a slug of its own, made of its directory's name."""
    runs: list[Run] = []
    taken: set[str] = {"summary"}
    for source in sources.found:
        slug = _free(_slug(source), taken)
        taken.add(slug)
        runs.append(run_of(source, slug))
    return runs


def _slug(source: Source) -> str:
    # letters first: an anchor that begins with a digit needs escapes in style sheets
    return f"run-{slug_of(source.name)}"


def _free(slug: str, taken: set[str]) -> str:
    numbered = slug
    number = 2
    while numbered in taken:
        numbered, number = f"{slug}-{number}", number + 1
    return numbered


def _write_figures(
    directory: Path, runs: Sequence[Run], formats: Sequence[str]
) -> tuple[list[str], dict[str, str], list[str]]:
    """(files in figures/, name -> SVG for the page, notes). The page's SVGs are always drawn."""
    place = directory / FIGURES
    place.mkdir()
    plots = {
        plot_name(run, block): block
        for run in runs
        for block in run.content.blocks
        if isinstance(block, Plot)
    }
    drawings = [(name, plot.draw) for name, plot in plots.items()]
    wanted = [*dict.fromkeys(("svg", *formats))]
    with warnings.catch_warnings():
        # a letter that matplotlib's font has not: a box in the PNG, right in the page
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        written, notes = write_figures(place, drawings, wanted, style=STYLE)
    pictures = {
        name: inline_svg((place / f"{name}.svg").read_text("utf-8"), name, clean(plot.alt))
        for name, plot in plots.items()
        if f"{name}.svg" in written
    }
    if "svg" not in formats:
        for name in [name for name in written if name.endswith(".svg")]:
            (place / name).unlink()
            written.remove(name)
    if plots and not written and not notes:
        notes = ["No files of plots: no format was asked for."]
    return written, pictures, notes


def _write_recipes(directory: Path, runs: Sequence[Run]) -> Mapping[str, str]:
    """recipes/SLUG.yaml of each run that says its settings."""
    place = directory / RECIPES
    place.mkdir()
    found = {}
    for run in runs:
        if run.recipe is not None:
            path = f"{RECIPES}/{run.slug.removeprefix('run-')}.yaml"
            (directory / path).write_text(run.recipe.text, encoding="utf-8")
            found[run.slug] = path
    return found
