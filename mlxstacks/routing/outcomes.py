"""Which set of domains lowers the loss of an answer: the search, and targets made of what it found.

A search is a generator: it yields sets of domains, is sent their losses, and returns a `Found`.
So one search knows nothing of models and batches, and many of them run side by side (`search_all`)
with their candidates in common batches.

Let f be the chat floor. base = loss of all stacks off; every other run has its domains at weight 1
and chat at f at least. Greedy (the default):

1. The domain with the lowest loss strictly below base becomes S; no threshold.
2. Of all S + {d} the lowest is taken when it is below the best so far by more than the threshold,
   again and again. Published code takes additions inside a pass instead (`greedy_first`).
3. A soft domain that is not in S is added by any improvement, with target 0.5.

Source: Brainstacks, section on outcome discovery, and its code.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from mlxstacks.routing.settings import SearchName

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
        if not on:
            return {}
        weights = {d: 1.0 for d in self.domains if d in on}
        return self._with_floor(weights)

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
    return _exhaustive(rules) if rules.search == "exhaustive" else _greedy(rules)


def _greedy(rules: Rules) -> Search:
    known: dict[DomainSet, float] = dict((yield [BASE, *(frozenset([d]) for d in rules.domains)]))
    base = best = known[BASE]
    on, path = BASE, [BASE]
    first = _lowest(known, [frozenset([d]) for d in rules.domains])
    if first is not None and known[first] < base:
        on, best = first, known[first]
        path.append(on)
        extend = _first_improvement if rules.search == "greedy_first" else _best_improvement
        on, best = yield from extend(rules, on, best, known, path)
    soft: DomainSet = BASE
    for domain in rules.ordered(rules.soft):
        if on and domain not in on:
            wider = on | {domain}
            known.update((yield from _ask(known, [wider])))
            if known[wider] < best:
                on, best, soft = wider, known[wider], soft | {domain}
                path.append(on)
    return Found(base, best, on, soft, known, tuple(path))


Extension = Generator[list[DomainSet], Mapping[DomainSet, float], tuple[DomainSet, float]]


def _best_improvement(
    rules: Rules,
    on: DomainSet,
    best: float,
    known: dict[DomainSet, float],
    path: list[DomainSet],
) -> Extension:
    """Add the best domain of each pass until a pass adds none."""
    while wider := [on | {d} for d in rules.domains if d not in on]:
        known.update((yield from _ask(known, wider)))
        lowest = _lowest(known, wider)
        if lowest is None or not improves(known[lowest], best, rules.threshold):
            break
        on, best = lowest, known[lowest]
        path.append(on)
    return on, best


def _first_improvement(
    rules: Rules,
    on: DomainSet,
    best: float,
    known: dict[DomainSet, float],
    path: list[DomainSet],
) -> Extension:
    """Add each domain that helps as it is met, several in a pass, until a pass adds none."""
    added = True
    while added:
        added = False
        for domain in rules.domains:
            wider = on | {domain}
            if domain in on:
                continue
            known.update((yield from _ask(known, [wider])))
            if improves(known[wider], best, rules.threshold):
                on, best, added = wider, known[wider], True
                path.append(on)
    return on, best


def _exhaustive(rules: Rules) -> Search:
    """Every set. The lowest one below the base is the best; of equal ones the smallest."""
    sets = subsets(rules.domains)
    known: dict[DomainSet, float] = dict((yield [BASE, *sets]))
    base = known[BASE]
    lowest = _lowest(known, sets)
    if lowest is None or not known[lowest] < base:
        return Found(base, base, BASE, BASE, known, (BASE,))
    return Found(base, known[lowest], lowest, BASE, known, (BASE, lowest))


def _ask(
    known: Mapping[DomainSet, float], wanted: list[DomainSet]
) -> Generator[list[DomainSet], Mapping[DomainSet, float], Mapping[DomainSet, float]]:
    """Losses of the sets that are not known yet."""
    new = [on for on in wanted if on not in known]
    return (yield new) if new else {}


def _lowest(known: Mapping[DomainSet, float], sets: Sequence[DomainSet]) -> DomainSet | None:
    """The set with the lowest loss, the first of equal ones."""
    return min(sets, key=lambda on: known[on], default=None)


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
    found: dict[int, Found] = {}
    asked = {number: next(one) for number, one in running.items()}
    while asked:
        flat = [(number, on) for number, sets in asked.items() for on in sets]
        losses = dict(zip(flat, losses_of(flat), strict=True))
        following: dict[int, list[DomainSet]] = {}
        for number, sets in asked.items():
            try:
                following[number] = running[number].send({on: losses[number, on] for on in sets})
            except StopIteration as stopped:
                found[number] = stopped.value
        asked = following
    return [found[number] for number in range(count)]


def replay(rules: Rules, losses: Mapping[DomainSet, float]) -> Found:
    """A search over losses that are all known, as those of an exhaustive one are."""
    (found,) = search_all(rules, 1, lambda asked: [losses[on] for _, on in asked])
    return found


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
