"""How often `mlxstacks confound` finds knowledge: where there is none, and where there is some.

    python -m benchmarks.bench_verdicts [--runs 2000] [--items 692] [--seed 0]

Draws the answers of whole runs, four policies each, and puts them through the rule of the study
(`nulls_of`, `judged_together`, `Criterion`). In each null A1 knows nothing, and only the control
that is made for that null stands in its way: the others are as weak as they can be (they move every
answer and are never right), so a real run can only be judged more strictly. The policies are drawn
independently of each other, and knowledge by any of them counts. Where no policy beats the control
of its own (`may_claim`), the rule is not asked: it asks for that too. No model is loaded.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import click
import numpy as np

from mlxstacks.stats import binomial_test, mcnemar_exact_test, wilson_interval
from mlxstacks.studies.confound.analysis import judged_together, nulls_of
from mlxstacks.studies.confound.plan import PERSONA, SECOND, arm
from mlxstacks.studies.confound.verdict import Criterion, beaten
from mlxstacks.study.answers import Answer
from mlxstacks.study.power import passes

WAYS = ("refit", "nearest", "promote", "unfused")
CRITERION = Criterion(least_gain=0.05, alpha=0.05)
# What an arm does to an item that persona and base got wrong: nothing, or an answer by its distance
# from the right one, so that 0 is right and 1 the persona's own; NONE has no letter in a box.
RIGHT, PERSONAS, OTHER, NONE = 0, 1, 2, -1
Arms = dict[str, np.ndarray]


class Items:
    """All answers that can be given to n items with so many options; right ones stand anywhere."""

    def __init__(self, n: int, options: int) -> None:
        self.n, self.options = n, options
        self._answers = [
            [
                Answer(
                    str(i), f"subject {i % 14}", i % options,
                    None if place == NONE else (i + place) % options,
                    "none" if place == NONE else "boxed", options,
                )
                for place in (*range(options), NONE)
            ]
            for i in range(n)
        ]  # fmt: skip
        self.still, self.elsewhere = (
            self.answers(np.full(n, place)) for place in (PERSONAS, OTHER)
        )

    def answers(self, places: np.ndarray) -> list[Answer]:
        """places: (n,) int, of each item."""
        return [row[place] for row, place in zip(self._answers, places.tolist(), strict=True)]


def _rate(items: Items) -> float:
    """Of right answers after a disturbance, above guessing: 18% of ten options, as published."""
    return 1 / items.options + 0.08


def _right(rng: np.random.Generator, items: Items, rate: float | np.ndarray) -> np.ndarray:
    """Right answers at a rate, the persona's elsewhere."""
    return np.where(rng.random(items.n) < rate, RIGHT, PERSONAS)


def exchangeable(rng: np.random.Generator, items: Items) -> Arms:
    """Some items are easily corrected, by A0 as by A1: answers of one item go together."""
    ease = rng.beta(0.5, 0.5 / _rate(items) - 0.5, items.n)
    return {"a1": _right(rng, items, ease), "a0": _right(rng, items, ease)}


def independent(rng: np.random.Generator, items: Items) -> Arms:
    """A0 and A1 correct as many items, each of them others."""
    return {"a1": _right(rng, items, _rate(items)), "a0": _right(rng, items, _rate(items))}


def guessing(rng: np.random.Generator, items: Items) -> Arms:
    """A1 picks any option; the items were chosen for being answered wrongly."""
    return {"a1": rng.integers(0, items.options, items.n)}


def form(rng: np.random.Generator, items: Items) -> Arms:
    """A1 boxes every answer, A0 half of them, and both are right as often where they do."""
    a0 = _right(rng, items, _rate(items) + 0.2)
    boxed = rng.random(items.n) < 0.5
    return {
        "a1": _right(rng, items, _rate(items) + 0.2),
        "a0": np.where(boxed, a0, NONE),
    }


def _disturbed(rng: np.random.Generator, items: Items) -> np.ndarray:
    """60% of the answers go to one that is right in 30% (of four options: 45%)."""
    right = rng.random(items.n) < (0.3 if items.options > 4 else 0.45)
    moved = rng.random(items.n) < 0.6
    return np.where(moved, np.where(right, RIGHT, OTHER), PERSONAS)


def disturbance(rng: np.random.Generator, items: Items) -> Arms:
    """A1 is a large disturbance, and so is the random delta that moves as many answers."""
    return {"a1": _disturbed(rng, items), "moved": _disturbed(rng, items)}


def training(rng: np.random.Generator, items: Items) -> Arms:
    """Training disturbs as much, whatever it teaches; random deltas do not."""
    return {"a1": _disturbed(rng, items), "shuffled": _disturbed(rng, items)}


def second_choices(rng: np.random.Generator, items: Items) -> Arms:
    """What A1 moves is right as often as the second choices are."""
    right = rng.random(items.n) < (0.3 if items.options > 4 else 0.45)
    return {"a1": _disturbed(rng, items), SECOND: np.where(right, RIGHT, OTHER)}


NULLS: dict[str, Callable[[np.random.Generator, Items], Arms]] = {
    "exchangeable": exchangeable, "independent": independent, "back to guessing": guessing,
    "change of form": form, "large disturbance": disturbance, "training alone": training,
    "second choices": second_choices,
}  # fmt: skip


