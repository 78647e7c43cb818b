"""Items of a benchmark, read and checked: from the Hugging Face cache, a file or a directory.

    read_task(task_named("arc_easy"), "data/")    # data/bench_arc_easy.jsonl
    open_task(task, None).notes                   # what a reader of the score must know

Every row is an item or an error that names its line; nothing is left out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlxstacks.data.arrow_sets import is_saved_set
from mlxstacks.data.settings import SourceSettings
from mlxstacks.data.sources import NotCachedError, OpenSource, open_source
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.studies.benchmarks.task_prompts import bench_item
from mlxstacks.studies.benchmarks.task_rows import READERS, RawItem
from mlxstacks.studies.benchmarks.tasks import TASKS, Task
from mlxstacks.studies.benchmarks.types import BenchItem
from mlxstacks.study.items import read_items

_MOST_SHOWN = 8
# MMLU's published rows have no ids, and some of them occur twice.
_REPEATS_KNOWN = ("mmlu",)


@dataclass(frozen=True, slots=True)
class TaskData:
    """items: in the order of the source. source: as messages name it. notes: for the report."""

    task: Task
    items: list[BenchItem]
    source: str
    notes: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return bench_items_sha256(self.items)


def read_task(task: Task, data: str | None, *, reference: bool = False) -> list[BenchItem]:
    """The items of `open_task`."""
    return open_task(task, data, reference=reference).items


def open_task(task: Task, data: str | None, *, reference: bool = False) -> TaskData:
    """All items of a benchmark, in order.

    data: a file; a directory with one of `task.files`, or written by `save_to_disk`; None: the
    data set in the Hugging Face cache. reference: prompts as published (task_prompts.py).

    Raises: InputError where there is no data, listing every row that is no item, ids that occur
        twice, and rows without ids that are the same.
    """
    label, found, problems = _raw_items(task, data)
    named, notes = _named(found, problems, repeats_are_errors=_are_errors(task, data))
    if problems and not found:
        raise InputError(_foreign(task, label, problems))
    if problems:
        more = len(problems) - _MOST_SHOWN
        lines = problems[:_MOST_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise InputError(f"{label}: " + "\n  ".join([f"not usable as {task.title}:", *lines]))
    items = [bench_item(task, raw, item_id, reference) for item_id, raw in named]
    if task.items is not None and len(items) != task.items:
        notes.insert(
            0,
            f"{len(items):,} items of the published {task.items:,}: "
            "scores are not comparable with published ones",
        )
    return TaskData(task, items, label, tuple([task.note] * bool(task.note) + notes))


def _foreign(task: Task, label: str, problems: Sequence[str]) -> str:
    """No row is an item: this is another task's data, most likely."""
    name = Path(label).name
    theirs = next((other.name for other in TASKS.values() if name in other.files), None)
    first = problems[0].removeprefix(label).lstrip(", :")
    said = f"{label}: none of its {len(problems):,} rows is one of {task.title} ({first})"
    if theirs is not None and theirs != task.name:
        return f"{said}; it is for --tasks {theirs}: give --data DIR with {' or '.join(task.files)}"
    return f"{said}; give --data FILE, or DIR with {' or '.join(task.files)}"


def with_domain(items: Iterable[BenchItem], domain: str | Mapping[str, str]) -> list[BenchItem]:
    """The items labelled with the domain whose stacks they are for.

    domain: of all of them; or by stratum, and those of another stratum keep what they have.
    """
    by_stratum: Mapping[str, str] = {} if isinstance(domain, str) else domain
    every = domain if isinstance(domain, str) else None
    return [
        replace(item, domain=every or by_stratum.get(item.stratum, item.domain)) for item in items
    ]


def bench_items_sha256(items: Iterable[BenchItem]) -> str:
    """Hash of all that a model or a grader sees of these items, in their order."""
    return json_sha256(
        [
            [i.item_id, i.prompt, i.gold, list(i.candidates), list(i.letters), i.stratum,
             i.domain, dict(i.extra)]
            for i in items
        ]
    )  # fmt: skip


# --- rows -----------------------------------------------------------------------------------------

_Found = list[tuple[str, RawItem]]  # where it stands, and what it holds


