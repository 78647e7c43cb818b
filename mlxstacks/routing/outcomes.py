"""Which set of domains lowers the loss of an answer: the search, and targets made of what it found.

A search is a generator: it yields sets of domains, is sent their losses, and returns a `Found`.
So one search knows nothing of models and batches, and many of them run side by side (`search_all`)
with their candidates in common batches.

Let f be the chat floor. base = loss of all stacks off; every other run has its domains at weight 1
and chat at f at least. Greedy (the default):

1. The domain with the lowest loss strictly below base becomes S; no threshold.
2. Of all S + {d} the lowest is taken when it is below the best so far by more than the threshold,
   again and again. Published code takes additions inside a pass instead (`greedy_first`): each
   domain that helps as it is met, several in a pass, until a pass adds none.
3. A soft domain that is not in S is added by any improvement, with target 0.5.

Source: Brainstacks, section on outcome discovery, and its code.

What a discovery leaves in its directory for the router's training:

examples.jsonl          every example: prompt, answer, label
outcomes.jsonl          of the examples that were searched: losses, the best set, targets
losses.jsonl            raw losses by content (candidate_losses.py)
result.json             settings, counts, tables; discover_report.json before version 0.2
"""

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from mlxstacks.data import numbered_records
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.strict_json import read_object
from mlxstacks.routing.settings import SearchName
from mlxstacks.study.document import RESULT
from mlxstacks.study.result import Result

# A set of domains that are on; the empty one is the base.
DomainSet = frozenset[str]
BASE: DomainSet = frozenset()
Weights = dict[str, float]
SOFT_TARGET = 0.5
# 1.00 - 0.99 in binary is more than 0.01 by some 1e-17: this much above a threshold is rounding.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Rules:
    """What the search obeys. domains: in the order of the store, which breaks ties."""

    domains: tuple[str, ...]
    threshold: float = 0.01
    chat_domain: str | None = None
    chat_floor: float = 0.2
    soft: tuple[str, ...] = ()
    label_share: float = 0.2
    search: SearchName = "greedy"

    def weights(self, on: DomainSet) -> Weights:
        """Weight of each domain that counts, in order: {} for the base."""
        return self._with_floor({d: 1.0 for d in self.domains if d in on}) if on else {}

    def floor_alone(self) -> Weights:
        """Chat at its floor and nothing else: the control of every set that has it in passing."""
        return self._with_floor({})

    def _with_floor(self, weights: Weights) -> Weights:
        chat = self.chat_domain
        if chat in self.domains and chat is not None and self.chat_floor > 0:
            weights = {**weights, chat: max(weights.get(chat, 0.0), self.chat_floor)}
        return {d: weights[d] for d in self.domains if d in weights}

    def ordered(self, on: Iterable[str]) -> tuple[str, ...]:
        inside = set(on)
        return tuple(d for d in self.domains if d in inside)


@dataclass(frozen=True)
class Found:
    """Result of a search. best: the set with the lowest accepted loss; empty where nothing beats
    the base. soft: those of it that only the soft boost added. losses: of all sets asked for.
    path: sets on the way to the best one, the last is `best`.
    """

    base_loss: float
    best_loss: float
    best: DomainSet
    soft: DomainSet
    losses: dict[DomainSet, float] = field(default_factory=dict)
    path: tuple[DomainSet, ...] = ()


Search = Generator[list[DomainSet], Mapping[DomainSet, float], Found]


def search(rules: Rules) -> Search:
    """The search of one example by `rules.search`."""
    sets = [frozenset([d]) for d in rules.domains]
    if rules.search == "exhaustive":
        sets = subsets(rules.domains)
    known: dict[DomainSet, float] = dict((yield [BASE, *sets]))
    base = best = known[BASE]
    on, soft, path = BASE, BASE, [BASE]
    lowest = min(sets, key=known.__getitem__, default=BASE)  # of equal ones the first, so smallest
    if known[lowest] < base:
        on, best = lowest, known[lowest]
        path.append(on)
    if rules.search == "exhaustive" or not on:
        return Found(base, best, on, soft, known, tuple(path))
    # What is tried side by side: all domains, or, as published, one after the other.
    groups = [[d] for d in rules.domains] if rules.search == "greedy_first" else [rules.domains]
    grows = True
    while grows:
        grows = False
        for group in groups:
            wider = [on | {d} for d in group if d not in on]
            known.update((yield from _ask(known, wider)))
            lowest = min(wider, key=known.__getitem__, default=on)
            if improves(known[lowest], best, rules.threshold):
                on, best, grows = lowest, known[lowest], True
                path.append(on)
    for domain in rules.ordered(rules.soft):
        if domain not in on:
            one_more = on | {domain}
            known.update((yield from _ask(known, [one_more])))
            if known[one_more] < best:
                on, best, soft = one_more, known[one_more], soft | {domain}
                path.append(on)
    return Found(base, best, on, soft, known, tuple(path))