def knowledge(gain: float) -> Callable[[np.random.Generator, Items], Arms]:
    """A1 knows a share `gain` of the items that it would not get right by chance. Else it moves 60%
    of its answers, right as often as the published A0 is; shuffled answers do so too, and a random
    delta that moves as many answers as A1 is right in as large a part of them, as second choices
    are.
    """

    def draw(rng: np.random.Generator, items: Items) -> Arms:
        rate, moved = _rate(items), 0.6
        known = gain / (1 - rate)
        as_many = moved + known * (1 - moved)

        def arm_that_moves(share: float) -> np.ndarray:
            chance = rng.random(items.n) / share
            return np.where(chance < rate / moved, RIGHT, np.where(chance < 1, OTHER, PERSONAS))

        return {
            "a1": np.where(rng.random(items.n) < known, RIGHT, arm_that_moves(moved)),
            "a0": _right(rng, items, rate),
            "moved": arm_that_moves(as_many), "shuffled": arm_that_moves(moved),
            SECOND: np.where(rng.random(items.n) < rate / moved, RIGHT, OTHER),
        }  # fmt: skip

    return draw


class Judged(NamedTuple):
    """Whether some policy shows knowledge by our rule, and the first one by the published rule."""

    ours: bool
    published: bool


def may_claim(arms: Arms, options: int) -> bool:
    """Whether A1 is above guessing and, in form, above each arm that is given: p < alpha, each by
    itself. Law: false only where the rule finds no knowledge, for it asks for these and for more.
    """
    picks = arms["a1"]
    right, n = picks == RIGHT, len(picks)
    count = int(right.sum())
    if count <= n / options or binomial_test(count, n, 1 / options) >= CRITERION.alpha:
        return False
    for kind, places in arms.items():
        if kind == "a1":
            continue
        control = (places == RIGHT) & (picks != PERSONAS if kind == SECOND else True)
        gained = int((right & ~control & (places != NONE)).sum())
        lost = int((control & ~right).sum())
        if gained <= lost or mcnemar_exact_test(gained, lost).p_value >= CRITERION.alpha:
            return False
    return True


def judge(arms_of: Sequence[Arms], items: Items) -> Judged:
    """arms_of: the arms of each policy. Those that are missing are as weak as they can be; a random
    delta then moves every answer, for one that moves fewer than A1 is no control.
    """
    right, right_by_zeros = (
        int((arms_of[0].get(kind, np.array([])) == RIGHT).sum()) for kind in ("a1", "a0")
    )
    published = passes(right, right_by_zeros, items.n, 0.05, 0.05)
    if not any(may_claim(arms, items.options) for arms in arms_of):
        return Judged(False, published)
    still, elsewhere = items.still, items.elsewhere
    weakest = {"a0": still, "moved": elsewhere, "shuffled": still, SECOND: elsewhere}
    nulls = {}
    for way, arms in zip(WAYS, arms_of, strict=True):
        drawn = weakest | {kind: items.answers(places) for kind, places in arms.items()}
        named = {k if k == SECOND else arm(k, way): given for k, given in drawn.items()}
        answers = {**named, PERSONA: still}
        nulls[way] = nulls_of(answers, way)
    judged = judged_together(nulls)
    ours = any(all(beaten(n, CRITERION) for n in of_way) for of_way in judged.values())
    return Judged(ours, published)


@dataclass(frozen=True)
class Rates:
    """Runs, and how many of them show knowledge."""

    runs: int
    ours: int
    published: int


def rates(
    draw: Callable[[np.random.Generator, Items], Arms], items: Items, runs: int, seed: int
) -> Rates:
    rng = np.random.default_rng(seed)
    judged = [judge([draw(rng, items) for _ in WAYS], items) for _ in range(runs)]
    return Rates(runs, sum(j.ours for j in judged), sum(j.published for j in judged))


def _row(name: str, options: int, found: Rates) -> str:
    ours, published = (
        f"{count / found.runs:.1%} (to {wilson_interval(count, found.runs).high:.1%})"
        for count in (found.ours, found.published)
    )
    return f"| {name} | {options} | {ours} | {published} |"


@click.command()
@click.option("--runs", default=2000, show_default=True, help="Of each null.")
@click.option("--power-runs", default=500, show_default=True, help="Of each true gain.")
@click.option("--items", default=692, show_default=True, help="In the test.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", multiple=True, help="A null, or 'power'; may be given again. Default: all.")
def main(runs: int, power_runs: int, items: int, seed: int, only: tuple[str, ...]) -> None:
    """Print false knowledge by null, and power by true gain, for 4 and 10 options."""
    summary: dict[str, list[int]] = {}
    click.echo(f"{items} items, four policies, alpha 0.05, least gain 5 points")
    click.echo("\n| null | options | false knowledge, any policy | published rule, one policy |")
    click.echo("|---|---|---|---|")
    sizes = {options: Items(items, options) for options in (4, 10)}
    for name, draw in NULLS.items():
        if only and name not in only:
            continue
        for options, of_size in sizes.items():
            found = rates(draw, of_size, runs, seed)
            summary[f"{name}, {options}"] = [found.runs, found.ours, found.published]
            click.echo(_row(name, options, found))
    click.echo(
        "\n| true gain, points | options | knowledge, any policy | published rule, one policy |"
    )
    click.echo("|---|---|---|---|")
    for gain in (0.05, 0.08, 0.1, 0.12, 0.15, 0.2) if not only or "power" in only else ():
        for options, of_size in sizes.items():
            found = rates(knowledge(gain), of_size, power_runs, seed)
            summary[f"gain {gain}, {options}"] = [found.runs, found.ours, found.published]
            click.echo(_row(f"{100 * gain:g}", options, found))
    click.echo(json.dumps(summary))


if __name__ == "__main__":
    main()
