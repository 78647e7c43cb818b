"""What `mlxstacks identity` decides before any model answers anything."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.stats import mcnemar_exact_test, wilson_interval
from mlxstacks.studies.confound.items import Item, items_sha256
from mlxstacks.studies.confound.plan import file_sha256
from mlxstacks.studies.confound.prompts import INSTRUCTION
from mlxstacks.studies.identity.conditions import claims_of, item_arms, suite_arms
from mlxstacks.studies.identity.scorer import RULES as SCORER_RULES
from mlxstacks.studies.identity.settings import NOT_OF_THE_PLAN, IdentitySettings
from mlxstacks.studies.identity.suite import Suite, suite_sha256
from mlxstacks.study.plan import Plan, ids_sha256
from mlxstacks.study.power import mcnemar_power

HYPOTHESIS = (
    "A persona that is fused into a quantized model loses answers of its identity suite when a "
    "second adapter is fused after it."
)
RULES = (
    "A policy has claims only if the gate is passed: the untrained base passes few prompts, the "
    "persona fused by that policy many. Each condition is compared with that persona, prompt by "
    "prompt. Lost: McNemar's exact p, adjusted over the claims by Holm's rule, is below alpha and "
    "more is lost than gained. Kept: else, the 95% Wilson interval of the share lost, of the "
    "prompts that the persona passes, ends at or below largest_loss. Neither: not shown. Equal "
    "totals are no claim. A subset, another plan or a missing control allows none."
)
TEST = "McNemar's exact test, prompt by prompt, two-sided; Wilson interval of the share lost"
REGRESSION = (
    "A check beside the claims: McNemar's exact test of base and persona on the items; a gain is "
    "credited to the persona only where it also beats the base after a zero-delta fuse."
)


def source_sha256(path: Path, *, adapter: bool, recorded: str | None = None) -> str:
    """Hash of a model, or of an adapter's weights and configuration. recorded: what the plan of a
    run that goes on says.
    """
    if not adapter:
        return fingerprint(open_checkpoint(path), recorded)
    digest = hashlib.sha256()
    files = [path / "adapter_config.json", *sorted(path.glob("adapter*.safetensors"))]
    for file in files:
        digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def data_of(hashes: Mapping[str, str], suite: Suite, items: Sequence[Item]) -> dict[str, str]:
    """Name -> hash of what the result depends on. hashes: of base, persona, tokenizer."""
    return {**hashes, "suite": suite_sha256(suite), "items": items_sha256(items)}


def plan_of(
    settings: IdentitySettings,
    suite: Suite,
    items: Sequence[Item],
    hashes: Mapping[str, str],
    *,
    has_adapter: bool,
) -> Plan:
    return Plan(
        hypothesis=HYPOTHESIS,
        arms=suite_arms(settings, has_adapter),
        metric="share of the suite's prompts whose reply fails its rules",
        n=len(suite),
        items_sha256=ids_sha256(one.prompt_id for one in suite),
        test=TEST,
        thresholds={
            "alpha": settings.alpha, "least_gain": settings.largest_loss,
            "most_of_base": settings.most_of_base, "least_of_persona": settings.least_of_persona,
        },
        seeds=(settings.seed,),
        data=data_of(hashes, suite, items),
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
                "prompt": INSTRUCTION if settings.scoring == "generate" else "the question alone",
            },
        },
    )  # fmt: skip


def power_lines(plan: Plan) -> list[str]:
    """The plan's table, whose effects are further failures, and what its n can show in words. Not
    the table's last line: chances to pass a criterion of gains, which is none here.
    """
    return [*plan.power_lines()[:-1], detectable(plan)]


def detectable(plan: Plan) -> str:
    """What a suite of this size can and cannot show."""
    n, alpha, claims = plan.n, plan.thresholds["alpha"], max(1, len(plan.claims))
    one, strict = least_lost(n, alpha), least_lost(n, alpha / claims)
    passed = round(n * (1 - plan.expected_rate))
    possible = wilson_interval(0, passed).high if passed else 1.0
    loss = next((s for s in range(1, 101) if mcnemar_power(s / 100, 0, n, alpha) >= 0.8), None)
    if one is None or loss is None:
        shown = f"{n} prompts are too few: no loss could be significant at p < {alpha:g}"
    else:
        family = f", {strict or f'more than {n}'} with all {claims} claims counted"
        shown = (
            f"{n} prompts: a loss shows (p < {alpha:g}) when {one} are lost and none gained"
            f"{family if claims > 1 else ''}; one of {loss}% is found 8 times in 10"
        )
    return (
        f"{shown}; {passed} of {passed} kept still leaves a loss of up to {possible:.0%} possible. "
        "Equal totals show no large loss, not exact preservation."
    )


def least_lost(n: int, alpha: float) -> int | None:
    """Fewest prompts lost, none gained, that are significant; None where n are not enough."""
    return next((k for k in range(1, n + 1) if mcnemar_exact_test(0, k).p_value < alpha), None)
