"""Result of `mlxstacks confound`: everything that the tables show, as one record and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxstacks.studies.confound.analysis import (
    Answers,
    ArmResult,
    Comparison,
    Decomposition,
    Flips,
    FormShift,
    arm_result,
    compare,
    decompose,
    flips,
    form_shift,
    guess_rate,
    position_shares,
    subject_table,
)
from mlxstacks.studies.confound.plan import AGAIN, PERSONA, arm
from mlxstacks.studies.confound.verdict import (
    Case,
    Criterion,
    Judgement,
    judge,
    missing_controls,
)
from mlxstacks.studies.confound.words import floor_in_words, verdict
from mlxstacks.study.plan import Standing


@dataclass(frozen=True)
class Findings:
    """What the answers say. claims, forms, against_random, decomposition, floors: by way, in order.

    persona_flips: name of a pair of runs of the unfused persona -> what changed between them.
    right_positions: option position -> share of the test items where it is right.
    """

    arms: dict[str, ArmResult]
    right_arms: dict[str, ArmResult]
    claims: dict[str, Comparison]
    forms: dict[str, FormShift]
    against_random: dict[str, Comparison]
    decomposition: dict[str, Decomposition]
    judgements: list[Judgement]
    persona_flips: dict[str, Flips]
    right_flips: dict[str, Flips]
    floors: dict[str, str]
    subjects: dict[str, dict[str, int]]
    guess_rate: float
    right_positions: dict[str, float]
    missing_controls: list[str]
    standing: Standing
    verdict: str

    def as_json(self) -> dict[str, Any]:
        def each(found: Mapping[str, Any]) -> dict[str, Any]:
            return {name: one.as_json() for name, one in found.items()}

        return {
            "arms": each(self.arms),
            "arms_on_right_items": each(self.right_arms),
            "claims": each(self.claims),
            "forms": each(self.forms),
            "against_random": each(self.against_random),
            "decomposition": each(self.decomposition),
            "judgements": [one.as_json() for one in self.judgements],
            "persona_flips": each(self.persona_flips),
            "right_flips": each(self.right_flips),
            "floors": self.floors,
            "subjects": self.subjects,
            "guess_rate": self.guess_rate,
            "right_positions": self.right_positions,
            "missing_controls": self.missing_controls,
            "standing": self.standing.as_json(),
        }


def find(
    answers: Answers,
    right: Answers,
    mined: Sequence[Any],
    *,
    ways: Sequence[str],
    criterion: Criterion,
    standing: Standing,
    seed: int,
    resamples: int = 10_000,
) -> Findings:
    """Everything from answers. right: arms on the items that both models got right. mined: the
    persona's answers when Set G was mined. Ways whose A1 or A0 is missing have no claim.

    Raises: ValueError where the deciding way has no claim, or arms answered different items.
    """
    arms = {name: arm_result(name, found) for name, found in answers.items() if found}
    claimed = [way for way in ways if {arm("a1", way), arm("a0", way)} <= arms.keys()]
    if not claimed or claimed[0] != ways[0]:
        raise ValueError(f"no answers of A1 and A0 by {ways[0]}, which decides")
    pairs = [(arm("a1", way), arm("a0", way)) for way in claimed]
    claims = dict(zip(claimed, compare(answers, pairs, seed, resamples), strict=True))
    against = {
        way: compare(answers, [(arm("a1", way), arm("random", way))], seed, resamples)[0]
        for way in claimed
        if arm("random", way) in arms
    }
    deciding = answers[arm("a1", ways[0])]
    forms = {way: form_shift(answers, arm("a1", way), arm("a0", way)) for way in claimed}
    case = Case(
        criterion, standing, arms, claims, forms, against,
        {way: flips(answers.get(PERSONA, ()), answers[arm("a1", way)]) for way in claimed},
        guess_rate(deciding), missing_controls(ways, answers, right),
    )  # fmt: skip
    judgements = [judge(case, way) for way in claimed]
    fused = [way for way in claimed if way != "unfused"]
    right_flips = {
        way: flips(right.get(PERSONA, ()), right.get(arm("a0", way), ())) for way in fused
    }
    floors = {
        way: floor_in_words(
            flips(answers.get(PERSONA, ()), answers[arm("a0", way)]), right_flips[way],
            criterion.alpha,
        )
        for way in fused
    }  # fmt: skip
    return Findings(
        arms=arms,
        right_arms={name: arm_result(name, found) for name, found in right.items() if found},
        claims=claims,
        forms=forms,
        against_random=against,
        decomposition={
            way: decompose(way, arms[PERSONA], arms[arm("a0", way)], arms[arm("a1", way)])
            for way in claimed
            if PERSONA in arms
        },
        judgements=judgements,
        persona_flips={
            "mining to test": flips(mined, answers.get(PERSONA, ())),
            "first to second run": flips(answers.get(PERSONA, ()), answers.get(AGAIN, ())),
        },
        right_flips=right_flips,
        floors=floors,
        subjects=subject_table({name: found for name, found in answers.items() if found}),
        guess_rate=case.guess_rate,
        right_positions=position_shares([one.gold for one in deciding]),
        missing_controls=list(case.missing),
        standing=standing,
        verdict=verdict(case, judgements),
    )


@dataclass(frozen=True)
class ConfoundReport:
    """status: "planned" or "done". plan, power, mined, fuses and findings are there once done.

    fuses: way -> figures of its three fuses, as a fuse's result has them, and how many codes
    differ between them. made_from: file -> digest of what was read of it, see made_from.py.
    """

    status: str
    save_path: str
    settings: dict[str, Any]
    arms: list[str]
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
    plots: list[str] = field(default_factory=list)
    made_from: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def verdict(self) -> str | None:
        return self.findings.verdict if self.findings else None

    @property
    def outcome(self) -> str | None:
        """Of the deciding way."""
        return self.findings.judgements[0].outcome if self.findings else None

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "confound",
            "status": self.status,
            "verdict": self.verdict,
            "outcome": self.outcome,
            "save_path": self.save_path,
            "settings": self.settings,
            "plan": self.plan,
            "plan_sha256": self.plan_sha256,
            "power": self.power,
            "planned_arms": self.arms,
            "mined": self.mined,
            "fuses": self.fuses,
            **(self.findings.as_json() if self.findings else {}),
            "seconds": round(self.seconds, 3),
            "versions": self.versions,
            "device": self.device,
            "notes": self.notes,
            "plots": self.plots,
            "made_from": self.made_from,
        }
