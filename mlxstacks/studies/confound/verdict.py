"""Judgements of a confound run: the kill criterion, its controls, what stands against a gain; and
the same in words.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mlxstacks.stats import wilson_interval
from mlxstacks.studies.confound.analysis import (
    FORM,
    GUESSING,
    MOVED,
    SECONDS,
    SHUFFLED,
    ZERO,
    Answers,
    ArmResult,
    Comparison,
    Decomposition,
    Flips,
    FormShift,
    Null,
    PublishedRule,
    arm_result,
    compare,
    decompose,
    flips,
    form_shift,
    guess_rate,
    judged_together,
    moves_as_many,
    nulls_of,
    position_shares,
    published_rule,
    subject_table,
)
from mlxstacks.studies.confound.plan import AGAIN, KINDS, PERSONA, SECOND, arm
from mlxstacks.study.answers import Answer
from mlxstacks.study.document import Standing, counted

Outcome = Literal[
    "knowledge", "no gain", "undecided", "unmatched", "format", "perturbation", "shuffled",
    "second choice", "guessing", "wording", "exploratory", "refused",
]  # fmt: skip


@dataclass(frozen=True)
class Criterion:
    """least_gain: a difference of rates. Law: passes only a gain that is at least least_gain and
    has p < alpha; the truth table is a test.
    """

    least_gain: float
    alpha: float

    def is_large(self, null: Null) -> bool:
        # 35 of 700 is five points though the two floats differ.
        return null.difference >= self.least_gain - 1e-12

    def passes(self, null: Null) -> bool:
        return self.is_large(null) and null.rejected(self.alpha)

    def in_words(self) -> str:
        return f"at least {100 * self.least_gain:g} points with p < {self.alpha:g}"


def beaten(null: Null, criterion: Criterion) -> bool:
    """Of A0, and of A0 among answers in form, by `least_gain`; of the others at all."""
    if null.name in (ZERO, FORM):
        return criterion.passes(null)
    return null.rejected(criterion.alpha)


@dataclass(frozen=True)
class Judgement:
    """One way (a policy, or unfused): what its A1 - A0 is worth. words: why, a sentence or two."""

    way: str
    outcome: Outcome
    words: str


@dataclass(frozen=True)
class Findings:
    """What the answers say. claims, forms (A1 against A0), nulls, decomposition, floors: by way, in
    order; judgements: the deciding way's first. moved, right_flips: by arm, against the persona, on
    the test's items and on those that both models got right. published_rule: of the deciding way.

    second_form, second_nulls: of the arms that were asked in a second form of the prompt, by arm,
    and what A1 has to beat there, by way; empty where none was.
    persona_flips: name of a pair of runs of the unfused persona -> what changed between them.
    right_positions: option position -> share of the test items where it is right.
    missing_controls: those that were not run. saturated: ways where no random delta, of any scale,
    moves as many answers as A1.
    """

    arms: dict[str, ArmResult]
    arms_on_right_items: dict[str, ArmResult]
    claims: dict[str, Comparison]
    forms: dict[str, FormShift]
    nulls: dict[str, tuple[Null, ...]]
    second_form: dict[str, ArmResult]
    second_nulls: dict[str, tuple[Null, ...]]
    decomposition: dict[str, Decomposition]
    persona_flips: dict[str, Flips]
    right_flips: dict[str, Flips]
    floors: dict[str, str]
    subjects: dict[str, dict[str, int]]
    guess_rate: float
    right_positions: dict[str, float]
    missing_controls: list[str]
    moved: dict[str, Flips]
    published_rule: PublishedRule
    saturated: tuple[str, ...]
    criterion: Criterion
    standing: Standing
    judgements: tuple[Judgement, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """Of the deciding way."""
        return self.judgements[0].outcome

    def as_json(self) -> dict[str, Any]:
        figures = asdict(self) | {"outcome": self.outcome}
        for of_form in (figures["nulls"], figures["second_nulls"]):
            for null in (null for nulls in of_form.values() for null in nulls):
                del null["interval"]  # for the table alone: earlier runs have none
        return {k: v for k, v in figures.items() if k not in ("criterion", "standing")}


def find(
    answers: Answers,
    right: Answers,
    mined: Sequence[Answer],
    *,
    ways: Sequence[str],
    criterion: Criterion,
    standing: Standing,
    saturated: Sequence[str] = (),
    second_form: Answers | None = None,
) -> Findings:
    """Everything from answers. right: arms on the items that both models got right. second_form:
    arms on the test's items in that form. mined: the persona's answers when Set G was mined. Ways
    whose A1 or A0 is missing have no claim. saturated: as in `Findings`.

    Raises: ValueError where the deciding way has no claim, or arms answered different items.
    """
    answers = {name: given for name, given in answers.items() if given}
    arms = {name: arm_result(name, given) for name, given in answers.items()}
    claimed = [way for way in ways if {arm("a1", way), arm("a0", way)} <= arms.keys()]
    if not claimed or claimed[0] != ways[0]:
        raise ValueError(f"no answers of A1 and A0 by {ways[0]}, which decides")
    pairs = [(arm("a1", way), arm("a0", way)) for way in claimed]
    persona, deciding = answers.get(PERSONA, ()), answers[arm("a1", ways[0])]
    fused = [way for way in claimed if way != "unfused"]
    right_flips = {
        name: flips(right.get(PERSONA, ()), given) for name, given in right.items() if given
    }
    claims = {way: compare(answers, *pair) for way, pair in zip(claimed, pairs, strict=True)}
    nulls = {way: nulls_of(answers, way, way in saturated) for way in claimed}
    # A random delta that moves too few answers is told of in the first form.
    second_form = second_form or {}
    in_second = {
        way: [null for null in nulls_of(second_form, way, way in saturated) if null.tested]
        for way in claimed
        if second_form
    }
    together = judged_together({way: [*nulls[way], *in_second.get(way, ())] for way in claimed})
    findings = Findings(
        arms=arms,
        arms_on_right_items={n: arm_result(n, given) for n, given in right.items() if given},
        claims=claims,
        forms={way: form_shift(answers, *pair) for way, pair in zip(claimed, pairs, strict=True)},
        nulls={way: together[way][: len(nulls[way])] for way in claimed},
        second_form={name: arm_result(name, given) for name, given in second_form.items()},
        second_nulls={way: together[way][len(nulls[way]) :] for way in in_second},
        decomposition={
            way: decompose(way, arms[PERSONA], arms[arm("a0", way)], arms[arm("a1", way)])
            for way in claimed
            if PERSONA in arms
        },
        persona_flips={
            "mining to test": flips(mined, persona),
            "first to second run": flips(persona, answers.get(AGAIN, ())),
        },
        right_flips=right_flips,
        floors={
            way: floor_in_words(
                flips(persona, answers[arm("a0", way)]),
                right_flips.get(arm("a0", way), Flips(0, 0, 0, 0)),
                criterion.alpha,
            )
            for way in fused
        },
        subjects=subject_table(answers),
        guess_rate=guess_rate(deciding),
        right_positions=position_shares([answer.gold for answer in deciding]),
        missing_controls=missing_controls(ways, answers, right),
        moved={name: flips(persona, given) for name, given in answers.items()},
        published_rule=published_rule(claims[claimed[0]]),
        saturated=tuple(way for way in claimed if way in saturated),
        criterion=criterion,
        standing=standing,
    )
    return replace(findings, judgements=tuple(judge(findings, way) for way in claimed))


def missing_controls(
    ways: Sequence[str], arms: Mapping[str, object], right: Mapping[str, object]
) -> list[str]:
    """Controls, the published ones and ours, without which no gain may be claimed."""
    controls = {
        PERSONA: "the unfused persona, re-measured with the same harness",
        AGAIN: "a rerun of the unfused persona, for run-to-run flips",
        SECOND: "the second choices of the unfused persona",
        arm("a1", "unfused"): "A1 unfused: the gain without rounding",
        arm("a0", "unfused"): "A0 unfused",
        arm("a1", "promote"): "A1 promoted",
    }
    for way in ways:
        controls[arm("a0", way)] = f"the zero-delta arm through the same path ({way})"
        controls[arm("random", way)] = f"a random delta of equal norm ({way})"
        controls[arm("moved", way)] = f"a random delta that moves as many answers ({way})"
        controls[arm("shuffled", way)] = f"an adapter trained alike on shuffled answers ({way})"
    missing = [words for name, words in controls.items() if not arms.get(name)]
    on_right_items = [PERSONA, *(arm(kind, way) for way in ways for kind in KINDS)]
    if not all(right.get(name) for name in on_right_items):
        missing.append("every arm on items that both models got right")
    return missing


def judge(findings: Findings, way: str) -> Judgement:
    """What a gain is worth, of which nothing is claimed where it is not what was planned."""
    found = _as_planned(findings, way)
    if not findings.standing.reasons or found.outcome in ("no gain", "undecided", "refused"):
        return found
    return replace(found, outcome="exploratory")


def _as_planned(findings: Findings, way: str) -> Judgement:
    """What stands against a gain decides, of several controls the one that stands most in its way;
    nothing does: knowledge.
    """
    claim, criterion = findings.claims[way], findings.criterion
    zero, *others = findings.nulls[way]
    if not beaten(zero, criterion):
        more = ""
        if claim.mcnemar.p_value < criterion.alpha:
            direction = "more" if claim.mcnemar.gained > claim.mcnemar.lost else "fewer"
            more = f" McNemar's p, before it is adjusted, says that {direction} are right."
        reach = claim.interval.high
        least = f"{100 * criterion.least_gain:g} points"
        short = f"That is less than {least}"
        if criterion.is_large(zero):
            short = f"That is at least {least}, but p (Holm) = {zero.p_adjusted:.2g} is too large"
        if reach >= criterion.least_gain:
            words = f"{short}; {claim.n} items leave room for {100 * reach:.1f} points.{more}"
            return Judgement(way, "undecided", words)
        return Judgement(way, "no gain", f"{short}, with 95% confidence.{more}")
    gain = f"That is {criterion.in_words()}"
    if findings.missing_controls:
        missing = "; ".join(findings.missing_controls)
        return Judgement(way, "refused", f"{gain}, but no gain is claimed without {missing}.")
    random = findings.moved.get(arm("moved", way), Flips(0, 0, 0, 0))
    trained = findings.moved[arm("a1", way)]
    moves = (
        f"{percent(random.changed, random.n)} of the answers and A1 "
        f"{percent(trained.changed, trained.n)}"
    )
    tested = [null for null in others if null.tested]
    if unbeaten := [null for null in tested if not beaten(null, criterion)]:
        null = max(unbeaten, key=lambda null: (null.p_adjusted, null.expected / max(null.n, 1)))
        outcome, why = _EXPLANATIONS[null.name]
        if null.name == FORM:
            reason = _of_form(findings.forms[way], null, claim.n)
        else:
            near = "too near to be a difference" if null.difference > 0 else "no less than A1"
            reason = f"{why[0]} {null.expected / null.n:.2%}, {near}"
            reason += f" (p (Holm) = {null.p_adjusted:.2g})"
            if null.name == MOVED and not moves_as_many(trained, random):
                reason += f", at the scale that moves most: {moves}"
        words = f"{gain}, but {reason}: {why[1]}"
        if len(unbeaten) > 1:
            words += f" Not beaten either: {counted(len(unbeaten) - 1, 'other control')}."
        return Judgement(way, outcome, words)
    if any(not beaten(null, criterion) for null in findings.second_nulls.get(way, ())):
        return Judgement(way, "wording", f"{gain}, but not so in a second form of the prompt.")
    rates = ", ".join(
        f"{null.name} {null.expected / null.n:.1%}" for null in tested if null.name != FORM
    )
    p_value = max(null.p_adjusted for null in (zero, *tested))
    beats = f"({rates}; largest p (Holm) {p_value:.2g})"
    if len(tested) < len(others):
        words = (
            f"{gain}, and more than every other control {beats}, but the random delta moves "
            f"{moves}: a disturbance as large as A1 is not excluded."
        )
        return Judgement(way, "unmatched", words)
    words = f"{gain}, and more than every control {beats}."
    if way in findings.saturated and not moves_as_many(trained, random):
        words += f" No random delta moves as many answers: at most {moves}."
    clustered = claim.clustered
    if clustered.p_value is not None and clustered.p_value >= criterion.alpha:
        words += (
            f" By errors clustered over {clustered.clusters} subjects it may be chance (p = "
            f"{clustered.p_value:.2g}): it comes from few of them."
        )
    return Judgement(way, "knowledge", words)


# What a null that is not rejected says: the outcome, what comes near, and what follows.
_EXPLANATIONS: dict[str, tuple[Outcome, tuple[str, str]]] = {
    FORM: ("format", ("", "a change of form, not knowledge.")),
    MOVED: ("perturbation", (
        "a random delta that moves as many answers scores",
        "whatever moves so many may gain as much, so this may not be knowledge.",
    )),
    SHUFFLED: ("shuffled", (
        "an adapter trained alike on shuffled answers scores",
        "training itself moves answers so, whatever it teaches, so this may not be knowledge.",
    )),
    SECONDS: ("second choice", (
        "the unfused persona's second choices in place of what A1 moves score",
        "on items that were answered wrongly, whatever moves an answer there gains.",
    )),
    GUESSING: ("guessing", (
        "guessing, or its own choice of places, scores",
        "the items were chosen for being answered wrongly, and any change leads back to that rate.",
    )),
}  # fmt: skip


def _of_form(form: FormShift, null: Null, n: int) -> str:
    """A gain of letters found, not of right ones among those found."""
    among = "no item is answered so by both"
    if null.n:
        points = 100 * null.difference
        among = f"among the {null.n} items that both answer so the gain is {points:+.2f} points"
    return (
        f"A1 answers {percent(form.in_form, n)} of the items in the form that was asked for and A0 "
        f"{percent(form.control_in_form, n)}; {among}"
    )


def percent(count: int, n: int) -> str:
    return f"{count / n:.2%} ({count} of {n})"


# --- in words ------------------------------------------------------------------------------------

OUTCOMES: dict[Outcome, str] = {
    "knowledge": "knowledge, clearly above every control",
    "no gain": "no knowledge shown, too small a gain over zeros",
    "undecided": "undecided, too few items to say",
    "unmatched": "undecided, the random delta moves too few answers to be a control",
    "format": "no knowledge shown, a change of form",
    "perturbation": "no knowledge shown, not clearly above a random delta",
    "shuffled": "no knowledge shown, not clearly above shuffled answers",
    "second choice": "no knowledge shown, not clearly above second choices",
    "guessing": "no knowledge shown, not clearly above guessing",
    "wording": "no knowledge shown, the gain hangs on one wording",
    "exploratory": "no claim",
    "refused": "no claim, controls are missing",
}


def verdict(findings: Findings) -> str:
    """The answer first, of the deciding way; then its numbers, and what the other ways say."""
    first, standing = findings.judgements[0], findings.standing
    claim = findings.claims[first.way]
    adapter = "the unfused" if first.way == "unfused" else f"fused by {first.way}, the"
    head = headline(findings, first)
    answer = (
        f"{head[0].upper()}{head[1:]}: {adapter} adapter (A1) answers "
        f"{percent(claim.count, claim.n)} of what base and persona got wrong, its zero-delta "
        f"control (A0) {percent(claim.control_count, claim.n)}."
    )
    low, high = claim.interval.low, claim.interval.high
    gain = (
        f"Gain, A1 - A0: {100 * claim.difference:+.2f} points (95%: {100 * low:+.1f} to "
        f"{100 * high:+.1f}; McNemar p = {claim.mcnemar.p_value:.2g}, p (Holm) over all policies = "
        f"{findings.nulls[first.way][0].p_adjusted:.2g}; z-test p = {claim.p_value:.2g}). "
        f"{first.words}"
    )
    words = ["EXPLORATORY."] if standing.reasons else []
    words += [
        answer, gain, *_of_second_form(findings), *_of_other_ways(findings), *_loss(findings)
    ]  # fmt: skip
    words.append(published_in_words(findings.published_rule))
    if findings.missing_controls and first.outcome != "refused":
        words.append(f"Controls that are missing: {'; '.join(findings.missing_controls)}.")
    return " ".join([*words, standing.in_words()])


def headline(findings: Findings, judgement: Judgement) -> str:
    """Its outcome in the words of tables and verdict. Jitter is what the fuse does by itself: only
    where half of the gain or more came with zeros.
    """
    way = judgement.way
    claim, moved = findings.claims[way], findings.moved[arm("a1", way)]
    if findings.standing.reasons and judgement.outcome != "refused":
        return OUTCOMES["exploratory"]
    if judgement.outcome in ("no gain", "undecided"):
        form, parts = findings.forms[way], findings.decomposition.get(way)
        if not form.in_form and not form.control_in_form:
            return "no claim, neither arm gives one answer in the form that was asked for"
        if claim.difference < 0 and claim.mcnemar.p_value < findings.criterion.alpha:
            return "harm, no knowledge"
        if judgement.outcome == "no gain" and moved.n and not moved.changed:
            return "no knowledge shown, not one answer changes"
        floor_share = (parts and parts.floor_share) or 0
        if judgement.outcome == "no gain" and way != "unfused" and floor_share >= 0.5:
            return "only jitter, no knowledge shown"
    return OUTCOMES[judgement.outcome]


def _of_second_form(findings: Findings) -> list[str]:
    """What the deciding way's A1 and A0 answer there, and what A1 does not beat."""
    way = findings.judgements[0].way
    if way not in findings.second_nulls:
        return []
    a1, a0 = (findings.second_form[arm(kind, way)] for kind in ("a1", "a0"))
    unbeaten = [n.name for n in findings.second_nulls[way] if not beaten(n, findings.criterion)]
    beats = f"all but {', '.join(unbeaten)}" if unbeaten else "every control there too"
    if len(unbeaten) == len(findings.second_nulls[way]):
        beats = "none of its controls"
    words = (
        f"In the second form of the prompt A1 answers {percent(a1.correct, a1.n)} and A0 "
        f"{percent(a0.correct, a0.n)}; A1 beats {beats}."
    )
    return [words]


