"""What `mlxstacks confound` decides beforehand, in two steps.

The protocol (base, persona, items by their hashes, every setting, the rules) is fixed before any
model answers anything. The plan proper is fixed once Set G is mined, since only then its n and its
items are known, and before any arm answers a test item or the adapter is trained.

The scale at which a random delta moves as many answers as a trained one is searched by a rule that
is fixed too. Equal norm is not equal disturbance: a trained delta lies where the model listens. The
search asks items that neither the random delta was made from nor any arm is tested on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxstacks.arms.arm import INSTRUCTION, SECOND_FORM
from mlxstacks.arms.set_g import Mined
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.studies.confound.settings import NOT_OF_THE_PLAN, ConfoundSettings
from mlxstacks.study.items import Item, items_sha256
from mlxstacks.study.plan import Plan, ids_sha256

MOST_PROBES = 8
# Of the share of answers moved; a probe of 200 items knows it to some 3 points.
TOLERANCE = 0.02
_STEP, _FACTOR = 4.0, 1.05


@dataclass(frozen=True)
class Probe:
    """moved: of n items, those answered otherwise than by the unfused persona at this scale."""

    scale: float
    moved: int
    n: int

    @property
    def share(self) -> float:
        return self.moved / self.n


def next_scale(target: float, probes: Sequence[Probe]) -> float | None:
    """The scale to try after these probes, 1 being equal norm; None where the search is over.

    target: the share of answers that the trained adapter moves. Steps of 4 until two scales have
    the target between them, or until a step leads away from it, for a delta that drowns the model
    moves no more answers; then bisection of their logarithms. Laws: at most `MOST_PROBES`; where
    more scale moves more and the target lies within reach, the search ends within `TOLERANCE`, or
    between scales that differ by less than 5%, or there.
    """
    if not probes:
        return 1.0
    if len(probes) >= MOST_PROBES or abs(closest(target, probes).share - target) <= TOLERANCE:
        return None
    low = max((probe.scale for probe in probes if probe.share < target), default=None)
    high = min((probe.scale for probe in probes if probe.share >= target), default=None)
    *before, last = probes
    if high is None:  # too few moved, at every scale
        past = any(probe.share > last.share for probe in before)
        return None if past else last.scale * _STEP
    if low is None:
        past = any(probe.share < last.share for probe in before)
        return None if past else last.scale / _STEP
    if not low < high < math.inf or high / low <= _FACTOR:
        return None
    return math.sqrt(low * high)


def saturated(target: float, probes: Sequence[Probe]) -> bool:
    """Whether no random delta moves as many: the most that any scale moves is too few, and a larger
    scale was tried. What is larger still answers at random, which is guessing.
    """
    most = max(probes, key=lambda probe: (probe.share, -probe.scale))
    return most.share < target and any(probe.scale > most.scale for probe in probes)


def closest(target: float, probes: Sequence[Probe]) -> Probe:
    """That which moves most nearly as many; of two, the larger scale."""
    return min(probes, key=lambda probe: (abs(probe.share - target), -probe.scale))


# --- what is decided beforehand -------------------------------------------------------------------

BASE, PERSONA, AGAIN, SECOND = "base", "persona", "persona_again", "persona_second"
# moved: a random delta, scaled until it moves as many answers as a1. Of a1's answers, so the last.
KINDS = ("a0", "a1", "random", "shuffled", "moved")
HYPOTHESIS = (
    "The trained adapter (A1) answers more of the items that base and persona both got wrong than "
    "its zero-delta control (A0), which went through the same fuse."
)
RULES = (
    "The gain is A1 - A0, never A1 less the unfused persona. A policy shows knowledge when it is "
    "at least least_gain, also among the items that both answered in the form that was asked for, "
    "and A1 answers more items than each of: A0; the same items in form; a random delta, scaled "
    "until it moves as many answers of items to train on as A1 moves of the test's; an adapter "
    "trained alike on shuffled answers; the unfused persona's second choices where A1 moves its "
    "answer, its first ones elsewhere; and guessing (or what A1's choice of places alone would "
    "score, if that is more). McNemar's exact test on the same items, the binomial test for "
    "guessing; the largest p of a policy, adjusted over all policies by Holm's rule, is below "
    "alpha. A subset, another plan or a missing control cannot satisfy the criterion, nor can a "
    "random delta that moves significantly fewer answers than A1, by more than a tenth. Where a "
    "second form of the prompt is planned, all of this holds in that form too, in the same family."
)
TEST = (
    "McNemar's exact test, two-sided, of A1 against each control, all together; the published "
    "two-proportion z-test of A1 - A0 reported beside it"
)


def arm(kind: str, way: str) -> str:
    """Name of an arm: a kind of `KINDS` under a policy, or unfused."""
    return f"{kind}_{way}"


def arms_of(settings: ConfoundSettings) -> tuple[str, ...]:
    """All arms on the test items: the persona twice, its second choices, then one of each kind for
    each way.
    """
    return (PERSONA, AGAIN, SECOND, *(arm(kind, way) for way in settings.ways for kind in KINDS))


def width_arms(bits: int) -> tuple[str, str]:
    """The plain model quantized to so many bits, and the same after a refit of zeros."""
    return f"width_{bits}", f"width_{bits}_refit"


def parts_of(settings: ConfoundSettings) -> dict[str, tuple[str, ...]]:
    """Set of items -> the arms that answer it. form: the test's items in a second form of the
    prompt, where that is planned. right: items that both models got right: what each arm loses.
    suite: the identity suite, where there is one. hard, easy: the items of test and right again,
    for models at other widths.
    """
    arms = arms_of(settings)
    models = tuple(name for name in arms if name != SECOND)
    of_widths = tuple(name for bits in settings.widths for name in width_arms(bits))
    return {
        "test": arms,
        "form": tuple(name for name in arms if name != AGAIN) if settings.second_form else (),
        "right": tuple(name for name in models if name != AGAIN),
        "suite": (BASE, *models) if settings.has_suite else (),
        "hard": of_widths, "easy": of_widths,
    }  # fmt: skip


def protocol_of(
    settings: ConfoundSettings, hashes: Mapping[str, str], items: Sequence[Item]
) -> dict[str, Any]:
    """hashes: of base, tokenizer and the persona as it is given, an adapter or a model. items: the
    sample that is mined from, in order.
    """
    parts = parts_of(settings)
    return {
        "kind": "confound",
        "hypothesis": HYPOTHESIS,
        "rules": RULES,
        "prompt": INSTRUCTION if settings.scoring == "generate" else "the question alone",
        "second_prompt": SECOND_FORM if settings.second_form else None,
        "arms": list(parts["test"]),
        "arms_in_second_form": list(parts["form"]),
        "arms_on_right_items": list(parts["right"]),
        "arms_on_suite": list(parts["suite"]),
        "settings": settings.model_dump(mode="json", exclude=NOT_OF_THE_PLAN),
        "hashes": dict(hashes),
        "items": len(items),
        "items_sha256": items_sha256(items),
    }


def plan_of(settings: ConfoundSettings, mined: Mined, data: Mapping[str, str]) -> Plan:
    """data: name -> hash of what the result depends on besides the test's items."""
    return Plan(
        hypothesis=HYPOTHESIS,
        arms=arms_of(settings),
        metric="share of the test items answered rightly",
        n=len(mined.test),
        items_sha256=ids_sha256(item.item_id for item in mined.test),
        test=TEST,
        thresholds={"alpha": settings.alpha, "least_gain": settings.least_gain},
        seeds=(settings.seed,),
        data=dict(data),
        expected_rate=settings.expected_rate,
        expected_discordant=settings.expected_discordant,
        claims=claims_of(settings),
        details={
            "rules": RULES,
            "train_items": len(mined.train),
            "right_items": len(mined.right),
            "probe_items": min(settings.probe_items, len(mined.train)),
            "most_probes": MOST_PROBES,
        },
    )


def data_of(
    mined: Mined, protocol: Mapping[str, Any], rows_sha256: Mapping[str, str], persona_sha256: str
) -> dict[str, str]:
    """rows_sha256: of the rows to train on, by name. persona_sha256: of the model that has the
    persona, fused or given.
    """
    return {
        "persona_model": persona_sha256,
        "protocol": json_sha256(protocol),
        "test_items": items_sha256(mined.test),
        "right_items": ids_sha256(item.item_id for item in mined.right),
        **rows_sha256,
    }


def claims_of(settings: ConfoundSettings) -> tuple[tuple[str, str], ...]:
    """(A1, A0) of each way, the deciding one first."""
    return tuple((arm("a1", way), arm("a0", way)) for way in settings.ways)
