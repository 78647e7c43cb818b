"""What `mlxstacks confound` found, in words: the verdict, the floors, notes beside the tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxstacks.stats import two_proportion_z_test
from mlxstacks.studies.confound.analysis import ArmResult, Comparison, Flips
from mlxstacks.studies.confound.verdict import Case, Judgement, percent

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
