"""What `mlxstacks confound` decides beforehand, in two steps.

The protocol (base, persona, items by their hashes, every setting, the rules) is fixed before any
model answers anything. The plan proper is fixed once Set G is mined, since only then its n and its
items are known, and before any arm answers a test item or the adapter is trained.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxstacks.arms.arm import INSTRUCTION
from mlxstacks.arms.set_g import Mined
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.studies.confound.settings import NOT_OF_THE_PLAN, ConfoundSettings
from mlxstacks.study.items import Item, items_sha256
from mlxstacks.study.plan import Plan, ids_sha256

PERSONA, AGAIN = "persona", "persona_again"
HYPOTHESIS = (
    "The trained adapter (A1) answers more of the items that base and persona both got wrong than "
    "its zero-delta control (A0), which went through the same fuse."
)
RULES = (
    "Content is A1 - A0, never A1 less the unfused persona. It counts when it is at least "
    "least_gain, with p < alpha by the two-proportion z-test, p adjusted over the claims by Holm's "
    "rule; when, where one of the two boxes more answers (McNemar p < alpha), the same holds, by "
    "plain p, among the items that both boxed; when A1 also beats a random delta of equal norm "
    "with p < alpha; and when the 95% interval of A1 lies above the rate of guessing and above "
    "what its choice of positions alone would score. McNemar's exact test on the same pairs is "
    "reported beside it. A subset, another plan or a missing control cannot satisfy the criterion."
)
TEST = "two-proportion z-test, pooled, two-sided; McNemar's exact test reported beside it"


def arm(kind: str, way: str) -> str:
    """Name of an arm: a1, a0 or random under a policy, or unfused."""
    return f"{kind}_{way}"


def arms_of(settings: ConfoundSettings) -> tuple[str, ...]:
    """All arms on the test items: the persona twice, then three for each way."""
    kinds = ("a0", "a1", "random")
    return (PERSONA, AGAIN, *(arm(kind, way) for way in settings.ways for kind in kinds))


def right_arms_of(settings: ConfoundSettings) -> tuple[str, ...]:
    """Arms on the items that both models got right."""
    return (PERSONA, *(arm("a0", way) for way in settings.ways if way != "unfused"))


def protocol_of(
    settings: ConfoundSettings, hashes: Mapping[str, str], items: Sequence[Item]
) -> dict[str, Any]:
    """hashes: of base, tokenizer and the persona as it is given, an adapter or a model. items: the
    sample that is mined from, in order.
    """
    return {
        "kind": "confound",
        "hypothesis": HYPOTHESIS,
        "rules": RULES,
        "prompt": INSTRUCTION if settings.scoring == "generate" else "the question alone",
        "arms": list(arms_of(settings)),
        "arms_on_right_items": list(right_arms_of(settings)),
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
        details={"rules": RULES, "train_items": len(mined.train), "right_items": len(mined.right)},
    )


def data_of(
    mined: Mined, protocol: Mapping[str, Any], rows_sha256: str, persona_sha256: str
) -> dict[str, str]:
    """persona_sha256: of the model that has the persona, fused or given."""
    return {
        "persona_model": persona_sha256,
        "protocol": json_sha256(protocol),
        "test_items": items_sha256(mined.test),
        "right_items": ids_sha256(item.item_id for item in mined.right),
        "train_rows": rows_sha256,
    }


def claims_of(settings: ConfoundSettings) -> tuple[tuple[str, str], ...]:
    """(A1, A0) of each way, the deciding one first."""
    return tuple((arm("a1", way), arm("a0", way)) for way in settings.ways)
