"""What `mlxstacks identity` decides before any model answers: conditions, arms, claims, the plan.

A condition says what is fused into what. An arm is a condition under a policy, named
`factual_refit`; a few have no policy. The reference of a condition is the persona alone, fused by
the same policy: under each policy another model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mlxstacks.arms.arm import INSTRUCTION
from mlxstacks.arms.suite import RULES as SCORER_RULES
from mlxstacks.arms.suite import Suite, suite_sha256
from mlxstacks.stats import binomial_at_most, mcnemar_exact_test
from mlxstacks.studies.identity.settings import NOT_OF_THE_PLAN, IdentitySettings
from mlxstacks.study.items import Item, items_sha256
from mlxstacks.study.plan import Plan, ids_sha256
from mlxstacks.study.power import mcnemar_power
from mlxstacks.training.settings import TrainSettings

BASE, UNFUSED, RERUN = "base", "identity_unfused", "identity_rerun"
# Evaluated on the items alone: what the persona's fuse does to the base without the persona.
BASE_ZERO = "base_zero"
REFERENCE, ZERO = "identity", "zero"
# Adapters; all but the first are trained by the run, and each but the zeros is a condition's own.
PERSONA, FACTUAL, AGAIN, SECOND, STRESS, BASE_FACTUAL = (
    "persona", "factual", "again", "factual_second", "factual_stress", "base_factual",
)  # fmt: skip

HYPOTHESIS = (
    "A persona that is fused into a quantized model loses answers of its identity suite when a "
    "second adapter is fused after it."
)
RULES = (
    "A policy has claims only if the gate is passed: the untrained base passes few prompts, the "
    "persona fused by that policy many. Each condition is compared with that persona, prompt by "
    "prompt. Lost: McNemar's exact p is below alpha and more is lost than gained. Kept: else, the "
    "binomial p of so few lost, of the prompts that the persona passes, were largest_loss of them "
    "to be lost, is below alpha. Neither: not shown. Both p of all claims behind an open gate are "
    "one family, adjusted by Holm's rule; the gate knows the replies of no condition. Equal totals "
    "are no claim. A subset, another plan or a missing control allows none."
)
TEST = "McNemar's exact test, prompt by prompt, two-sided; the binomial test of the share lost"
REGRESSION = (
    "A check beside the claims: McNemar's exact test of base and persona on the items; a gain is "
    "credited to the persona only where it also beats the base after a zero-delta fuse. The same "
    "of the narrow items."
)


@dataclass(frozen=True, slots=True)
class Condition:
    """source: what is fused into, and what the adapter is trained on; adapter: what is fused, zero
    with its learned numbers zero.

    claimed: whether "the persona is kept" is asked of it. published: its score of 20, if any.
    """

    label: str
    source: Literal["base", "identity"]
    adapter: str
    zero: bool = False
    claimed: bool = False
    published: int | None = None


CONDITIONS = {
    REFERENCE: Condition("identity only", "base", PERSONA, published=18),
    "factual": Condition("identity + factual", "identity", FACTUAL, claimed=True, published=18),
    AGAIN: Condition("identity + identity", "identity", AGAIN, claimed=True, published=18),
    SECOND: Condition("identity + factual", "identity", SECOND, claimed=True, published=18),
    STRESS: Condition("identity + factual", "identity", STRESS, claimed=True),
    ZERO: Condition("identity + zero-delta", "identity", FACTUAL, zero=True),
    BASE_FACTUAL: Condition("base + factual", "base", BASE_FACTUAL, published=2),
    BASE_ZERO: Condition("base + zero-delta", "base", PERSONA, zero=True),
}
PUBLISHED_BASE = 2


def arm(kind: str, policy: str) -> str:
    """Name of an arm: a condition under a policy."""
    return f"{kind}_{policy}"


def label(name: str, settings: IdentitySettings) -> tuple[str, str]:
    """(condition, policy) of an arm in words; the policy is empty where it has none."""
    loose = {BASE: "base", UNFUSED: "identity unfused", RERUN: "identity rerun"}
    if name in loose:
        return loose[name], settings.policies[0] if name == RERUN else ""
    kind, _, policy = name.rpartition("_")
    condition = CONDITIONS[kind]
    if kind == AGAIN and settings.persona_data is None:
        return "identity + the same again", policy
    if condition.adapter in (PERSONA, AGAIN) or condition.zero:
        return condition.label, policy
    training = training_of(kind, settings)
    tail = f", {training.iters:,} batches" if kind == STRESS else ""
    return f"{condition.label} r{training.rank}{tail}", policy


def kinds_of(settings: IdentitySettings, has_adapter: bool) -> list[str]:
    """Conditions that the suite is put to. Without the persona's adapter or rows it cannot be added
    again; "identity only" is the model where one was given.
    """
    left_out = {BASE_ZERO}
    if not has_adapter and settings.persona_data is None:
        left_out.add(AGAIN)
    if settings.stress_rank is None:
        left_out.add(STRESS)
    return [kind for kind in CONDITIONS if kind not in left_out]


def adapter_of(kind: str, settings: IdentitySettings) -> str:
    """The adapter of a condition: the persona's own where there is nothing to train it on again."""
    return PERSONA if kind == AGAIN and settings.persona_data is None else CONDITIONS[kind].adapter


