"""What replies and answers say: scores, the validity gate, comparisons, claims, broad regression.

Computed from answers alone, as JSON: all figures of the result. Arms are compared prompt by prompt,
in the same order: four equal totals may be four different sets of prompts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxstacks.arms.suite import Suite
from mlxstacks.stats import (
    McNemarTest,
    binomial_at_most,
    holm,
    mcnemar_of_pairs,
    wilson_interval,
)
from mlxstacks.studies.identity.plan import (
    BASE,
    BASE_FACTUAL,
    BASE_ZERO,
    CONDITIONS,
    PUBLISHED_BASE,
    REFERENCE,
    RERUN,
    UNFUSED,
    ZERO,
    arm,
    claims_of,
    label,
    pairs_of,
)
from mlxstacks.studies.identity.settings import GATE_PROMPTS, IdentitySettings
from mlxstacks.study.answers import Answer, paired
from mlxstacks.study.document import Standing

Answers = Mapping[str, Sequence[Answer]]
Figures = dict[str, Any]
HEADS = {"kept": "persona kept by", "lost": "persona lost by", "undecided": "undecided for"}
PUBLISHED_OF = "Qwen3.5-35B-A3B, 3-bit; published, not measured here"


def analyse(
    replies: Answers,
    answers: Answers,
    *,
    narrow: Answers,
    suite: Suite,
    settings: IdentitySettings,
    has_adapter: bool,
    standing: Standing,
    is_published_model: bool = False,
) -> Figures:
    """All figures. replies: of each arm to the suite; answers, narrow: to items and narrow items.

    is_published_model: the base is the study's own, whose scores then stand for comparison.

    Raises: ValueError where the base or a policy's persona has no replies, or arms answered
    different prompts.
    """
    policies: tuple[str, ...] = settings.policies
    replies = {name: given for name, given in replies.items() if given}
    absent = [
        name for name in (BASE, *(arm(REFERENCE, p) for p in policies)) if name not in replies
    ]
    if absent:
        raise ValueError(f"no replies of {', '.join(absent)}: nothing can be compared")
    scores = {name: score(name, given) for name, given in replies.items()}
    passed = {name: figures["passed"] for name, figures in scores.items()}
    limits = limits_of(settings, scores[BASE]["n"])
    claims = claims_of(settings, has_adapter)
    labels = {name: label(name, settings) for name in scores}
    figures: Figures = {
        "conditions": {
            name: {"label": words, "policy": policy or None, **scores[name]}
            for name, (words, policy) in labels.items()
        },
        "gates": {
            policy: gate(
                policy, passed[BASE], passed[arm(REFERENCE, policy)], passed.get(UNFUSED), limits
            )
            for policy in policies
        },
        "missing_controls": {p: missing_controls(p, replies, has_adapter) for p in policies},
    }
    # What a gate lets through: no claim behind a shut one can be made, so none is counted.
    tested = [pair for pair in claims if figures["gates"][labels[pair[1]][1]]["valid"]]
    figures["compared"] = compare_all(
        replies, pairs_of(settings, has_adapter), tested, settings.largest_loss
    )
    figures["outcome"] = {policy: passing["state"] for policy, passing in figures["gates"].items()}
    figures["judgements"] = [
        judge(figures, name, settings, standing)
        for name, _ in claims
        if name in figures["compared"]
    ]
    figures["regression"], figures["regression_words"] = regression(answers, settings)
    figures["narrow"], figures["narrow_words"] = regression(narrow, settings)
    figures["published"] = published() if is_published_model else None
    prompts = {prompt.prompt_id: prompt.prompt for prompt in suite}
    order = {name: place for place, name in enumerate(prompts)}
    figures["replies"] = {
        name: [
            {
                "prompt_id": reply.item_id, "category": reply.subject,
                "prompt": prompts[reply.item_id], "passed": reply.correct, "reason": reply.rule,
                "text": reply.text,
            }
            for reply in sorted(given, key=lambda reply: order[reply.item_id])
        ]
        for name, given in replies.items()
    }  # fmt: skip
    return figures


def score(name: str, answers: Sequence[Answer]) -> Figures:
    """Prompts that an arm passes, in all and by category. Raises: ValueError for no answers."""
    passed, n = sum(answer.correct for answer in answers), len(answers)
    by_category: dict[str, dict[str, int]] = {}
    for answer in answers:
        part = by_category.setdefault(answer.subject, {"passed": 0, "n": 0})
        part["passed"] += answer.correct
        part["n"] += 1
    return {
        "arm": name, "n": n, "passed": passed, "share": passed / n,
        "interval": wilson_interval(passed, n).as_json(), "by_category": by_category,
    }  # fmt: skip


def published() -> Figures:
    """The study's scores of 20, for comparison."""
    counts = {kind: c.published for kind, c in CONDITIONS.items() if c.published is not None}
    counts[BASE] = PUBLISHED_BASE
    return {
        "of": PUBLISHED_OF,
        "n": GATE_PROMPTS,
        "passed": counts,
        "intervals": {
            name: wilson_interval(count, GATE_PROMPTS).as_json() for name, count in counts.items()
        },
    }


