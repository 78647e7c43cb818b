"""Items of the benchmarks: read and checked, labelled, sampled, the same for every arm.

    open_task(task_named("arc_easy"), "data/").items    # of data/bench_arc_easy.jsonl
    open_task(task, None).notes                         # what a reader of the score must know

Data is from the Hugging Face cache, a file or a directory. Every row is an item or an error that
names its line; nothing is left out. What is decided before the first answer stands below: one plan
for each task, all in one document, since their tests are one family.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mlxstacks.data.arrow_sets import is_saved_set
from mlxstacks.data.settings import SourceSettings
from mlxstacks.data.sources import NotCachedError, OpenSource, open_source
from mlxstacks.errors import InputError, in_lines
from mlxstacks.files.adapters import match_adapter, read_adapter
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import has_shape_of, in_hub_cache, may_be_hub_id, resolve_model
from mlxstacks.files.store import Store, find_base
from mlxstacks.files.store_files import MANIFEST
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.studies.benchmarks.analysis import claims_of
from mlxstacks.studies.benchmarks.arms import base_of, choose_arms
from mlxstacks.studies.benchmarks.harness import find_tasks
from mlxstacks.studies.benchmarks.settings import (
    NEED_LABELS,
    NOT_OF_THE_PLAN,
    ArmName,
    ArmSettings,
    EvalSettings,
)
from mlxstacks.studies.benchmarks.tasks import (
    PUBLISHED_SHAPE,
    READERS,
    TASKS,
    BenchItem,
    RawItem,
    Task,
    bench_item,
    task_named,
)
from mlxstacks.study.document import counted
from mlxstacks.study.integrity import file_sha256
from mlxstacks.study.items import Item, stratified_sample
from mlxstacks.study.plan import Plan, ids_sha256
from mlxstacks.study.power import (
    POWER,
    items_for_mcnemar,
    least_effect_of_mcnemar,
)

_MOST_SHOWN = 8
# MMLU's published rows have no ids, and some of them occur twice.
_REPEATS_KNOWN = ("mmlu",)


@dataclass(frozen=True)
class AskedTask:
    """A task with the items that every arm of it answers, in the order of their source.

    available: items before the sample. reference: the same items with the published script's
    prompts, where they are asked for. source: as messages name it. notes: on the data, and on arms
    that were left out.
    """

    task: Task
    items: tuple[BenchItem, ...]
    available: int
    arms: tuple[str, ...] = ()
    reference: tuple[BenchItem, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def lettered(self) -> tuple[BenchItem, ...]:
        """Items whose options are lettered in the prompt."""
        return tuple(item for item in self.items if item.letters and item.candidates)

    @property
    def guess_rate(self) -> float | None:
        """What picking any candidate scores in the mean; None where answers are generated."""
        if not self.items or not all(item.candidates for item in self.items):
            return None
        return sum(1 / len(item.candidates) for item in self.items) / len(self.items)

    def as_json(self) -> dict[str, object]:
        return {
            "title": self.task.title, "kind": self.task.kind, "n": len(self.items),
            "available": self.available, "source": self.source, "arms": list(self.arms),
            "notes": list(self.notes),
        }  # fmt: skip


def open_task(task: Task, data: str | None, *, reference: bool = False) -> AskedTask:
    """All items of a benchmark.

    data: a file; a directory with one of `task.files`, or written by `save_to_disk`; None: the
    data set in the Hugging Face cache. reference: prompts as published (tasks.py).

    Raises: InputError where there is no data, listing every row that is no item, ids that occur
        twice, and rows without ids that are the same.
    """
    label, opened = _open(task, data)
    rows: list[tuple[str, RawItem]] = []  # where it stands, and what it holds
    problems: list[str] = []
    for where, row in opened.rows:
        try:
            rows.append((where, READERS[task.name](row)))
        except ValueError as error:
            problems.append(f"{where}: {error}")
    if problems and not rows:
        raise InputError(_foreign(task, label, problems))
    # A published set is what it is; in a file of one's own a row without an id that is there twice
    # is a mistake.
    repeats_are_errors = data is not None and task.name not in _REPEATS_KNOWN
    named, notes = _named(rows, problems, repeats_are_errors)
    if problems:
        raise InputError(in_lines(f"{label}: not usable as {task.title}:", problems))
    items = tuple(bench_item(task, raw, item_id, reference) for item_id, raw in named)
    if task.items is not None and len(items) != task.items:
        notes.insert(
            0,
            f"{len(items):,} items of the published {task.items:,}: "
            "scores are not comparable with published ones",
        )
    notes = [task.note] * bool(task.note) + notes
    return AskedTask(task, items, len(items), source=label, notes=tuple(notes))


def _open(task: Task, data: str | None) -> tuple[str, OpenSource]:
    if data is not None:
        path = user_path(data)
        if not path.is_dir():
            return data, open_source(SourceSettings(path=str(path)), Path.cwd())
        split = task.sources[0].split if task.sources else "test"
        if not is_saved_set(path):
            files = [path / name for name in task.files if (path / name).is_file()]
            if not files:
                raise InputError(
                    f"{path}: no file of {task.title}; put {' or '.join(task.files)} there, or "
                    "give its file by name"
                )
            path = files[0]
        return str(path), open_source(SourceSettings(path=str(path), split=split), Path.cwd())
    missing: list[InputError] = []
    for source in task.sources:
        settings = SourceSettings(dataset=source.dataset, name=source.name, split=source.split)
        try:
            return source.label, open_source(settings, Path.cwd())
        except InputError as error:
            missing.append(error)
    if not missing:
        raise InputError(f"{task.title}: no data; give a file in MMLU-Pro's form, with --data")
    message = f"{task.title}: " + "\n  ".join(map(str, missing))
    if all(isinstance(error, NotCachedError) for error in missing):
        raise NotCachedError(message, task.sources[0].dataset)
    raise InputError(message)


def _foreign(task: Task, label: str, problems: Sequence[str]) -> str:
    """No row is an item: this is another task's data, most likely."""
    name = Path(label).name
    other = next((other.name for other in TASKS.values() if name in other.files), task.name)
    first = problems[0].removeprefix(label).lstrip(", :")
    what = "give --data FILE, or DIR with"
    if other != task.name:
        what = f"it is for --tasks={other}: give --data DIR with"
    return (
        f"{label}: none of its {len(problems):,} rows is an item of {task.title} ({first}); {what} "
        f"{' or '.join(task.files)}"
    )


