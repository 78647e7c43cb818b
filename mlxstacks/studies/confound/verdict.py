"""From comparisons to judgements: the kill criterion, its controls, what stands against a gain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxstacks.studies.confound.analysis import ArmResult, Comparison, Flips, FormShift
from mlxstacks.studies.confound.plan import AGAIN, PERSONA, arm
from mlxstacks.study.plan import Standing
from mlxstacks.study.power import passes

Outcome = Literal[
    "content", "no content", "format", "perturbation", "guessing", "exploratory", "refused"
]


@dataclass(frozen=True)
class Criterion:
    """least_gain: a difference of rates. Law: passes only a gain that is at least least_gain and
    has p < alpha; the truth table is a test.
    """

    least_gain: float
    alpha: float

    def passes(self, found: Comparison) -> bool:
        # 35 of 700 is five points though the two floats differ.
        large = found.difference > 0 and found.difference >= self.least_gain - 1e-12
        return large and found.p_adjusted < self.alpha

    def passes_among(self, form: FormShift) -> bool:
        """The same of the items that both arms answered in form, by plain p."""
        counts = form.right, form.control_right, form.n
        return form.n > 0 and passes(*counts, self.least_gain, self.alpha)

    def in_words(self) -> str:
        return f"at least {100 * self.least_gain:g} points with p < {self.alpha:g}"


@dataclass(frozen=True)
class Judgement:
    """One way (a policy, or unfused): what its A1 - A0 is worth. words: why, a sentence or two."""

    way: str
    outcome: Outcome
    words: str

    def as_json(self) -> dict[str, Any]:
        return vars(self).copy()


@dataclass(frozen=True)
class Case:
    """All that is judged. claims, forms (A1 against A0), against_random, moved (A1 against the
    persona): by way. missing: controls that were not run.
    """

    criterion: Criterion
    standing: Standing
    results: Mapping[str, ArmResult]
    claims: Mapping[str, Comparison]
    forms: Mapping[str, FormShift]
    against_random: Mapping[str, Comparison]
    moved: Mapping[str, Flips]
    guess_rate: float
    missing: Sequence[str]


def missing_controls(
    ways: Sequence[str], arms: Mapping[str, object], right: Mapping[str, object]
) -> list[str]:
    """The controls of spec/confound.md section 8 without which no gain may be claimed."""
    wanted = {
        PERSONA: "the unfused persona, re-measured with the same harness",
        AGAIN: "a rerun of the unfused persona, for run-to-run flips",
        arm("a1", "unfused"): "A1 unfused: content without rounding",
        arm("a0", "unfused"): "A0 unfused",
        arm("a1", "promote"): "A1 promoted",
    }
    for way in ways:
        wanted[arm("a0", way)] = f"the zero-delta arm through the same path ({way})"
        wanted[arm("random", way)] = f"a random delta of equal norm ({way})"
    missing = [words for name, words in wanted.items() if not arms.get(name)]
    fused = [way for way in ways if way != "unfused"]
    if not right.get(PERSONA) or any(not right.get(arm("a0", way)) for way in fused):
        missing.append("A0 on items that both models got right")
    return missing


def judge(case: Case, way: str) -> Judgement:
    """The first thing that stands against a gain decides; nothing does: content."""
    claim, limit = case.claims[way], case.criterion
    if not limit.passes(claim):
        more = ""
        if claim.mcnemar.p_value < limit.alpha:
            direction = "more" if claim.mcnemar.gained > claim.mcnemar.lost else "fewer"
            more = f" McNemar's test alone sees {direction} right answers, too few to count."
        return Judgement(way, "no content", f"That is not {limit.in_words()}.{more}")
    against = f"That is {limit.in_words()}"
    if case.missing:
        return Judgement(
            way, "refused", f"{against}, but no gain is claimed without {'; '.join(case.missing)}."
        )
    if case.standing.reasons:
        return Judgement(way, "exploratory", f"{against}, but it is not what was planned.")
    for outcome, reason in (
        ("format", _of_form(case, way)),
        ("perturbation", _of_norm(case, way)),
        ("guessing", _of_chance(case, way)),
    ):
        if reason:
            return Judgement(way, outcome, f"{against}, but {reason}")  # type: ignore[arg-type]
    warn = ""
    if claim.mcnemar.p_value >= limit.alpha:
        warn = f" McNemar's exact test does not agree (p = {claim.mcnemar.p_value:.2g})."
    random = case.against_random[way]
    return Judgement(
        way, "content",
        f"{against}, and a random delta of equal norm stays at "
        f"{percent(random.control_count, random.n)}.{warn}",
    )  # fmt: skip


def _of_form(case: Case, way: str) -> str | None:
    """A gain of letters found, not of right ones among those found."""
    form, limit = case.forms[way], case.criterion
    if form.p_value >= limit.alpha or limit.passes_among(form):
        return None
    n = case.claims[way].n
    among = "no item is answered so by both"
    if form.n:
        points = 100 * (form.right - form.control_right) / form.n
        among = f"among the {form.n} items that both answer so the gain is {points:+.2f} points"
    return (
        f"A1 answers {percent(form.in_form, n)} of the items in the form that was asked for and A0 "
        f"{percent(form.control_in_form, n)}; {among}: a change of form, not content."
    )


def _of_norm(case: Case, way: str) -> str | None:
    random = case.against_random[way]
    if random.difference > 0 and random.p_value < case.criterion.alpha:
        return None
    return (
        f"a random delta of equal norm scores {percent(random.control_count, random.n)}, too near "
        f"to tell apart (p = {random.p_value:.2g}): this may be a larger disturbance, not content."
    )


def _of_chance(case: Case, way: str) -> str | None:
    a1 = case.results[case.claims[way].arm]
    interval = f"the interval of A1 ({100 * a1.interval.low:.1f} to {100 * a1.interval.high:.1f}%)"
    if a1.interval.low <= case.guess_rate:
        return (
            f"{interval} reaches down to guessing ({case.guess_rate:.1%}): the items were chosen "
            "for being answered wrongly, and any change leads back to that rate."
        )
    if a1.interval.low <= a1.by_position:
        return (
            f"{interval} reaches down to what its choice of positions alone would score "
            f"({a1.by_position:.1%}): it prefers places where the right option often stands."
        )
    return None


def percent(count: int, n: int) -> str:
    return f"{count / n:.2%} ({count} of {n})"
