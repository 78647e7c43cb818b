"""From results to a page: index.html, figures/, recipes/, and a result.json of its own."""

import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, mark_bare, staged_directory
from mlxstacks.memory import bytes_in_words
from mlxstacks.recipe.resolve import OUT
from mlxstacks.recipe.table import COMMANDS
from mlxstacks.report.find import Source, find_sources
from mlxstacks.report.settings import ReportSettings
from mlxstacks.study.document import Columns, Plot, Table, Text, counted
from mlxstacks.study.render.figures import write_figures
from mlxstacks.study.render.html import (
    Page,
    Picture,
    Section,
    page_html,
    picture,
)
from mlxstacks.study.render.words import clean, listed, nbytes
from mlxstacks.study.repeat import Recipe, recipe_of
from mlxstacks.study.result import Result
from mlxstacks.study.write import write_result

INDEX, FIGURES, RECIPES = "index.html", "figures", "recipes"
# Of each result, in the data of the page's own.
_TOLD = ("kind", "status", "verdict", "plan_sha256")


def run(
    settings: ReportSettings, *, dry_run: bool = False, progress: Callable[..., None] | None = None
) -> Result:
    """The page of the runs given, or of all under ./mlxstacks-out; of a small one that is made
    first where there is none. With `dry_run` nothing is made.

    Raises: InputError: see `write_report`.
    """
    if settings.runs:
        return write_report(settings, dry_run=dry_run)
    try:
        anything = bool(find_sources([str(OUT)])[0])
    except InputError:
        # a damaged result is no absent one: it is named when the page is made
        anything = any(OUT.glob("*/result.json"))
    notes = []
    if not anything and (unfinished := sorted(work.name for work in OUT.glob(".*.work"))):
        names = ", ".join(name.removeprefix(".").removesuffix(".work") for name in unfinished)
        raise InputError(
            f"./{OUT}: no finished result yet; {names}: the same command again finishes it, and "
            "`mlxstacks report RUN...` takes results from elsewhere"
        )
    if not anything:
        first = "nano's sample adapter and its zero-delta control"
        if dry_run:
            note = f"Nothing is under ./{OUT} yet: {first} would be fused first."
            return planned_report(settings, notes=[note])
        _fuse_nano(progress)
        notes = [f"Nothing was under ./{OUT} yet, so {first} were fused first."]
    settings = settings.model_copy(update={"runs": (str(OUT),)})
    return write_report(settings, dry_run=dry_run, notes=notes)


def _fuse_nano(progress: Callable[..., None] | None) -> None:
    """A fuse of nano's adapter and its control, where bare runs of `fuse` write as well."""
    from mlxstacks.fuse.run import run as fuse
    from mlxstacks.fuse.settings import FuseSettings
    from mlxstacks.nano.exports import nano_paths

    paths = nano_paths()
    for name, zero in (("fuse", False), ("fuse-zero-delta", True)):
        target = OUT / name
        fuse(
            FuseSettings(
                model=str(paths.model_path), adapter_path=(str(paths.adapter_path),),
                save_path=str(target), zero_delta=zero,
            ),
            progress=progress,
        )  # fmt: skip
        mark_bare(target)


def write_report(
    settings: ReportSettings, *, dry_run: bool = False, notes: Sequence[str] = ()
) -> Result:
    """The page of `settings.runs`, in `settings.save_path`; with `dry_run` only read and checked.

    Law: equal results give equal bytes. Raises: InputError for a run without a result, a result
    that is damaged or unknown, and a target that cannot be written.
    """
    if settings.save_path is None or not settings.runs:
        raise InputError("report needs runs and save_path")
    target = user_path(settings.save_path)
    sources, passed_over = find_sources(settings.runs)
    inputs = [Path(source.path) for source in sources]
    check_target(target, force=settings.force, inputs=inputs)
    planned = planned_report(settings, sources, (*notes, *passed_over))
    if dry_run:
        return planned
    slugs = _slugs([source.name for source in sources])
    with staged_directory(target, force=settings.force, inputs=inputs) as directory:
        pictures, figures, more = _draw(directory / FIGURES, sources, slugs, settings.formats)
        (directory / RECIPES).mkdir()
        sections = [
            _section(directory, source, slug, pictures.get(slug, []))
            for source, slug in zip(sources, slugs, strict=True)
        ]
        notes = (*planned.notes, *more)
        page = Page(
            clean(settings.title, 200), sections, notes, settings.date, version("mlxstacks")
        )
        data = page_html(page).encode("utf-8")
        (directory / INDEX).write_bytes(data)
        plots = counted(len(figures), "file")
        wrote = f"The page, {INDEX}, has {bytes_in_words(len(data))}; {plots} of plots."
        result = planned.model_copy(
            update={
                "status": "done", "verdict": wrote, "notes": notes,
                "data": {**planned.data, "figures": figures, "page_bytes": len(data)},
            }
        )  # fmt: skip
        return write_result(result, directory, target, sources=())