def _named(
    rows: Sequence[tuple[str, RawItem]], problems: list[str], repeats_are_errors: bool
) -> tuple[list[tuple[str, RawItem]], list[str]]:
    """(items with ids of their own, notes); what cannot be goes to `problems`.

    A row without an id gets the hash of its contents, the second of two such rows a number besides.
    """
    named: list[tuple[str, RawItem]] = []
    contents: dict[str, str] = {}  # hash -> where it was first
    places: dict[str, str] = {}  # id -> where
    times: Counter[str] = Counter()
    for where, raw in rows:
        # 16 digits: among a million rows two share one with a chance of 1 in 40 million.
        whole = [raw.question.strip(), list(raw.options), raw.gold, dict(raw.extra)]
        content = json_sha256(whole)[:16]
        times[content] += 1
        first = contents.setdefault(content, where)
        if first != where and raw.item_id is None and repeats_are_errors:
            problems.append(f"{where}: the same row as {first}")
        number = f"-{times[content]}" if times[content] > 1 else ""
        item_id = content + number if raw.item_id is None else raw.item_id
        if item_id in places:
            problems.append(f"{where}: id {item_id[:80]} was there already: {places[item_id]}")
        places[item_id] = where
        named.append((item_id, raw))
    repeated = len(rows) - len(contents)
    notes = (
        [f"{counted(repeated, 'item')} the same as an earlier one, word for word"]
        if repeated
        else []
    )
    remarks = Counter(raw.remark for _, raw in named if raw.remark)
    notes += [f"{counted(count, 'item')}: {remark}" for remark, count in remarks.items()]
    twins = [
        item_id for item_id, raw in named
        if isinstance(raw.gold, int) and raw.options.count(raw.options[raw.gold]) > 1
    ]  # fmt: skip
    if twins:
        notes.append(
            f"{counted(len(twins), 'item')} with the right answer twice: always a tie by text, "
            f"which counts as wrong: {', '.join(twins[:_MOST_SHOWN])}"
        )
    return named, notes


def sample_items(
    items: Sequence[BenchItem], limit: int | None, seed: int, *, first: bool = False
) -> list[BenchItem]:
    """At most `limit` items in the order of the source, each stratum in proportion to its share.

    first: the first rows instead, as published; MMLU is in the order of its subjects, so that these
    are of one or two of them.

    Laws: strata differ from their exact share by less than one item; the same seed gives the same
    items; whether an item is drawn does not hang on the order of the others.

    Raises: InputError where there are no items.
    """
    if not items:
        raise InputError("no items to sample; the data holds none, or a filter left none")
    if first:
        return list(items[:limit])
    by_id = {item.item_id: item for item in items}
    drawn = stratified_sample(
        [Item(item.item_id, item.stratum, "", (), 0) for item in items], limit, seed
    )
    return [by_id[item.item_id] for item in drawn]


