"""From comparisons to a verdict: the kill criterion, the controls it needs, and words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxstacks.experiments.confound.analysis import ArmResult, Comparison, Flips
from mlxstacks.experiments.confound.plan import AGAIN, PERSONA, arm
from mlxstacks.experiments.prereg import Standing
from mlxstacks.stats import two_proportion_z_test

Outcome = Literal["content", "no content", "perturbation", "guessing", "exploratory", "refused"]


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

    def in_words(self) -> str:
        return f"at least {100 * self.least_gain:g} points with p < {self.alpha:g}"


@dataclass(frozen=True)
class Judgement:
    """One way (a policy, or unfused): what its A1 - A0 is worth."""

    way: str
    outcome: Outcome
    words: str

    def as_json(self) -> dict[str, Any]:
        return vars(self).copy()


@dataclass(frozen=True)
class Case:
    """All that is judged. claims, against_random: by way. missing: controls that were not run."""

    criterion: Criterion
    standing: Standing
    results: Mapping[str, ArmResult]
    claims: Mapping[str, Comparison]
    against_random: Mapping[str, Comparison]
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
        return Judgement(
            way, "no content", f"{difference_in_words(claim)}: not {limit.in_words()}.{more}"
        )
    against = f"{difference_in_words(claim)}: {limit.in_words()}"
    if case.missing:
        return Judgement(
            way, "refused", f"{against}, but no gain is claimed without {'; '.join(case.missing)}."
        )
    if case.standing.reasons:
        return Judgement(way, "exploratory", f"{against}, but {case.standing.in_words()}")
    random = case.against_random[way]
    if not (random.difference > 0 and random.p_value < limit.alpha):
        return Judgement(
            way, "perturbation",
            f"{against}, but a random delta of equal norm scores "
            f"{percent(random.control_count, random.n)}, too near to tell apart (p = "
            f"{random.p_value:.2g}): this may be a larger disturbance, not content.",
        )  # fmt: skip
    a1 = case.results[claim.arm]
    if a1.interval.low <= case.guess_rate:
        return Judgement(
            way, "guessing",
            f"{against}, but the interval of A1 ({100 * a1.interval.low:.1f} to "
            f"{100 * a1.interval.high:.1f}%) reaches down to guessing ({case.guess_rate:.1%}): the "
            "items were chosen for being answered wrongly, and any change leads back to that rate.",
        )  # fmt: skip
    warn = ""
    if claim.mcnemar.p_value >= limit.alpha:
        warn = f" McNemar's exact test does not agree (p = {claim.mcnemar.p_value:.2g})."
    return Judgement(
        way, "content",
        f"{against}, and a random delta of equal norm stays at "
        f"{percent(random.control_count, random.n)}.{warn}",
    )  # fmt: skip


def difference_in_words(found: Comparison) -> str:
    """A1, A0, their difference and its tests."""
    low, high = found.bootstrap.low or 0.0, found.bootstrap.high or 0.0
    return (
        f"A1 {percent(found.count, found.n)}, A0 {percent(found.control_count, found.n)}, content "
        f"{100 * found.difference:+.2f} points ({100 * low:+.1f} to {100 * high:+.1f}; z-test p = "
        f"{found.p_adjusted:.2g}, McNemar p = {found.mcnemar.p_value:.2g})"
    )


def percent(count: int, n: int) -> str:
    return f"{count / n:.2%} ({count} of {n})"


def verdict(case: Case, judgements: Sequence[Judgement]) -> str:
    """In words; the first judgement decides, and the others say why it is so."""
    first = judgements[0]
    heads = {
        "content": "The fused adapter adds knowledge",
        "no content": "The fused adapter adds no knowledge that can be shown",
        "perturbation": "The fused adapter changes answers, but shows no knowledge",
        "guessing": "The fused adapter leads back to guessing",
        "exploratory": "No claim",
        "refused": "No claim",
    }
    words = [f"{heads[first.outcome]} ({first.way}): {first.words}"]
    unfused = next((one for one in judgements if one.way == "unfused"), None)
    if unfused is not None and unfused is not first and first.outcome == "no content":
        points = f"content {100 * case.claims['unfused'].difference:+.2f} points"
        if unfused.outcome == "content":
            words.append(f"Unfused it does ({points}): the fuse loses it.")
        else:
            words.append(f"Unfused, too, {unfused.outcome} ({points}).")
    kept = [one.way for one in judgements[1:] if one.outcome == "content" and one is not unfused]
    if first.outcome != "content" and kept:
        words.append(f"Fused by {', '.join(kept)} it adds knowledge.")
    if case.missing and first.outcome != "refused":
        words.append(f"Controls that are missing: {'; '.join(case.missing)}.")
    if first.outcome != "exploratory":
        words.append(case.standing.in_words())
    return " ".join(words)


def floor_in_words(wrong: Flips, right: Flips, alpha: float) -> str:
    """Whether A0 turns wrong answers right as readily as right ones wrong.

    wrong: of A0 against the re-measured persona on Set G; right: on items both models got right.
    """
    if not right.n or not wrong.n:
        return "A0 was not tried on items that both models got right."
    if not wrong.changed and not right.changed:
        return "A0 changes no answer at all: this fuse has no floor."
    if not wrong.fixed and not right.broken:
        return "A0 changes some answers, but no outcome."
    rates = f"A0 fixes {percent(wrong.fixed, wrong.n)} and breaks {percent(right.broken, right.n)}"
    test = two_proportion_z_test(wrong.fixed, wrong.n, right.broken, right.n)
    if test.p_value >= alpha:
        return f"{rates}: symmetric as far as can be seen, so noise."
    return f"{rates}: one-sided (p = {test.p_value:.2g}), so selection or a harness that changed."


def pipeline_in_words(figures: Mapping[str, Any], way: str) -> str | None:
    """A note where the control had nothing to change, as after an earlier refit at zero delta:
    refit reaches a fixed point, and a floor is measured only short of it.
    """
    total = figures["a0"]["total"] or {}
    if way != "refit" or total.get("artifact"):
        return None
    return (
        "A0 by refit changed no weight: these modules are at the fixed point of refit, as after an "
        "earlier refit that added nothing to them. Its floor is 0 by construction."
    )