def _of_other_ways(findings: Findings) -> list[str]:
    """Where the deciding way shows no knowledge: whether unfused, or another policy, does."""
    first, *others = findings.judgements
    if first.outcome == "knowledge":
        return []
    outcomes = {judgement.way: judgement.outcome for judgement in others}
    words = []
    if "unfused" in outcomes and first.outcome in ("no gain", "undecided"):
        points = f"{100 * findings.claims['unfused'].difference:+.2f} points"
        if outcomes["unfused"] == "knowledge":
            words.append(f"Unfused the adapter does add knowledge ({points}): the fuse loses it.")
        elif outcomes["unfused"] == "no gain":
            words.append(f"Unfused, without any rounding, it is no gain either ({points}).")
        else:
            words.append(f"Unfused, without any rounding, the gain is {points}.")
    fused = [way for way, o in outcomes.items() if o == "knowledge" and way != "unfused"]
    if fused:
        words.append(f"Fused by {', '.join(fused)} it adds knowledge.")
    return words


def _loss(findings: Findings) -> list[str]:
    """What the deciding way costs, of items that both models got right."""
    way = findings.judgements[0].way
    lost = {kind: findings.right_flips.get(arm(kind, way)) for kind in ("a1", "a0")}
    a1, a0 = lost["a1"], lost["a0"]
    if a1 is None or a0 is None or not a1.n:
        return []
    return [
        f"Of {a1.n} items that both models got right A1 loses {a1.broken}, A0 {a0.broken}.",
    ]