def _ask(
    known: Mapping[DomainSet, float], wanted: list[DomainSet]
) -> Generator[list[DomainSet], Mapping[DomainSet, float], Mapping[DomainSet, float]]:
    """Losses of the sets that are not known yet."""
    new = [on for on in wanted if on not in known]
    return (yield new) if new else {}


def subsets(domains: Sequence[str]) -> list[DomainSet]:
    """Every set of domains but the empty one, small ones first."""
    sizes = range(1, len(domains) + 1)
    return [frozenset(chosen) for size in sizes for chosen in combinations(domains, size)]


def improves(loss: float, best: float, threshold: float) -> bool:
    """Whether a loss is below the best one by more than the threshold; exactly so is not."""
    return best - loss > threshold + ROUNDING


# --- many searches side by side -------------------------------------------------------------------

# [(number of the search, set of domains)] -> their losses
LossesOf = Callable[[list[tuple[int, DomainSet]]], Sequence[float]]


def search_all(rules: Rules, count: int, losses_of: LossesOf) -> list[Found]:
    """`count` searches in step: what all of them ask for next is asked for at once.

    Law: each finds what it finds alone.
    """
    running = {number: search(rules) for number in range(count)}
    results: dict[int, Found] = {}
    wanted = {number: next(steps) for number, steps in running.items()}
    while wanted:
        flat = [(number, on) for number, sets in wanted.items() for on in sets]
        losses = dict(zip(flat, losses_of(flat), strict=True))
        following: dict[int, list[DomainSet]] = {}
        for number, sets in wanted.items():
            try:
                following[number] = running[number].send({on: losses[number, on] for on in sets})
            except StopIteration as stopped:
                results[number] = stopped.value
        wanted = following
    return [results[number] for number in range(count)]


def replay(rules: Rules, losses: Mapping[DomainSet, float]) -> Found:
    """A search over losses that are all known, as those of an exhaustive one are."""
    return search_all(rules, 1, lambda wanted: [losses[on] for _, on in wanted])[0]


# --- targets --------------------------------------------------------------------------------------


def targets_of(rules: Rules, found: Found) -> Weights:
    """t of each domain: 1 in the best set, 0.5 where only the soft boost added it, else 0; chat at
    its floor at least.
    """
    targets = {d: float(d in found.best) for d in rules.domains}
    targets |= dict.fromkeys(found.soft, SOFT_TARGET)
    if rules.chat_domain is not None and rules.chat_domain in targets:
        targets[rules.chat_domain] = max(targets[rules.chat_domain], rules.chat_floor)
    return targets


def blended(rules: Rules, targets: Mapping[str, float], label: Iterable[str]) -> Weights:
    """clip((1 - share) * t + share * label, 0, 1), the label being 0 or 1 for each domain."""
    share, inside = rules.label_share, set(label)
    mixed = {d: (1 - share) * t + share * (d in inside) for d, t in targets.items()}
    return {d: min(max(value, 0.0), 1.0) for d, value in mixed.items()}


# --- files ----------------------------------------------------------------------------------------


EXAMPLES, OUTCOMES, LOSSES = "examples.jsonl", "outcomes.jsonl", "losses.jsonl"
FORMER_REPORT = "discover_report.json"

Kind = Literal["single", "mixed", "other"]
Share = Annotated[float, Field(ge=0, le=1)]
# Domain -> target, in the order of the store.
Targets = dict[str, Share]
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class RouterExample:
    """One prompt with its label: the domains of its source, () where no stack should help.

    answer: None where there is none; such an example has no outcome. row_id: of prompt and answer
    (`data.examples.row_id_of`). trained_on: a stack of the store was trained on the row.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    prompt: str
    answer: str | None
    label: tuple[str, ...]
    kind: Kind
    row_id: str
    source: str = ""
    trained_on: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the search found for one example.

    best: domains of the best set, in the order of the store, soft ones among them. soft: those of
    it that only the soft boost added. targets: t of the spec, before the label is blended in.
    final: after. losses: every loss that was asked for, by domains joined with `+`; "" is the base.
    path: the sets on the way to the best one, in the same words.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    row_id: str
    label: tuple[str, ...]
    kind: Kind
    base_loss: float
    best_loss: float
    best: tuple[str, ...]
    soft: tuple[str, ...]
    targets: Targets
    final: Targets
    losses: dict[str, float]
    path: tuple[str, ...]
    trained_on: bool = False
    control: dict[str, float] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """Nats that the best set takes off the base's loss; 0 where nothing does."""
        return self.base_loss - self.best_loss