# --- the gate -------------------------------------------------------------------------------------


def limits_of(settings: IdentitySettings, n: int) -> dict[str, int]:
    """The gate for n prompts, by share, never more lenient than for 20, where it is as given: most
    that the base may pass, fewest that the persona must pass.
    """
    return {
        "n": n,
        "most_of_base": settings.most_of_base * n // GATE_PROMPTS,
        "least_of_persona": -(-settings.least_of_persona * n // GATE_PROMPTS),
    }


# What a shut gate says, by its state.
SHUT = {
    "base passes": "scorer invalid",
    "lost in its fuse": "persona lost by its own fuse",
    "no persona": "no persona",
    "persona fails": "no persona",
}


def gate(
    policy: str, base: int, persona: int, unfused: int | None, limits: Mapping[str, int]
) -> Figures:
    """Whether the suite can tell a persona at all: without that no claim is made.

    Judged on the persona as the policy fused it. The persona beside the base, not fused (None for
    one that was given as a model), decides nothing; it says why a gate is shut: a scorer that does
    not discriminate, or a fuse that lost the persona before anything was put on top of it. Scores
    count prompts passed. The truth table is a test.
    """
    n, most, least = limits["n"], limits["most_of_base"], limits["least_of_persona"]
    if base > most:
        state = "base passes"
        why = f"the untrained base passes more than {most}, so passing says nothing of the persona"
    elif persona >= least:
        state, why = "valid", ""
    elif unfused is None:
        state = "persona fails"
        why = (
            f"the persona passes fewer than {least}; it was given as a model, so whether its fuse "
            "lost it is not known"
        )
    elif unfused >= least:
        state = "lost in its fuse"
        why = (
            f"unfused it passes the {least} that it takes, fused it does not: it was lost before "
            "anything was stacked on it"
        )
    else:
        state, why = "no persona", f"not even unfused does the persona pass {least}"
    beside = "" if unfused is None else f", unfused {unfused}"
    scores = f"under {policy} (base {base}, persona {persona}{beside} of {n})"
    return {
        "policy": policy, "state": state, "base": base, "persona": persona, "unfused": unfused,
        "limits": dict(limits), "valid": state == "valid",
        "words": f"{SHUT[state]} {scores}: {why}. No preservation claim"
        if why else f"scorer valid {scores}",
    }  # fmt: skip


# --- prompt by prompt -----------------------------------------------------------------------------


def compare(answers: Answers, name: str, reference: str) -> Figures:
    """An arm beside its reference. kept, lost, gained, neither: prompts by whether the reference
    and the arm pass them; their ids where they differ.

    p_value: McNemar's exact. loss: lost of what the reference passes, with its Wilson interval;
    None where it passes none. other_texts: replies that differ in any character. The rest is of
    claims (`compare_all`).

    Raises: ValueError for arms that answered different prompts: such pairs are no pairs.
    """
    pairs, test = _paired(answers, name, reference)
    lost = [b.item_id for b, a in pairs if b.correct > a.correct]
    gained = [b.item_id for b, a in pairs if b.correct < a.correct]
    kept = sum(b.correct and a.correct for b, a in pairs)
    passed = kept + len(lost)
    return {
        "arm": name, "reference": reference, "n": len(pairs), "kept": kept,
        "neither": len(pairs) - passed - len(gained), "lost": lost, "gained": gained,
        "p_value": test.p_value,
        "loss": wilson_interval(len(lost), passed).as_json() if passed else None,
        "other_texts": sum(b.text != a.text for b, a in pairs), "p_adjusted": None,
        "p_kept": None, "p_kept_adjusted": None,
    }  # fmt: skip


def _paired(
    answers: Answers, name: str, reference: str
) -> tuple[list[tuple[Answer, Answer]], McNemarTest]:
    """(before, after) of the reference and an arm, and McNemar's test of them."""
    pairs = [(before, after) for after, before in paired(answers, name, reference)]
    test = mcnemar_of_pairs([b.correct for b, _ in pairs], [a.correct for _, a in pairs])
    return pairs, test


def compare_all(
    answers: Answers,
    pairs: Sequence[tuple[str, str]],
    claims: Sequence[tuple[str, str]],
    largest_loss: float,
) -> dict[str, Figures]:
    """Arm -> comparison with its reference, of pairs whose arms both answered.

    Of claims also p_kept: binomial, of so few lost were `largest_loss` to be lost; p_adjusted and
    p_kept_adjusted: by Holm, both p-values of all claims as one family.
    """
    compared = {
        name: compare(answers, name, reference)
        for name, reference in pairs
        if answers.get(name) and answers.get(reference)
    }
    claimed = [compared[name] for name, _ in claims if name in compared]
    for comparison in claimed:
        lost = len(comparison["lost"])
        passed = comparison["kept"] + lost
        comparison["p_kept"] = binomial_at_most(lost, passed, largest_loss) if passed else 1.0
    adjusted = holm([c[key] for key in ("p_value", "p_kept") for c in claimed])
    for place, comparison in enumerate(claimed):
        comparison["p_adjusted"] = adjusted[place]
        comparison["p_kept_adjusted"] = adjusted[len(claimed) + place]
    return compared


def flips_note(compared: Mapping[str, Figures]) -> tuple[str, ...]:
    """Whether greedy replies are the same twice: what differs then is no effect of anything."""
    rerun = compared.get(RERUN)
    if rerun is None:
        return ()
    if not rerun["other_texts"]:
        return (f"Run again, {rerun['reference']} gave the same {rerun['n']} replies.",)
    words = (
        f"Run again, {rerun['reference']} gave {rerun['other_texts']} of {rerun['n']} replies "
        f"otherwise, {len(rerun['lost'])} lost and {len(rerun['gained'])} gained: so much is "
        "chance."
    )
    return (words,)


# --- claims ---------------------------------------------------------------------------------------


def missing_controls(policy: str, arms: Mapping[str, object], has_adapter: bool) -> list[str]:
    """Controls without which nothing is claimed under a policy."""
    controls = {
        BASE: "the untrained base",
        RERUN: "a rerun of one condition, for run-to-run flips",
        arm(REFERENCE, policy): "the persona alone",
        arm(ZERO, policy): "the zero-delta adapter through the same fuse",
        arm(BASE_FACTUAL, policy): "the base with a factual adapter of its own",
    }
    if has_adapter:
        controls[UNFUSED] = "the persona's adapter on the base, not fused"
    return [words for name, words in controls.items() if not arms.get(name)]


def judge(
    figures: Figures, name: str, settings: IdentitySettings, standing: Standing
) -> dict[str, str]:
    """A claim: kept, lost, undecided or no claim. The first thing that stands against any claim
    decides. figures: gates, compared and missing_controls.
    """
    kind, _, policy = name.rpartition("_")
    if not CONDITIONS[kind].claimed:
        raise ValueError(f"{name} is no claim")
    compared, missing = figures["compared"], figures["missing_controls"][policy]

    def judgement(outcome: str, words: str) -> dict[str, str]:
        return {"arm": name, "policy": policy, "outcome": outcome, "words": words}

    if not figures["gates"][policy]["valid"]:
        return judgement("no claim", figures["gates"][policy]["words"])
    if missing:
        return judgement("no claim", f"not claimed without {'; '.join(missing)}")
    if standing.reasons:
        return judgement("no claim", standing.in_words())
    comparison = compared[name]
    kept, lost, gained = comparison["kept"], comparison["lost"], comparison["gained"]
    # There is a loss: a persona that passes the gate passes a prompt.
    loss, p, p_kept = comparison["loss"], comparison["p_adjusted"], comparison["p_kept_adjusted"]
    counts = (
        f"keeps {kept} of {kept + len(lost)}, gains {len(gained)}; loss {100 * loss['low']:.0f} to "
        f"{100 * loss['high']:.0f}% (95%); p = {p:.2g} for no loss, p = {p_kept:.2g} for a loss of "
        f"{settings.largest_loss:.0%} (Holm, all claims)"
    )
    if p < settings.alpha and len(lost) > len(gained):
        # What of a loss the zero-delta control has too is not the second adapter's doing.
        by_fuse = compared[arm(ZERO, policy)]["lost"]
        same = len(set(by_fuse) & set(lost))
        return judgement(
            "lost",
            f"{counts}; the zero-delta control loses {len(by_fuse)} by the fuse alone, {same} of "
            "them here too",
        )
    return judgement("kept" if p_kept < settings.alpha else "undecided", counts)


_COUNTED = {
    "kept": "persona kept by", "lost": "persona lost by", "undecided": "undecided",
    "no claim": "no claim made for",
}  # fmt: skip


def verdict(figures: Figures, settings: IdentitySettings, standing: Standing) -> str:
    """Of several policies the counts; a sentence for each; and what equal totals do not say."""
    outcomes = [judgement["outcome"] for judgement in figures["judgements"]]
    sentences, claimed = ["EXPLORATORY."] * bool(standing.reasons), False
    if len(figures["gates"]) > 1 and set(outcomes) - {"no claim"}:
        counts = {head: outcomes.count(outcome) for outcome, head in _COUNTED.items()}
        said = ", ".join(f"{head} {count}" for head, count in counts.items() if count)
        sentences.append(f"Of {len(outcomes)} second adapters under a policy: {said}.")
    for policy, passing in figures["gates"].items():
        judgements = [j for j in figures["judgements"] if j["policy"] == policy]
        if not passing["valid"]:
            sentences.append(f"{passing['words'][0].upper()}{passing['words'][1:]}.")
        elif judgements and judgements[0]["words"] == standing.in_words():
            sentences.append(f"No claim, {passing['words']}.")
        elif judgements and judgements[0]["outcome"] == "no claim":
            sentences.append(f"No claim under {policy}: {judgements[0]['words'].rstrip('.')}.")
        else:
            claimed = True
            parts = [
                f"{head} {', '.join(labels)}"
                for outcome, head in HEADS.items()
                if (labels := [_kept_of(figures, j) for j in judgements if j["outcome"] == outcome])
            ]
            sentences.append(f"Under {policy}: {'; '.join(parts)}.")
    if claimed:
        sentences.append(
            f"Kept means that a loss of {settings.largest_loss:.0%} of the answers is excluded "
            f"(p < {settings.alpha:g}, all claims counted); exact preservation is not shown."
        )
        if any(j["outcome"] == "undecided" for j in figures["judgements"]):
            sentences.append("Undecided: so few prompts show neither that nor a loss.")
    if claimed or standing.reasons:
        sentences.append(standing.in_words())
    return " ".join(sentences)


def _kept_of(figures: Figures, judgement: Mapping[str, str]) -> str:
    """A condition, and of the persona's prompts how many it keeps."""
    name = judgement["arm"]
    comparison = figures["compared"][name]
    kept = comparison["kept"]
    return f"{figures['conditions'][name]['label']} ({kept} of {kept + len(comparison['lost'])})"


# --- broad regression -----------------------------------------------------------------------------


def regress(answers: Answers, name: str, reference: str) -> Figures:
    """An arm beside its reference on the items. fixed: wrong, then right; broken: the reverse.

    p_value: McNemar's exact. chi_square: without correction, as the study has it: 135 fixed and 56
    broken of 6,000 were published (The Stacking Confound). in_form, reference_in_form:
    answers in a box, or likelihoods without tie; more letters found are more right answers without
    any knowledge.

    Raises: ValueError for arms that answered different items.
    """
    pairs, test = _paired(answers, name, reference)
    right_before = sum(before.correct for before, _ in pairs)
    return {
        "arm": name, "reference": reference, "n": len(pairs),
        "right": sum(after.correct for _, after in pairs), "reference_right": right_before,
        "fixed": test.gained, "broken": test.lost, "p_value": test.p_value,
        "chi_square": test.chi_square, "in_form": sum(after.in_form for _, after in pairs),
        "reference_in_form": sum(before.in_form for before, _ in pairs),
        "net": test.gained - test.lost, "both_wrong": len(pairs) - right_before - test.gained,
    }  # fmt: skip


def regression(
    answers: Answers, settings: IdentitySettings
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Each arm beside the base, and the persona beside the base after a zero-delta fuse; and by
    policy, what of the persona's net is its own.
    """
    if not answers.get(BASE):
        return {}, {}
    regressions = {name: regress(answers, name, BASE) for name in answers if name != BASE}
    words: dict[str, str] = {}
    for policy in settings.policies:
        persona, zero = arm(REFERENCE, policy), arm(BASE_ZERO, policy)
        if persona not in regressions:
            continue
        against = regress(answers, persona, zero) if zero in answers else None
        if against is not None:
            regressions[f"{persona}_beside_{zero}"] = against
        words[policy] = credit(
            policy, regressions[persona], regressions.get(zero), against, settings.alpha
        )
    return regressions, words


def credit(
    policy: str, persona: Figures, zero: Figures | None, against_zero: Figures | None, alpha: float
) -> str:
    """What of the persona's net is its own.

    zero: the base after a zero-delta fuse, beside the base; against_zero: the persona beside it.
    """
    words = f"By {policy} the persona answers {_change(persona)}"
    if zero is None or against_zero is None:
        words += (
            ". Credited to nothing: the base after a zero-delta fuse is missing, since the persona "
            "was given as a model."
        )
        return words + _form(persona)
    fuse = f"the zero-delta fuse of the base alone {_change(zero)}"
    if persona["p_value"] >= alpha:
        return f"{words}: no change that can be shown; {fuse}.{_form(persona)}"
    if against_zero["p_value"] >= alpha:
        judged = "not to be told from what the fuse does by itself"
    else:
        more = "more" if against_zero["net"] > 0 else "fewer"
        judged = f"{more} right answers by the persona itself"
    return (
        f"{words}; {fuse}. Next to that base it is {_change(against_zero)}: {judged}."
        f"{_form(persona)}"
    )


def _form(persona: Figures) -> str:
    """A sentence where answers are not in form, or not equally often in both."""
    count, before = persona["in_form"], persona["reference_in_form"]
    if not count and not before:
        return (
            " NOT ONE of these answers is in form (boxed; of likelihoods, no tie): every letter "
            "comes from a fallback rule, or there is none, so this is of form, not of knowledge."
        )
    if count == before:
        return ""
    return (
        f" In form (boxed; of likelihoods, no tie) are {count:,} answers, of "
        f"{persona['reference']} {before:,}: that alone moves right answers."
    )


def _change(figures: Figures) -> str:
    fixed, broken, n = figures["fixed"], figures["broken"], figures["n"]
    if not fixed and not broken:
        return f"{n:,} of {n:,} as before"
    return (
        f"net {figures['net']:+,} ({fixed:,} fixed, {broken:,} broken of {n:,}, p = "
        f"{figures['p_value']:.2g})"
    )