def published_in_words(rule: PublishedRule) -> str:
    """The published rule, verbatim, next to ours."""
    size = "" if rule.n == rule.stated_n else f", here {rule.n}"
    least = f"the least count that passes is {rule.least_count}"
    if rule.least_count > rule.n:
        least = "no count would pass"
    return (
        "The published rule (A1 - A0 of at least 5 points and p < 0.05 by the z-test, one policy, "
        f"n = {rule.stated_n}{size}) is {'met' if rule.met else 'not met'}: {rule.count} against "
        f"{rule.control_count}, {least}, p = {rule.p_value:.2g}."
    )


def floor_in_words(wrong: Flips, right: Flips, alpha: float) -> str:
    """Whether A0 turns wrong answers right as readily as right ones wrong, more readily, or less.

    wrong: of A0 against the re-measured persona on Set G; right: on items both models got right.
    """
    if not right.n or not wrong.n:
        return "A0 was not tried on items that both models got right."
    if not wrong.fixed and not right.broken:
        some = "some answers" if wrong.changed or right.changed else "no answer at all"
        fixed, broken = (100 * wilson_interval(0, n).high for n in (wrong.n, right.n))
        return (
            f"A0 changes {some} and no outcome: it fixes 0 of {wrong.n} (at most {fixed:.1f}%, "
            f"95%) and breaks 0 of {right.n} (at most {broken:.1f}%)."
        )
    from scipy.stats import fisher_exact

    rates = f"A0 fixes {percent(wrong.fixed, wrong.n)} and breaks {percent(right.broken, right.n)}"
    outcomes = [[wrong.fixed, wrong.n - wrong.fixed], [right.broken, right.n - right.broken]]
    p = float(fisher_exact(outcomes).pvalue)
    p_value = f"(Fisher, p = {p:.2g})"
    if p >= alpha:
        return f"{rates}: no asymmetry shown {p_value}, as with noise, or with too few items."
    if wrong.fixed / wrong.n < right.broken / right.n:
        return (
            f"{rates}: more broken than fixed {p_value}, so damage, as answers that "
            "change at random are rarely right."
        )
    return f"{rates}: one-sided {p_value}, so selection or a harness that changed."