class _ReportParts(TypedDict):
    """What others read of a report, tables aside."""

    base_fingerprint: str
    stacks: dict[str, list[str]]
    chat_domain: str | None
    chat_floor: Share


_EXAMPLE, _OUTCOME = TypeAdapter(RouterExample), TypeAdapter(Outcome)
_REPORT_PARTS = TypeAdapter(_ReportParts)


def write_lines(path: Path, records: Iterable[RouterExample] | Iterable[Outcome]) -> None:
    """One JSON object a line, in the order given: equal records give equal bytes."""
    with path.open("w", encoding="ascii") as lines:
        for record in records:
            lines.write(json.dumps(asdict(record), allow_nan=False) + "\n")


def read_discovered_examples(directory: Path | str) -> list[RouterExample]:
    """Raises: InputError: no discovery is there, or a line is no example."""
    return _read(directory, EXAMPLES, _EXAMPLE)


def read_discovered_outcomes(directory: Path | str) -> list[Outcome]:
    """Raises: as `read_discovered_examples`. Empty where nothing was searched."""
    return _read(directory, OUTCOMES, _OUTCOME)


def read_outcomes(directory: Path | str) -> tuple[list[RouterExample], dict[str, Targets]]:
    """Examples, and by row_id the final targets of those whose outcome was discovered.

    Raises: InputError: the directory is not what `route discover` writes, or was changed so that
        an outcome belongs to no example.
    """
    examples = read_discovered_examples(directory)
    outcomes = read_discovered_outcomes(directory)
    known = {example.row_id for example in examples}
    strange = [outcome.row_id for outcome in outcomes if outcome.row_id not in known]
    if strange:
        raise InputError(
            f"{directory}: {len(strange)} outcomes belong to no example (first {strange[0]!a}); "
            "its files are of different runs: run `mlxstacks route discover` again"
        )
    return examples, {outcome.row_id: outcome.final for outcome in outcomes}


def read_discovery(directory: Path | str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The figures of the result (`domains`, `chat_domain`, `chat_floor`, `stacks`: domain -> sha256
    of its stacks, `base_fingerprint`, and the tables), and what was changed since, in words.

    Raises: InputError.
    """
    path, changes = user_path(directory) / RESULT, tuple[str, ...]()
    try:
        if path.is_file():
            result = Result.open(path)
            figures, changes = result.data, result.standing.reasons
        else:
            path = _existing(directory, FORMER_REPORT)
            figures = read_object(path.read_bytes())
        _REPORT_PARTS.validate_python(figures)
    except ValidationError as error:
        raise InputError(
            f"{path}: {_first_problem(error)}; run `mlxstacks route discover` again"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: no result of `mlxstacks route discover`: {error}; run it again"
        ) from None
    return figures, changes


def _read(directory: Path | str, name: str, adapter: TypeAdapter[Any]) -> list[Any]:
    path = _existing(directory, name)
    records = []
    for number, record in numbered_records(path) if path.stat().st_size else ():
        try:
            records.append(adapter.validate_python(record))
        except ValidationError as error:
            raise InputError(f"{path}, line {number}: {_first_problem(error)}") from None
    return records


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _existing(directory: Path | str, name: str) -> Path:
    path = user_path(directory) / name
    if not path.is_file():
        raise InputError(
            f"{path}: not there; give a directory that `mlxstacks route discover` wrote"
        )
    return path


def config_text(domains: Iterable[str]) -> str:
    """A set of domains as the keys of `Outcome.losses` spell it; domain names hold no `+`."""
    return "+".join(domains)


def targets_or_label(
    example: RouterExample, discovered: Mapping[str, Targets], domains: Iterable[str]
) -> Targets:
    """The target of an example for each of `domains`: the discovered one, else its plain label.
    A domain that the discovery did not know gets 0, or 1 by label.

    The floor of chat is no part of a label: a router that learned it for prompts that no domain
    fits would give none of them a gap.
    """
    targets = discovered.get(example.row_id, {})
    return {d: float(targets.get(d, d in example.label)) for d in domains}
