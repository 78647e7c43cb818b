"""From comparisons to judgements: the kill criterion, its controls, what stands against a gain; and
the same in words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxstacks.stats import two_proportion_z_test
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


# --- in words ------------------------------------------------------------------------------------

_HEADS = {
    "content": "Knowledge, not only jitter",
    "no content": "Only jitter, no knowledge that can be shown",
    "format": "No knowledge that can be shown, a change of form",
    "perturbation": "Only jitter, no knowledge that can be shown",
    "guessing": "No knowledge that can be shown, a way back to guessing",
    "exploratory": "No claim, this is not what was planned",
    "refused": "No claim, controls are missing",
}


def verdict(case: Case, judgements: Sequence[Judgement]) -> str:
    """The answer first, of the deciding way; then its numbers, and what the other ways say."""
    first = judgements[0]
    claim = case.claims[first.way]
    answer = (
        f"{_head(case, first)}: {_called(first.way)} adapter (A1) answers "
        f"{percent(claim.count, claim.n)} of what base and persona got wrong, its zero-delta "
        f"control (A0) {percent(claim.control_count, claim.n)}."
    )
    words = [answer, f"Content, A1 - A0: {difference_in_words(claim)}. {first.words}"]
    if case.standing.reasons:
        words.insert(0, "EXPLORATORY.")
    words += _of_other_ways(case, judgements)
    if case.missing and first.outcome != "refused":
        words.append(f"Controls that are missing: {'; '.join(case.missing)}.")
    return " ".join([*words, case.standing.in_words()])


def _head(case: Case, first: Judgement) -> str:
    claim, moved = case.claims[first.way], case.moved[first.way]
    if case.standing.reasons and first.outcome != "refused":
        return _HEADS["exploratory"]
    if first.outcome == "no content":
        form = case.forms[first.way]
        if not form.in_form and not form.control_in_form:
            return "No claim, neither arm gives one answer in the form that was asked for"
        if claim.difference < 0 and claim.mcnemar.p_value < case.criterion.alpha:
            return "Harm, no knowledge"
        if moved.n and not moved.changed:
            return "Neither knowledge nor jitter, not one answer changes"
    return _HEADS[first.outcome]


def _called(way: str) -> str:
    return "the unfused" if way == "unfused" else f"fused by {way}, the"


def _of_other_ways(case: Case, judgements: Sequence[Judgement]) -> list[str]:
    """Where the deciding way shows no content: whether unfused, or by another policy, there is."""
    first, others = judgements[0], judgements[1:]
    if first.outcome == "content":
        return []
    words = []
    unfused = next((one for one in others if one.way == "unfused"), None)
    if unfused is not None and first.outcome == "no content":
        points = f"{100 * case.claims['unfused'].difference:+.2f} points"
        if unfused.outcome == "content":
            words.append(f"Unfused the adapter does add knowledge ({points}): the fuse loses it.")
        else:
            words.append(f"Unfused, without any rounding, it is no content either ({points}).")
    kept = [one.way for one in others if one.outcome == "content" and one is not unfused]
    if kept:
        words.append(f"Fused by {', '.join(kept)} it adds knowledge.")
    return words


def difference_in_words(found: Comparison) -> str:
    """A1 less A0, with its interval and tests; p as it is, and as it is judged."""
    low, high = found.bootstrap.low or 0.0, found.bootstrap.high or 0.0
    adjusted = ""
    if found.p_adjusted != found.p_value:
        adjusted = f", {found.p_adjusted:.2g} adjusted for all ways"
    return (
        f"{100 * found.difference:+.2f} points (95%: {100 * low:+.1f} to {100 * high:+.1f}; z-test "
        f"p = {found.p_value:.2g}{adjusted}; McNemar p = {found.mcnemar.p_value:.2g})"
    )


def floor_in_words(wrong: Flips, right: Flips, alpha: float) -> str:
    """Whether A0 turns wrong answers right as readily as right ones wrong, more readily, or less.

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
    if test.difference < 0:
        return (
            f"{rates}: more broken than fixed (p = {test.p_value:.2g}), so damage, as answers that "
            "change at random are rarely right."
        )
    return f"{rates}: one-sided (p = {test.p_value:.2g}), so selection or a harness that changed."


def fuse_notes(fuses: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the history of the weights does to a control; a sentence for each policy at most."""
    notes = [pipeline_in_words(figures, way) for way, figures in fuses.items()]
    return [note for note in notes if note]


def pipeline_in_words(figures: Mapping[str, Any], way: str) -> str | None:
    """A note where the control had nothing to change, as after an earlier refit at zero delta:
    refit reaches a fixed point, and a floor is measured only short of it.
    """
    modules = figures["a0"]["by_module"]
    # Plain weights have no grid, and so no fixed point of it.
    quantized = [path for path, bits in figures["a0"]["bits"].items() if bits is not None]
    still = [path for path in quantized if path in modules and not modules[path]["artifact"]]
    if way != "refit" or not still:
        return None
    if len(still) < len(quantized):
        return (
            f"A0 by refit changed {len(quantized) - len(still)} of {len(quantized)} modules; the "
            "others are at the fixed point of refit, as after an earlier one, and have no floor."
        )
    return (
        "A0 by refit changed no weight: these modules are at the fixed point of refit, as after an "
        "earlier refit that added nothing to them. Its floor is 0 by construction."
    )


def answer_notes(arms: Mapping[str, ArmResult]) -> list[str]:
    """Of generated answers: arms that never box, and a boxed rate that is not the same in all."""
    none = [name for name, found in arms.items() if not found.rules.get("boxed")]
    if len(none) == len(arms):
        rules: dict[str, int] = {}
        for found in arms.values():
            for rule, count in found.rules.items():
                rules[rule] = rules.get(rule, 0) + count
        listed = ", ".join(f"{rule} {count}" for rule, count in rules.items())
        words = (
            "NO ARM BOXES A SINGLE ANSWER: every letter comes from a fallback rule, or there is "
            f"none ({listed}). These accuracies are of form, not of knowledge."
        )
        return [words]
    if none:
        return [f"Never box an answer: {', '.join(none)}. Their letters come from fallback rules."]
    return []
