"""What replies and answers say: scores, comparisons prompt by prompt, the broad regression.

Computed from answers alone. Arms are compared prompt by prompt, in the same order: four equal
totals may be four different sets of prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlxstacks.stats import Interval, holm, mcnemar_of_pairs, wilson_interval
from mlxstacks.studies.confound.analysis import in_form
from mlxstacks.studies.confound.answers import Answer
from mlxstacks.studies.identity.conditions import unequal

Answers = Mapping[str, Sequence[Answer]]


@dataclass(frozen=True)
class Score:
    """Prompts that an arm passes. by_category: category -> (passed, n), in the suite's order."""

    arm: str
    n: int
    passed: int
    interval: Interval
    by_category: dict[str, tuple[int, int]]

    def as_json(self) -> dict[str, Any]:
        return {
            "arm": self.arm, "n": self.n, "passed": self.passed, "share": self.passed / self.n,
            "interval": self.interval.as_json(),
            "by_category": {
                name: {"passed": passed, "n": n} for name, (passed, n) in self.by_category.items()
            },
        }  # fmt: skip


def score_of(arm: str, answers: Sequence[Answer]) -> Score:
    """Raises: ValueError for no answers."""
    passed = sum(one.correct for one in answers)
    table: dict[str, tuple[int, int]] = {}
    for one in answers:
        before = table.get(one.subject, (0, 0))
        table[one.subject] = before[0] + one.correct, before[1] + 1
    return Score(arm, len(answers), passed, wilson_interval(passed, len(answers)), table)


@dataclass(frozen=True)
class Compared:
    """An arm beside its reference. kept, lost, gained, neither: prompts by whether the reference
    and the arm pass them; their ids where they differ.

    p_value: McNemar's exact. p_adjusted: by Holm over the plan's claims, None for no claim.
    loss: lost of what the reference passes, with its Wilson interval; None where it passes none.
    other_texts: replies that differ in any character.
    """

    arm: str
    reference: str
    n: int
    kept: int
    neither: int
    lost: tuple[str, ...]
    gained: tuple[str, ...]
    p_value: float
    loss: Interval | None
    other_texts: int
    p_adjusted: float | None = None

    @property
    def passed_by_reference(self) -> int:
        return self.kept + len(self.lost)

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self), "lost": list(self.lost), "gained": list(self.gained),
            "loss": None if self.loss is None else self.loss.as_json(),
        }  # fmt: skip


def compare(answers: Answers, arm: str, reference: str) -> Compared:
    """Raises: ValueError for arms that answered different prompts: such pairs are no pairs."""
    one, two = answers[arm], answers[reference]
    problem = unequal([(name, [a.item_id for a in answers[name]]) for name in (arm, reference)])
    if problem:
        raise ValueError(f"{problem}; only the same prompts can be compared")
    pairs = list(zip(two, one, strict=True))
    lost = tuple(before.item_id for before, after in pairs if before.correct > after.correct)
    gained = tuple(before.item_id for before, after in pairs if before.correct < after.correct)
    kept = sum(before.correct and after.correct for before, after in pairs)
    passed = kept + len(lost)
    return Compared(
        arm, reference, len(pairs), kept, len(pairs) - passed - len(gained), lost, gained,
        mcnemar_of_pairs([a.correct for a in two], [a.correct for a in one]).p_value,
        wilson_interval(len(lost), passed) if passed else None,
        sum(before.text != after.text for before, after in pairs),
    )  # fmt: skip


def compare_all(
    answers: Answers, pairs: Sequence[tuple[str, str]], claims: Sequence[tuple[str, str]]
) -> dict[str, Compared]:
    """Arm -> comparison with its reference, of pairs whose arms are both there; the p-values of
    the claims are one family.
    """
    found = {
        arm: compare(answers, arm, reference)
        for arm, reference in pairs
        if answers.get(arm) and answers.get(reference)
    }
    claimed = [arm for arm, _ in claims if arm in found]
    for arm, p in zip(claimed, holm([found[name].p_value for name in claimed]), strict=True):
        found[arm] = replace(found[arm], p_adjusted=p)
    return found