def trained(settings: IdentitySettings, has_adapter: bool) -> list[str]:
    """Adapters that the run trains, each named as its condition."""
    kinds = kinds_of(settings, has_adapter)
    return [kind for kind in kinds if adapter_of(kind, settings) == kind]


def training_of(adapter: str, settings: IdentitySettings) -> TrainSettings:
    """How an adapter of `trained` is trained."""
    changes: dict[str, dict[str, int | None]] = {
        SECOND: {"rank": settings.second_rank},
        STRESS: {"rank": settings.stress_rank, "iters": settings.stress_iters},
    }
    train = settings.persona_train if adapter == AGAIN else settings.train
    return settings.cut(train.model_copy(update=changes.get(adapter, {})))


def suite_arms(settings: IdentitySettings, has_adapter: bool) -> tuple[str, ...]:
    """All arms on the suite: the base, the persona beside it, a rerun, each condition by policy."""
    loose = (BASE, UNFUSED, RERUN) if has_adapter else (BASE, RERUN)
    return (
        *loose,
        *(
            arm(kind, policy)
            for policy in settings.policies
            for kind in kinds_of(settings, has_adapter)
        ),
    )


def item_arms(settings: IdentitySettings, has_adapter: bool) -> tuple[str, ...]:
    """All arms on the items of the broad regression, and on the narrow ones."""
    kinds = (BASE_ZERO, REFERENCE) if has_adapter else (REFERENCE,)
    loose = (BASE, UNFUSED) if has_adapter else (BASE,)
    return (*loose, *(arm(kind, policy) for policy in settings.policies for kind in kinds))


def claims_of(settings: IdentitySettings, has_adapter: bool) -> tuple[tuple[str, str], ...]:
    """(condition, its reference) of each "the persona is kept"."""
    return tuple(
        (arm(kind, policy), arm(REFERENCE, policy))
        for policy in settings.policies
        for kind in kinds_of(settings, has_adapter)
        if CONDITIONS[kind].claimed
    )


def pairs_of(settings: IdentitySettings, has_adapter: bool) -> list[tuple[str, str]]:
    """(arm, reference) of every comparison prompt by prompt, the claims among them."""
    pairs = [(RERUN, arm(REFERENCE, settings.policies[0]))]
    for policy in settings.policies:
        if has_adapter:
            pairs.append((arm(REFERENCE, policy), UNFUSED))
        pairs += [
            (arm(kind, policy), arm(REFERENCE, policy))
            for kind in kinds_of(settings, has_adapter)
            if CONDITIONS[kind].source == "identity"
        ]
        pairs.append((arm(BASE_FACTUAL, policy), BASE))
    return pairs


# --- the plan -------------------------------------------------------------------------------------