def ask_all(settings: EvalSettings, names: Sequence[str]) -> tuple[list[AskedTask], list[str]]:
    """(tasks with their items, what is wrong with others), all data sets that are not in the cache
    under one heading, with lines to copy.

    Raises: InputError for a name of no task.
    """
    named = "tasks" in settings.model_fields_set
    if settings.data and not named and user_path(settings.data).is_file():
        raise InputError(
            "data: a file is of one task, and --tasks NAME names it; --tasks=items takes nano's "
            "items (the default without a model of your own) and rows of your own, "
            "{'question': ..., 'options': ['...', '...'], 'answer': 'A'}"
        )
    asked: list[AskedTask] = []
    faults: dict[str, list[str]] = {}  # what is wrong -> the tasks that meet it
    datasets: dict[str, str] = {}  # task -> the data set to get
    for task in [task_named(name) for name in names]:
        try:
            asked.append(ask(settings, task))
        except NotCachedError as error:
            datasets[task.name] = error.dataset
        except InputError as error:
            faults.setdefault(str(error), []).append(task.name)
    problems = [f"{', '.join(tasks)}: {fault}" for fault, tasks in faults.items()]
    if datasets:
        heading = (
            f"{', '.join(datasets)}: not in the cache of Hugging Face data sets, and nothing is "
            "downloaded here; get them, or give files with --data:"
        )
        commands = [
            f"  hf download --repo-type dataset {dataset}"
            for dataset in dict.fromkeys(datasets.values())
        ]
        if not named and len(commands) > 3:
            commands[2:] = [f"  and {len(commands) - 2} more"]
        problems.append("\n".join([heading, *commands]))
    return asked, problems


def ask(settings: EvalSettings, task: Task) -> AskedTask:
    """One task's items. Raises: InputError where its data cannot be used, or holds no items."""
    # Without a chat template an instruction goes under the published headings.
    bare = task.kind == "generate" and settings.chat == "none"
    whole = open_task(task, settings.data, reference=bare)
    first = settings.sample == "first"
    sample = sample_items(whole.items, settings.items_per_task, settings.seed, first=first)
    # The domain that `settings.domains` gives an item's subject, else its task.
    domains = settings.domain_of
    items = tuple(
        replace(item, domain=domains.get(item.stratum, domains.get(task.name, item.domain)))
        for item in sample
    )
    reference: tuple[BenchItem, ...] = ()
    if settings.reference_offset and task.kind == "likelihood":
        by_id = {i.item_id: i for i in open_task(task, settings.data, reference=True).items}
        reference = tuple(replace(by_id[i.item_id], domain=i.domain) for i in items)
    return replace(whole, items=items, reference=reference)


def limited(settings: EvalSettings, asked: AskedTask) -> AskedTask:
    """The part of a task's planned items that `settings.limit` leaves, drawn as the sample is."""
    first = settings.sample == "first"
    items = tuple(sample_items(asked.items, settings.limit, settings.seed, first=first))
    answered = {item.item_id for item in items}
    reference = tuple(item for item in asked.reference if item.item_id in answered)
    return replace(asked, items=items, reference=reference)


def _refuse_near_misses(settings: EvalSettings, asked: Sequence[AskedTask]) -> None:
    """Raises: InputError: `domains` has a name that is all but that of a task, subject or stack.
    Other names may be of items that were not drawn, or of domains that have no stack yet.
    """
    subjects = {i.stratum for task in asked for i in task.items} - {None}
    tasks = {*settings.tasks, *(t.name for t in asked), *settings.harness_tasks, *subjects}
    known = {"task or subject": tasks, "domain": set[str]()}
    if settings.store_path and (user_path(settings.store_path) / MANIFEST).is_file():
        known["domain"] = {d.name for d in Store.open(settings.store_path).manifest.domains}
    for pair in settings.domain_of.items():
        for name, (what, names) in zip(pair, known.items(), strict=True):
            close = get_close_matches(name, names, 1, cutoff=0.75)
            if name not in names and close:
                raise InputError(f"domains: no {what} {name!r}; did you mean {close[0]!r}?")