# --- broad regression -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Regression:
    """An arm beside its reference on the items. fixed: wrong, then right; broken: the reverse.

    p_value: McNemar's exact. chi_square: without correction, as the study has it. in_form,
    reference_in_form: answers in a box, or likelihoods without tie; more letters found are more
    right answers without any knowledge.
    """

    arm: str
    reference: str
    n: int
    right: int
    reference_right: int
    fixed: int
    broken: int
    p_value: float
    chi_square: float
    in_form: int
    reference_in_form: int

    @property
    def net(self) -> int:
        return self.fixed - self.broken

    @property
    def both_wrong(self) -> int:
        return self.n - self.reference_right - self.fixed

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "net": self.net, "both_wrong": self.both_wrong}


def regress(answers: Answers, arm: str, reference: str) -> Regression:
    """135 fixed and 56 broken of 6,000 were published (spec/confound.md section 9).

    Raises: ValueError for arms that answered different items.
    """
    one, two = answers[arm], answers[reference]
    if [a.item_id for a in one] != [a.item_id for a in two]:
        raise ValueError(f"{arm} and {reference} answered different items")
    right, before = [a.correct for a in one], [a.correct for a in two]
    test = mcnemar_of_pairs(before, right)
    return Regression(
        arm, reference, len(one), sum(right), sum(before), test.gained, test.lost, test.p_value,
        test.chi_square, sum(map(in_form, one)), sum(map(in_form, two)),
    )  # fmt: skip


def credit(
    policy: str,
    persona: Regression,
    zero: Regression | None,
    against_zero: Regression | None,
    alpha: float,
) -> str:
    """What of the persona's net is its own.

    zero: the base after a zero-delta fuse, beside the base; against_zero: the persona beside it.
    """
    return _credit(policy, persona, zero, against_zero, alpha) + _of_form(persona)


def _of_form(found: Regression) -> str:
    """A sentence where answers are not in form, or not equally often in both."""
    if not found.in_form and not found.reference_in_form:
        return (
            " NOT ONE of these answers is in form (boxed; of likelihoods, no tie): every letter "
            "comes from a fallback rule, or there is none, so this is of form, not of knowledge."
        )
    if found.in_form == found.reference_in_form:
        return ""
    return (
        f" In form (boxed; of likelihoods, no tie) are {found.in_form:,} answers, of "
        f"{found.reference} {found.reference_in_form:,}: that alone moves right answers."
    )


def _credit(
    policy: str,
    persona: Regression,
    zero: Regression | None,
    against_zero: Regression | None,
    alpha: float,
) -> str:
    told = f"By {policy} the persona answers {_change(persona)}"
    if zero is None or against_zero is None:
        return (
            f"{told}. Credited to nothing: the base after a zero-delta fuse is missing, since the "
            "persona was given as a model."
        )
    fuse = f"the zero-delta fuse of the base alone {_change(zero)}"
    if persona.p_value >= alpha:
        return f"{told}: no change that can be shown; {fuse}."
    if against_zero.p_value >= alpha:
        return (
            f"{told}; {fuse}. Beside that base it is {_change(against_zero)}: not to be told from "
            "what the fuse does by itself."
        )
    more = "more" if against_zero.net > 0 else "fewer"
    return (
        f"{told}; {fuse}. Beside that base it is {_change(against_zero)}: {more} right answers by "
        "the persona itself."
    )  # fmt: skip


def _change(found: Regression) -> str:
    if not found.fixed and not found.broken:
        return f"{found.n:,} of {found.n:,} as before"
    return (
        f"net {found.net:+,} ({found.fixed:,} fixed, {found.broken:,} broken of {found.n:,}, p = "
        f"{found.p_value:.2g})"
    )