def fuse_notes(fuses: Mapping[str, Mapping[str, Any]], target_correlation: float) -> list[str]:
    """Ways that were to keep A1's delta and do not. And where the control of refit had nothing to
    change, as after an earlier refit at zero delta: refit reaches a fixed point, and a floor is
    measured only short of it.
    """
    missed = []
    for way in fuses.keys() & {"promote", "auto"}:
        correlation = (fuses[way]["a1"]["total"] or {}).get("correlation")
        if correlation is not None and correlation < target_correlation:
            missed.append(
                f"Fused by {way}, A1 misses the target correlation of {target_correlation:g}: it "
                f"has {correlation:.3f}, even at 8 bits. That arm does not keep what was trained; "
                "the unfused one does."
            )
    return [*sorted(missed), *_fixed_points(fuses)]


def _fixed_points(fuses: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if "refit" not in fuses:
        return []
    a0 = fuses["refit"]["a0"]
    modules = a0["by_module"]
    # Plain weights have no grid, and so no fixed point of it.
    quantized = [path for path, bits in a0["bits"].items() if bits is not None]
    still = [path for path in quantized if path in modules and not modules[path]["artifact"]]
    if not still:
        return []
    note = (
        "A0 by refit changed no weight: these modules are at the fixed point of refit, as after an "
        "earlier refit that added nothing to them. Its floor is 0 by construction."
    )
    if len(still) < len(quantized):
        note = (
            f"A0 by refit changed {len(quantized) - len(still)} of {len(quantized)} modules; the "
            "others are at the fixed point of refit, as after an earlier one, and have no floor."
        )
    return [note]


def answer_notes(arms: Mapping[str, ArmResult]) -> list[str]:
    """Of generated answers: arms that never box, and a boxed rate that is not the same in all."""
    unboxed = [name for name, result in arms.items() if not result.rules.get("boxed")]
    if len(unboxed) == len(arms):
        rules: Counter[str] = Counter()
        for result in arms.values():
            rules.update(result.rules)
        listed = ", ".join(f"{rule} {count}" for rule, count in rules.items())
        words = (
            "NO ARM BOXES A SINGLE ANSWER: every letter comes from a fallback rule, or there is "
            f"none ({listed}). These accuracies are of form, not of knowledge."
        )
        return [words]
    if unboxed:
        listed = ", ".join(unboxed)
        return [f"Never box an answer: {listed}. Their letters come from fallback rules."]
    return []
