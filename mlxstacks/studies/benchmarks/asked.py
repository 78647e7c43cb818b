"""Which items of which tasks are asked: read, labelled, sampled, the same for every arm."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mlxstacks.data.sources import NotCachedError
from mlxstacks.errors import InputError
from mlxstacks.studies.benchmarks.arms import available_arms, check_arms
from mlxstacks.studies.benchmarks.sampling import sample_items
from mlxstacks.studies.benchmarks.settings import EvalSettings
from mlxstacks.studies.benchmarks.task_data import open_task, with_domain
from mlxstacks.studies.benchmarks.tasks import Task, task_named
from mlxstacks.studies.benchmarks.types import BenchItem

# Their stacks follow from an item's domain.
NEED_LABELS = ("oracle", "random")


@dataclass(frozen=True)
class AskedTask:
    """A task with the items that every arm of it answers.

    available: items before the sample. reference: the same items with the published script's
    prompts, where they are asked for. notes: on the data, and on arms that were left out.
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


@dataclass
class Unread:
    """Tasks without items here. datasets: task -> the data set to get; others: what is wrong."""

    datasets: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.datasets or self.others)

    def in_words(self) -> list[str]:
        """What is wrong; and one heading for all data sets, with lines to copy."""
        if not self.datasets:
            return list(self.others)
        commands = [
            f"  hf download --repo-type dataset {dataset}"
            for dataset in dict.fromkeys(self.datasets.values())
        ]
        heading = (
            f"{', '.join(self.datasets)}: not in the cache of Hugging Face data sets, and nothing "
            "is downloaded here; get them, or give files with --data:"
        )
        return [*self.others, "\n".join([heading, *commands])]


def ask_all(settings: EvalSettings, names: Sequence[str]) -> tuple[list[AskedTask], Unread]:
    """(tasks with their items, the others).

    Raises: InputError for a name of no task.
    """
    tasks = [task_named(name) for name in names]
    found, unread = [], Unread()
    for task in tasks:
        try:
            found.append(ask(settings, task))
        except NotCachedError as error:
            unread.datasets[task.name] = error.dataset
        except InputError as error:
            unread.others.append(f"{task.name}: {error}")
    return found, unread


def ask(settings: EvalSettings, task: Task) -> AskedTask:
    """One task's items. Raises: InputError where its data cannot be used, or holds no items."""
    # Without a chat template an instruction goes under the published headings.
    bare = task.kind == "generate" and settings.chat == "none"
    data = open_task(task, settings.data, reference=bare)
    first = settings.sample == "first"
    sample = sample_items(data.items, settings.items_per_task, settings.seed, first=first)
    items = tuple(_labelled(task.name, sample, settings))
    reference: tuple[BenchItem, ...] = ()
    if settings.reference_offset and task.kind == "likelihood":
        by_id = {i.item_id: i for i in open_task(task, settings.data, reference=True).items}
        reference = tuple(replace(by_id[i.item_id], domain=i.domain) for i in items)
    return AskedTask(task, items, len(data.items), (), reference, data.source, data.notes)


def limited(settings: EvalSettings, asked: AskedTask) -> AskedTask:
    """The part of a task's planned items that `settings.limit` leaves, drawn as the sample is."""
    first = settings.sample == "first"
    items = tuple(sample_items(asked.items, settings.limit, settings.seed, first=first))
    answered = {item.item_id for item in items}
    reference = tuple(item for item in asked.reference if item.item_id in answered)
    return replace(asked, items=items, reference=reference)


def _labelled(task: str, items: Sequence[BenchItem], settings: EvalSettings) -> list[BenchItem]:
    """Items with the domain that `settings.domains` gives their subject, else their task."""
    domains = settings.domain_of
    every = domains.get(task)
    return with_domain(with_domain(items, every) if every else items, domains)


def with_arms(
    settings: EvalSettings, asked: Sequence[AskedTask]
) -> tuple[list[AskedTask], tuple[str, ...]]:
    """(the tasks with the arms that answer each, all arms), in one order.

    Raises: InputError for an arm asked for that lacks its adapter or store, or that needs labelled
        items where no task has them.
    """
    labelled = any(_is_labelled(one.items) for one in asked) or bool(settings.harness_domains)
    arms = (
        check_arms(settings.arms, settings)
        if settings.arms
        else available_arms(settings, labelled=labelled)
    )
    lacking = [name for name in arms if name in NEED_LABELS]
    if asked and lacking and not labelled:
        raise InputError(
            f"arm {' and '.join(lacking)} needs items that name a domain, and no task has such; "
            "give --domains SUBJECT=DOMAIN, or leave it out"
        )
    return [_with_arms(one, arms) for one in asked], arms


def _with_arms(one: AskedTask, arms: Sequence[str]) -> AskedTask:
    needing = [name for name in arms if name in NEED_LABELS]
    without = sum(item.domain is None for item in one.items)
    if not needing or not without:
        return replace(one, arms=tuple(arms))
    them = " and ".join(needing)
    if without < len(one.items):
        note = f"{without} of {len(one.items)} items name no domain: in {them} the base answers"
        return replace(one, arms=tuple(arms), notes=(*one.notes, note))
    note = f"without {them}: no item names a domain (--domains SUBJECT=DOMAIN gives it one)"
    kept = tuple(name for name in arms if name not in needing)
    return replace(one, arms=kept, notes=(*one.notes, note))


def _is_labelled(items: Sequence[BenchItem]) -> bool:
    return any(item.domain is not None for item in items)
