"""Result of `mlxstacks identity`: everything that the tables show, as one record and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxstacks.stats import wilson_interval
from mlxstacks.studies.confound.answers import Answer
from mlxstacks.studies.identity.analysis import (
    Answers,
    Compared,
    Regression,
    Score,
    compare_all,
    credit,
    regress,
    score_of,
)
from mlxstacks.studies.identity.conditions import (
    BASE,
    BASE_ZERO,
    CONDITIONS,
    PUBLISHED_BASE,
    REFERENCE,
    UNFUSED,
    arm,
    claims_of,
    label,
    pairs_of,
)
from mlxstacks.studies.identity.gate import Gate, gate, limits_of
from mlxstacks.studies.identity.settings import GATE_PROMPTS, IdentitySettings
from mlxstacks.studies.identity.suite import Suite
from mlxstacks.studies.identity.verdict import (
    Case,
    Judgement,
    judge,
    missing_controls,
    verdict,
)
from mlxstacks.study.plan import Standing

KIND = "identity"
PUBLISHED_OF = "Qwen3.5-35B-A3B, 3-bit; published, not measured here"
PUBLISHED_MODEL = "qwen3.5-35b-a3b-3bit"


@dataclass(frozen=True)
class Reply:
    """One reply: raw text, verdict, the reason for it."""

    prompt_id: str
    category: str
    prompt: str
    passed: bool
    reason: str
    text: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Findings:
    """What the answers say. scores, replies: by arm. compared: by arm, beside its reference.

    regressions: by arm; of the items. credits: by policy, in words.
    """

    labels: dict[str, tuple[str, str]]
    scores: dict[str, Score]
    replies: dict[str, list[Reply]]
    gates: dict[str, Gate]
    compared: dict[str, Compared]
    judgements: list[Judgement]
    regressions: dict[str, Regression]
    credits: dict[str, str]
    missing_controls: dict[str, list[str]]
    standing: Standing
    verdict: str
    is_published_model: bool = False

    def as_json(self) -> dict[str, Any]:
        def each(found: Mapping[str, Any]) -> dict[str, Any]:
            return {name: one.as_json() for name, one in found.items()}

        return {
            "conditions": {
                name: {"label": words, "policy": policy or None, **self.scores[name].as_json()}
                for name, (words, policy) in self.labels.items()
            },
            "gates": each(self.gates),
            "compared": each(self.compared),
            "judgements": [one.as_json() for one in self.judgements],
            "regression": each(self.regressions),
            "regression_words": self.credits,
            "missing_controls": self.missing_controls,
            "standing": self.standing.as_json(),
            "published": published() if self.is_published_model else None,
            "replies": {name: [r.as_json() for r in found] for name, found in self.replies.items()},
        }


def find(
    answers: Answers,
    item_answers: Answers,
    *,
    suite: Suite,
    settings: IdentitySettings,
    has_adapter: bool,
    standing: Standing,
    is_published_model: bool = False,
) -> Findings:
    """Everything from answers. answers: of each arm to the suite; item_answers: to the items.

    is_published_model: the base is the study's own, whose scores then stand for comparison.

    Raises: ValueError where the base or a policy's persona has no answers, or arms answered
    different prompts.
    """
    needed = [BASE, *(arm(REFERENCE, policy) for policy in settings.policies)]
    absent = [name for name in needed if not answers.get(name)]
    if absent:
        raise ValueError(f"no replies of {', '.join(absent)}: nothing can be compared")
    there = {name: found for name, found in answers.items() if found}
    scores = {name: score_of(name, found) for name, found in there.items()}
    labels = {name: label(name, settings) for name in scores}
    limits = limits_of(settings, scores[BASE].n)
    policies: tuple[str, ...] = settings.policies
    unfused = scores[UNFUSED].passed if UNFUSED in scores else None
    gates = {
        policy: gate(
            policy, scores[BASE].passed, scores[arm(REFERENCE, policy)].passed, unfused, limits
        )
        for policy in policies
    }
    claims = claims_of(settings, has_adapter)
    compared = compare_all(there, pairs_of(settings, has_adapter), claims)
    missing = {policy: missing_controls(policy, there, has_adapter) for policy in policies}
    case = Case(
        settings.alpha, settings.largest_loss, standing, gates, compared,
        {name: words for name, (words, _) in labels.items()}, missing,
    )  # fmt: skip
    judgements = [judge(case, name) for name, _ in claims if name in compared]
    regressions, words = regression(item_answers, settings)
    return Findings(
        labels, scores, replies_of(there, suite), gates, compared, judgements, regressions, words,
        missing, standing, verdict(case, judgements), is_published_model,
    )  # fmt: skip


def regression(
    answers: Answers, settings: IdentitySettings
) -> tuple[dict[str, Regression], dict[str, str]]:
    """Each arm beside the base, and the persona beside the base after a zero-delta fuse."""
    if not answers.get(BASE):
        return {}, {}
    found = {name: regress(answers, name, BASE) for name in answers if name != BASE}
    words: dict[str, str] = {}
    for policy in settings.policies:
        persona, zero = arm(REFERENCE, policy), arm(BASE_ZERO, policy)
        if persona not in found:
            continue
        against = regress(answers, persona, zero) if zero in answers else None
        if against is not None:
            found[f"{persona}_beside_{zero}"] = against
        words[policy] = credit(policy, found[persona], found.get(zero), against, settings.alpha)
    return found, words


def replies_of(answers: Answers, suite: Suite) -> dict[str, list[Reply]]:
    """Raw replies with their verdicts, in the suite's order."""
    prompts = {one.prompt_id: one for one in suite}
    order = {name: place for place, name in enumerate(prompts)}

    def reply(one: Answer) -> Reply:
        prompt = prompts[one.item_id]
        return Reply(
            one.item_id, prompt.category, prompt.prompt, one.correct, one.rule, one.text
        )  # fmt: skip

    return {
        name: [reply(one) for one in sorted(found, key=lambda one: order[one.item_id])]
        for name, found in answers.items()
    }