def with_arms(
    settings: EvalSettings, asked: Sequence[AskedTask]
) -> tuple[list[AskedTask], list[ArmName]]:
    """(the tasks with the arms that answer each, all arms), in one order.

    Raises: InputError for an arm asked for that lacks its adapter or store, or that needs labelled
        items where no task has them.
    """
    _refuse_near_misses(settings, asked)
    unlabelled = {task.name: sum(item.domain is None for item in task.items) for task in asked}
    of_harness = settings.harness_labels.keys() & {*settings.harness_tasks}
    labelled = bool(of_harness) or any(unlabelled[t.name] < len(t.items) for t in asked)
    arms = choose_arms(settings, settings.arms, labelled)
    needing = [name for name in arms if name in NEED_LABELS]
    if asked and needing and not labelled:
        raise InputError(
            f"arm {' and '.join(needing)} needs items that name a domain, and no task has such; "
            "give --domains SUBJECT=DOMAIN, or leave it out"
        )
    tasks = []
    for task in asked:
        of_task, notes = tuple[str, ...](arms), task.notes
        without, them = unlabelled[task.name], " and ".join(needing)
        if needing and without == len(task.items):
            of_task = tuple(name for name in arms if name not in needing)
            note = f"without {them}: no item names a domain (--domains SUBJECT=DOMAIN gives it one)"
            notes += (note,)
        elif needing and without:
            note = (
                f"{without} of {len(task.items)} items without a domain: in {them} the base answers"
            )
            notes += (note,)
        tasks.append(replace(task, arms=of_task, notes=notes))
    return tasks, arms


# --- what is decided before the first answer ------------------------------------------------------

HYPOTHESIS = "A mode of the model answers more or fewer items of a benchmark than its control."
TEST = "McNemar's exact test on the same items, two-sided; Holm over all tests of the run"
RULES = (
    "A difference counts where its p, adjusted by Holm's rule over all tasks and all pairs of "
    "arms, is below alpha; for all others no difference is shown, which is not the same as equal. "
    "Ties and replies without an answer are wrong. Means over tasks are judged by their "
    "intervals, widened so that those of all pairs of arms hold together."
)
# The difference for which each plan says how many items it takes.
_SOUGHT = 0.05
# What makes tokens, prompts and the end of an answer.
_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip


def plan_document(
    settings: EvalSettings,
    asked: Sequence[AskedTask],
    hashes: Mapping[str, str],
) -> dict[str, Any]:
    """Everything that is fixed. hashes: of model, adapter and store (`hashes_of`).

    Raises: as `harness_plan`.
    """
    return {
        "kind": "eval",
        "hypothesis": HYPOTHESIS,
        "rules": RULES,
        "test": TEST,
        "tests": sum(len(claims_of(task.arms)) for task in asked),
        "settings": settings.model_dump(mode="json", exclude=NOT_OF_THE_PLAN),
        "hashes": dict(hashes),
        "tasks": {task.name: task_plan(settings, task, hashes).as_json() for task in asked},
        "harness": harness_plan(settings),
    }


def harness_plan(settings: EvalSettings) -> dict[str, Any]:
    """What of the lm-evaluation-harness belongs into the plan.

    Task -> its hashes; of a group each of its tasks. lm_eval's own tasks read their data for it.
    Raises: InputError for a task that there is none of, or whose data is not there.
    """
    if not settings.harness_tasks:
        return {}
    return {
        task.name: {**task.fingerprint(settings.data), "limit": settings.items_per_task}
        for task in find_tasks(settings.harness_tasks, settings.task_files)
    }


def task_plan(settings: EvalSettings, asked: AskedTask, hashes: Mapping[str, str]) -> Plan:
    """The plan of one task."""
    task = asked.task
    how = f", by the {settings.normalisation} likelihood" if task.kind == "likelihood" else ""
    return Plan(
        hypothesis=HYPOTHESIS,
        arms=asked.arms,
        metric=f"{task.metric}: share of items answered rightly{how}",
        n=len(asked.items),
        items_sha256=ids_sha256(item.item_id for item in asked.items),
        test=TEST,
        thresholds={"alpha": settings.alpha, "least_gain": 0.0},
        seeds=(settings.seed,),
        data=data_of(asked, hashes),
        expected_rate=settings.expected_rate,
        expected_discordant=settings.expected_discordant,
        claims=claims_of(asked.arms),
        details={
            "kind": task.kind, "max_tokens": task.max_tokens, "sample": settings.sample,
            "available": asked.available, "normalisation": settings.normalisation,
        },
    )  # fmt: skip