def planned_report(
    settings: ReportSettings, sources: Sequence[Source] = (), notes: Sequence[str] = ()
) -> Result:
    """What would be written. Touches nothing."""
    runs = [
        {
            "name": source.name, "path": source.path, "file": source.file, "sha256": source.sha256,
            **{key: getattr(source.result, key) for key in _TOLD},
            "outcome": source.result.shown_outcome,
            "standing": Section("", "", source.result).standing.partition(":")[0],
            "reasons": list(source.result.standing.reasons),
        }
        for source in sources
    ]  # fmt: skip
    marks = sum(Section("", "", source.result).exploratory for source in sources)
    any_plan = any(source.result.plan_sha256 for source in sources)
    names = ("run", "kind", "outcome", *["standing"] * any_plan)
    columns: Columns = dict.fromkeys(names, "text")
    rows = [(r["name"], r["kind"], r["outcome"], *[r["standing"]] * any_plan) for r in runs]
    table = Table.of("runs", "Results", columns, rows)
    verdicts = [Text(title=r["name"], paragraphs=(r["verdict"], *_marked(r["reasons"])))
                for r in runs if r["verdict"]]  # fmt: skip
    return Result(
        kind="report", title=settings.title, status="planned", notes=tuple(notes),
        data={"runs": runs},
        blocks=(table, *verdicts) if runs else (),
        settings=settings.model_dump(mode="json", exclude={"force", "save_path"}),
        outcome=f"{len(runs)} result{'' if len(runs) == 1 else 's'}, {marks} exploratory",
        directory=str(user_path(settings.save_path or "")),
    )  # fmt: skip


def _marked(reasons: Sequence[str]) -> list[str]:
    return [f"EXPLORATORY: {reason}" for reason in reasons]


def _slugs(names: Sequence[str]) -> list[str]:
    """Letters, digits and dashes, for anchors and file names; each once. Letters first: an anchor
    that begins with a digit needs escapes in style.
    """
    slugs: list[str] = []
    for name in names:
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "run"
        numbered = (f"run-{plain}" + (f"-{n}" if n > 1 else "") for n in itertools.count(1))
        slugs.append(next(slug for slug in numbered if slug not in slugs))
    return slugs


def _draw(
    directory: Path, sources: Sequence[Source], slugs: Sequence[str], formats: Sequence[str]
) -> tuple[dict[str, list[Picture]], list[str], list[str]]:
    """(slug -> pictures of the page, files in `directory`, notes). The page's are always drawn."""
    directory.mkdir()
    plots = {
        (slug, f"{slug}-{block.id}"): block
        for source, slug in zip(sources, slugs, strict=True)
        for block in source.result.shown_blocks
        if isinstance(block, Plot)
    }
    with warnings.catch_warnings():
        # a letter that matplotlib's font has not: a box in the PNG, right in the page
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        named = {name: plot for (_, name), plot in plots.items()}
        written, notes = write_figures(directory, named, [*dict.fromkeys(("svg", *formats))])
    pictures: dict[str, list[Picture]] = {}
    for (slug, name), plot in plots.items():
        file = directory / f"{name}.svg"
        if file.is_file():
            pictures.setdefault(slug, []).append(picture(file.read_text("utf-8"), name, plot.alt))
            if "svg" not in formats:
                file.unlink()
                written.remove(file.name)
    if plots and not written and not notes:
        notes = ["No files of plots: no format was asked for."]
    return pictures, written, notes


def _section(directory: Path, source: Source, slug: str, pictures: Sequence[Picture]) -> Section:
    kind, settings = source.result.kind, source.result.settings
    recipe = recipe_of(kind, settings) if settings and kind in COMMANDS else None
    repeat: dict[str, str] = {}
    if recipe is not None:
        repeat = _repeat(recipe, f"{RECIPES}/{slug.removeprefix('run-')}.yaml")
        (directory / repeat["file"]).write_text(recipe.text, encoding="utf-8")
    files = [(name, nbytes(count)) for name, count in source.files]
    if source.more_files:
        files.append((f"and {source.more_files:,} more files", ""))
    about = [
        ("directory", source.path), ("result file", source.file), ("its SHA-256", source.sha256),
    ]  # fmt: skip
    return Section(slug, source.name, source.result, pictures, repeat, about, files)


def _repeat(recipe: Recipe, file: str) -> dict[str, str]:
    where = "From anywhere; for PAGE, type where the directory of this page is:"
    notes = [f"It writes mlxstacks-out/{Path(file).stem} in the directory where it is run."]
    if recipe.of_nano:
        names = listed(recipe.of_nano)
        notes.append(f"The built-in nano model's own are found again on each machine: {names}.")
    if recipe.paths:
        names = listed(recipe.paths)
        notes.append(f"Paths of the machine of this result, to be set on another: {names}.")
    if recipe.relative:
        where = (
            "From the directory where this result was made; for PAGE, type where the directory of "
            "this page is:"
        )
        notes.append(
            "Other paths in it are relative to the directory where it is run: "
            f"{listed(recipe.relative)}."
        )
    return {"file": file, "text": recipe.text, "where": where, "note": " ".join(notes)}