def data_of(
    hashes: Mapping[str, str], suite: Suite, items: Sequence[Item], narrow: Sequence[Item]
) -> dict[str, str]:
    """Name -> hash of what the result depends on. hashes: of base, persona, tokenizer, rows."""
    data = {**hashes, "suite": suite_sha256(suite), "items": items_sha256(items)}
    return data | ({"narrow_items": items_sha256(narrow)} if narrow else {})


def plan_of(
    settings: IdentitySettings,
    suite: Suite,
    items: Sequence[Item],
    hashes: Mapping[str, str],
    *,
    narrow: Sequence[Item] = (),
    has_adapter: bool,
) -> Plan:
    return Plan(
        hypothesis=HYPOTHESIS,
        arms=suite_arms(settings, has_adapter),
        metric="share of the suite's prompts whose reply fails its rules",
        n=len(suite),
        items_sha256=ids_sha256(prompt.prompt_id for prompt in suite),
        test=TEST,
        thresholds={
            "alpha": settings.alpha, "least_gain": settings.largest_loss,
            "most_of_base": settings.most_of_base, "least_of_persona": settings.least_of_persona,
        },
        seeds=(settings.seed,),
        data=data_of(hashes, suite, items, narrow),
        expected_rate=settings.expected_failures,
        expected_discordant=settings.expected_discordant,
        claims=claims_of(settings, has_adapter),
        details={
            "rules": RULES,
            "scorer": SCORER_RULES,
            "settings": settings.model_dump(mode="json", exclude=NOT_OF_THE_PLAN),
            "regression": {
                "rules": REGRESSION,
                "arms": list(item_arms(settings, has_adapter)),
                "items": len(items),
                "narrow_items": len(narrow),
                "prompt": INSTRUCTION if settings.scoring == "generate" else "the question alone",
            },
        },
    )  # fmt: skip


# Of each claim: is it lost, is it kept.
TESTS = 2


def power_lines(plan: Plan) -> list[str]:
    """The plan's table, whose effects are further failures, and what its n can show in words. Not
    the table's last line: chances to pass a criterion of gains, which is none here.
    """
    return [*plan.power_lines(TESTS)[:-1], detectable(plan)]


def detectable(plan: Plan) -> str:
    """What a suite of this size can and cannot show, with every gate open."""
    n, alpha, claims = plan.n, plan.thresholds["alpha"], max(1, len(plan.claims))
    level, largest = alpha / (TESTS * claims), plan.thresholds["least_gain"]
    least = least_lost(n, level)  # by the hardest step of Holm
    passed = round(n * (1 - plan.expected_rate))
    loss = next((s for s in range(1, 101) if mcnemar_power(s / 100, 0, n, level) >= 0.8), None)
    head = f"with both questions of {claims} claims counted, "
    if least is None or loss is None:
        shown = f"{n} prompts are too few: {head}no loss could be significant at p < {alpha:g}"
    else:
        shown = (
            f"{n} prompts: {head}a loss shows (p < {alpha:g}) when {least} are lost and none "
            f"gained; one of {loss}% is found 8 times in 10"
        )
    most = most_lost(passed, largest, level)
    if most is None:
        needed = next((k for k in range(1, 10_000) if (1 - largest) ** k < level), None)
        kept = (
            f"all {passed} that are expected to pass are too few to show kept for so many claims: "
            f"{needed or 'more than 10,000'} would do, or fewer policies"
        )
    else:
        kept = f"kept shows when at most {most} of {passed} are lost"
    return f"{shown}; {kept}. Equal totals show no large loss, not exact preservation."


def most_lost(passed: int, largest_loss: float, alpha: float) -> int | None:
    """Most prompts lost, of those passed, that still exclude largest_loss; None where none do."""
    excluded = [
        lost for lost in range(passed) if binomial_at_most(lost, passed, largest_loss) < alpha
    ]
    return max(excluded, default=None)


def least_lost(n: int, alpha: float) -> int | None:
    """Fewest prompts lost, none gained, that are significant; None where n are not enough."""
    return next((k for k in range(1, n + 1) if mcnemar_exact_test(0, k).p_value < alpha), None)
