"""From comparisons to words: which condition keeps the persona, as far as this suite can show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxstacks.studies.identity.analysis import Compared
from mlxstacks.studies.identity.conditions import (
    BASE,
    CONDITIONS,
    REFERENCE,
    RERUN,
    UNFUSED,
    ZERO,
    arm,
)
from mlxstacks.studies.identity.gate import Gate
from mlxstacks.study.plan import Standing

Outcome = Literal["kept", "lost", "not shown", "no claim"]


@dataclass(frozen=True)
class Judgement:
    """One condition under one policy."""

    arm: str
    policy: str
    outcome: Outcome
    words: str

    def as_json(self) -> dict[str, Any]:
        return vars(self).copy()


@dataclass(frozen=True)
class Case:
    """All that is judged. labels: arm -> its condition in words. missing: by policy."""

    alpha: float
    largest_loss: float
    standing: Standing
    gates: Mapping[str, Gate]
    compared: Mapping[str, Compared]
    labels: Mapping[str, str]
    missing: Mapping[str, Sequence[str]]


def missing_controls(policy: str, arms: Mapping[str, object], has_adapter: bool) -> list[str]:
    """Controls without which nothing is claimed under a policy."""
    wanted = {
        BASE: "the untrained base",
        RERUN: "a rerun of one condition, for run-to-run flips",
        arm(REFERENCE, policy): "the persona alone",
        arm(ZERO, policy): "the zero-delta adapter through the same fuse",
        arm("base_factual", policy): "the factual adapter on the base",
    }
    if has_adapter:
        wanted[UNFUSED] = "the persona beside the base, not fused"
    return [words for name, words in wanted.items() if not arms.get(name)]


def judge(case: Case, name: str) -> Judgement:
    """A claim. The first thing that stands against any claim decides."""
    kind, _, policy = name.rpartition("_")
    if not CONDITIONS[kind].claimed:
        raise ValueError(f"{name} is no claim")
    gate, found = case.gates[policy], case.compared[name]
    if not gate.valid:
        return Judgement(name, policy, "no claim", gate.words)
    if case.missing[policy]:
        words = f"not claimed without {'; '.join(case.missing[policy])}"
        return Judgement(name, policy, "no claim", words)
    if case.standing.reasons:
        return Judgement(name, policy, "no claim", case.standing.in_words())
    loss = found.loss
    assert loss is not None  # a persona that passes the gate passes a prompt
    assert found.p_adjusted is not None
    counts = (
        f"keeps {found.kept} of {found.passed_by_reference}, gains {len(found.gained)} (loss 95% "
        f"{100 * loss.low:.0f} to {100 * loss.high:.0f}%, p = {found.p_adjusted:.2g})"
    )
    if found.p_adjusted < case.alpha and len(found.lost) > len(found.gained):
        return Judgement(name, policy, "lost", counts + _by_the_fuse(case, policy, found))
    if loss.high <= case.largest_loss:
        return Judgement(name, policy, "kept", counts)
    return Judgement(name, policy, "not shown", counts)


def _by_the_fuse(case: Case, policy: str, found: Compared) -> str:
    """What of a loss the zero-delta control has too: that is not the second adapter's doing."""
    zero = case.compared[arm(ZERO, policy)]
    same = len(set(zero.lost) & set(found.lost))
    lost = len(zero.lost)
    return f"; the zero-delta control loses {lost} by the fuse alone, {same} of them here too"


def verdict(case: Case, judgements: Sequence[Judgement]) -> str:
    """A sentence for each policy, and what equal totals do not say."""
    sentences = []
    claimed = False
    for policy, gate in case.gates.items():
        own = [one for one in judgements if one.policy == policy]
        if not gate.valid:
            sentences.append(f"{gate.words[0].upper()}{gate.words[1:]}.")
            continue
        if own and own[0].outcome == "no claim":
            sentences.append(f"No claim under {policy}: {own[0].words.rstrip('.')}.")
            continue
        claimed = True
        sentences.append(_of_policy(case, policy, own))
    if claimed:
        sentences.append(
            f"Kept means that a loss of more than {case.largest_loss:.0%} of the answers is "
            "excluded at 95%; exact preservation is not shown."
        )
        sentences.append(case.standing.in_words())
    return " ".join(sentences)


def _of_policy(case: Case, policy: str, judgements: Sequence[Judgement]) -> str:
    heads = {"kept": "keeps the persona", "lost": "loses it", "not shown": "leaves it open"}
    parts = [f"{case.labels[one.arm]} {heads[one.outcome]}: it {one.words}" for one in judgements]
    return f"Under {policy}, {'; '.join(parts)}."