def published() -> dict[str, Any]:
    """The study's scores of 20, for comparison."""
    rows = {kind: one.published for kind, one in CONDITIONS.items() if one.published is not None}
    counts = {**rows, BASE: PUBLISHED_BASE}
    return {
        "of": PUBLISHED_OF,
        "n": GATE_PROMPTS,
        "passed": counts,
        "intervals": {
            name: wilson_interval(count, GATE_PROMPTS).as_json() for name, count in counts.items()
        },
    }


@dataclass(frozen=True)
class IdentityReport:
    """status: "planned" or "done". plan, mined, fuses and findings are there once done.

    fuses: arm -> what its last fuse did to the weights. made_from: file -> digest of what was read
    of it, see made_from.py.
    """

    status: str
    save_path: str
    settings: dict[str, Any]
    arms: list[str]
    suite: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    plan_sha256: str | None = None
    power: list[str] = field(default_factory=list)
    mined: dict[str, Any] | None = None
    fuses: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: Findings | None = None
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    notes: list[str] = field(default_factory=list)
    made_from: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def verdict(self) -> str | None:
        return self.findings.verdict if self.findings else None

    @property
    def outcome(self) -> dict[str, str] | None:
        """Policy -> valid, or why its gate is shut."""
        if self.findings is None:
            return None
        return {policy: one.state for policy, one in self.findings.gates.items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "status": self.status,
            "verdict": self.verdict,
            "outcome": self.outcome,
            "save_path": self.save_path,
            "settings": self.settings,
            "plan": self.plan,
            "plan_sha256": self.plan_sha256,
            "power": self.power,
            "planned_arms": self.arms,
            "suite": self.suite,
            "mined": self.mined,
            "fuses": self.fuses,
            **(self.findings.as_json() if self.findings else {}),
            "seconds": round(self.seconds, 3),
            "versions": self.versions,
            "device": self.device,
            "notes": self.notes,
            "made_from": self.made_from,
        }


def suite_as_json(suite: Suite) -> list[dict[str, Any]]:
    return [one.as_json() for one in suite]


def flips_note(compared: Mapping[str, Compared], rerun: str) -> Sequence[str]:
    """Whether greedy replies are the same twice: what differs then is no effect of anything."""
    found = compared.get(rerun)
    if found is None:
        return ()
    if not found.other_texts:
        return (f"Run again, {found.reference} gave the same {found.n} replies.",)
    words = (
        f"Run again, {found.reference} gave {found.other_texts} of {found.n} replies otherwise, "
        f"{len(found.lost)} lost and {len(found.gained)} gained: so much is chance."
    )
    return (words,)