def power_lines(settings: EvalSettings, counts: Mapping[str, int], tests: int) -> tuple[str, ...]:
    """What each number of items can show, with alpha shared among all tests of the run; nothing,
    where nothing is tested.
    """
    lines: list[str] = []
    if not tests:
        return ()
    alpha, discordant = settings.alpha / max(1, tests), settings.expected_discordant
    needed = ""
    if discordant >= _SOUGHT:
        count = items_for_mcnemar(discordant, _SOUGHT, alpha=alpha)
        needed = f"; {count:,} items find {100 * _SOUGHT:.0f} points"
    for n in sorted(set(counts.values())):
        names = ", ".join(name for name, count in counts.items() if count == n)
        least = least_effect_of_mcnemar(discordant, n, POWER, alpha)
        shown = "none is large enough" if least is None else f"{100 * least:.1f} points"
        lines.append(
            f"{n:,} items ({names}): smallest effect at 80% power, alpha {settings.alpha:g} shared "
            f"by the run's {tests} test(s): {shown}, if {discordant:.0%} of pairs differ{needed}"
        )
    return tuple(lines)


def data_of(asked: AskedTask, hashes: Mapping[str, str]) -> dict[str, str]:
    """Name -> hash of what a task's results depend on; of items all that a model or a grader sees
    of them, in their order.
    """
    items = [
        [i.item_id, i.prompt, i.gold, list(i.candidates), list(i.letters), i.stratum, i.domain,
         dict(i.extra)]
        for i in asked.items
    ]  # fmt: skip
    return {"items": json_sha256(items), **hashes}


def check_places(settings: ArmSettings) -> list[str]:
    """Whether model, adapter, store and router are here, before hours of anything else.

    Returns a line for a model that may be on the hub; it is downloaded when all else is in order.
    Raises: InputError naming each of the others that is not here.
    """
    named = {
        "adapter_path": settings.adapter_path, "store_path": settings.store_path,
        "router_path": settings.router_path,
    }  # fmt: skip
    missing = [
        f"{key} {path}: no such file or directory"
        for key, path in named.items()
        if path is not None and not user_path(path).exists()
    ]
    elsewhere = []
    if settings.model is not None and not user_path(settings.model).exists():
        if not may_be_hub_id(settings.model):
            missing.insert(0, f"model {settings.model}: no such directory, and no hub id")
        elif not in_hub_cache(settings.model):
            elsewhere = [f"model {settings.model}: no such directory, and not in the hub cache"]
    if missing:
        raise InputError("\n".join([*elsewhere, *missing]))
    return elsewhere


def check_arms_fit(settings: ArmSettings, arms: Sequence[str]) -> None:
    """Raises: AdapterError, StoreError: adapter or store are of another model; InputError: one
    is not there.
    """
    if settings.model is None:
        return
    if settings.adapter_path is not None and {"adapter", "fused"} & {*arms}:
        adapter = read_adapter(user_path(settings.adapter_path), stream=True)
        match_adapter(adapter, open_checkpoint(resolve_model(settings.model)), allow_base=True)
    if settings.store_path is not None and {"ungated", "routed", *NEED_LABELS} & {*arms}:
        find_base(Store.open(settings.store_path), settings.model)


def hashes_of(
    settings: ArmSettings, arms: Sequence[str], recorded: str | None = None
) -> dict[str, str]:
    """Of all that the arms are made from: model, tokenizer, adapter, store, router.

    recorded: the model's fingerprint in the plan of a run that goes on.

    Raises: InputError or CheckpointError where one is not there.
    """
    checkpoint = base_of(settings)
    hashes = {
        "model": fingerprint(checkpoint, recorded),
        "tokenizer": _files_sha256(checkpoint.directory, _TOKENIZER),
    }
    if settings.adapter_path is not None and {"adapter", "fused"} & {*arms}:
        adapter = user_path(settings.adapter_path)
        names = ("adapter_config.json", *sorted(p.name for p in adapter.glob("*.safetensors")))
        hashes["adapter"] = _files_sha256(adapter, names)
    if settings.store_path is not None and {"ungated", "routed", *NEED_LABELS} & {*arms}:
        hashes["store"] = _files_sha256(user_path(settings.store_path), ("manifest.json",))
    if settings.router_path is not None and "routed" in arms:
        router = user_path(settings.router_path)
        names = tuple(sorted(p.name for p in router.iterdir())) if router.is_dir() else ()
        hashes["router"] = _files_sha256(router, names) if names else file_sha256(router)
    return hashes


def is_published_model(settings: ArmSettings) -> bool:
    """Whether the model has the shape of the paper's. Raises: as `hashes_of`."""
    return has_shape_of(base_of(settings).config, PUBLISHED_SHAPE)


def _files_sha256(directory: Path, names: Sequence[str]) -> str:
    paths = [directory / name for name in names if (directory / name).is_file()]
    if not paths:
        raise InputError(f"{directory}: has none of {', '.join(names)}")
    return json_sha256([[path.name, file_sha256(path)] for path in paths])