def _raw_items(task: Task, data: str | None) -> tuple[str, _Found, list[str]]:
    """(label, raw items, what is wrong with other rows)."""
    if task.name in READERS:
        label, opened = _open(task, data)
        return label, *_read(task, opened)
    # MMLU-Pro's form has a reader already.
    if data is None and not task.sources:
        raise InputError(f"{task.name}: no data; give a file in MMLU-Pro's form")
    place = task.sources[0].dataset if data is None else data
    path = None if data is None else user_path(data)
    if path is not None and path.is_dir() and not is_saved_set(path):
        place = str(_file_in(task, path))
    found = [
        (f"id {item.item_id}",
         RawItem(item.question, item.answer_index, tuple(text.strip() for text in item.options),
                 item.item_id, item.subject))
        for item in read_items(place)
    ]  # fmt: skip
    blank = [f"{where}: a blank option" for where, raw in found if not all(raw.options)]
    return place, found, blank


def _read(task: Task, opened: OpenSource) -> tuple[_Found, list[str]]:
    reader = READERS[task.name]
    found: _Found = []
    problems: list[str] = []
    for where, row in opened.rows:
        try:
            found.append((where, reader(row)))
        except ValueError as error:
            problems.append(f"{where}: {error}")
    return found, problems


def _open(task: Task, data: str | None) -> tuple[str, OpenSource]:
    if data is not None:
        path = user_path(data)
        if not path.is_dir():
            return data, open_source(SourceSettings(path=str(path)), Path.cwd())
        split = task.sources[0].split
        place = path if is_saved_set(path) else _file_in(task, path)
        return str(place), open_source(SourceSettings(path=str(place), split=split), Path.cwd())
    missing: list[InputError] = []
    for source in task.sources:
        wanted = SourceSettings(dataset=source.dataset, name=source.name, split=source.split)
        try:
            return source.label, open_source(wanted, Path.cwd())
        except InputError as error:
            missing.append(error)
    said = f"{task.title}: " + "\n  ".join(map(str, missing))
    if missing and all(isinstance(error, NotCachedError) for error in missing):
        raise NotCachedError(said, task.sources[0].dataset)
    raise InputError(said)


def _file_in(task: Task, directory: Path) -> Path:
    for name in task.files:
        if (directory / name).is_file():
            return directory / name
    raise InputError(
        f"{directory}: no file of {task.title}; put {' or '.join(task.files)} there, or give its "
        "file by name"
    )


# --- ids and repeats ------------------------------------------------------------------------------


def _are_errors(task: Task, data: str | None) -> bool:
    """A published set is what it is; in a file of one's own a row without an id that is there twice
    is a mistake.
    """
    return data is not None and task.name not in _REPEATS_KNOWN


def _named(
    found: _Found, problems: list[str], *, repeats_are_errors: bool
) -> tuple[list[tuple[str, RawItem]], list[str]]:
    """(items with ids of their own, notes); what cannot be goes to `problems`.

    A row without an id gets the hash of its contents, the second of two such rows a number besides.
    """
    named: list[tuple[str, RawItem]] = []
    contents: dict[str, str] = {}  # hash -> where it was first
    places: dict[str, str] = {}  # id -> where
    again: Counter[str] = Counter()
    for where, raw in found:
        content = _content(raw)
        again[content] += 1
        first = contents.setdefault(content, where)
        if first != where and raw.item_id is None and repeats_are_errors:
            problems.append(f"{where}: the same row as {first}")
        times = f"-{again[content]}" if again[content] > 1 else ""
        item_id = content + times if raw.item_id is None else raw.item_id
        if item_id in places:
            problems.append(f"{where}: id {item_id[:80]} was there already: {places[item_id]}")
        places[item_id] = where
        named.append((item_id, raw))
    repeated = len(found) - len(contents)
    notes = [f"{repeated:,} items repeat an earlier one word for word"] if repeated else []
    return named, notes + _remarks(named)


def _content(raw: RawItem) -> str:
    """16 digits: among a million rows two share one with a chance of 1 in 40 million."""
    whole = json_sha256([raw.question.strip(), list(raw.options), raw.gold, dict(raw.extra)])
    return whole[:16]


def _remarks(named: Sequence[tuple[str, RawItem]]) -> list[str]:
    counts = Counter(raw.remark for _, raw in named if raw.remark)
    notes = [f"{count:,} items: {remark}" for remark, count in counts.items()]
    twins = [
        item_id for item_id, raw in named
        if isinstance(raw.gold, int) and raw.options.count(raw.options[raw.gold]) > 1
    ]  # fmt: skip
    if twins:
        notes.append(
            f"{len(twins)} items whose right answer is there twice always tie by text, which "
            f"counts as wrong: {', '.join(twins[:_MOST_SHOWN])}"
        )
    return notes
