"""The conditions of the study and our controls: what is fused into what, and the arms that follow.

An arm is a condition under a policy, named `factual_refit`; a few have no policy. The reference of
a condition is the persona alone, fused by the same policy: under each policy another model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxstacks.studies.identity.settings import IdentitySettings

BASE, UNFUSED, RERUN = "base", "identity_unfused", "identity_rerun"
# Evaluated on the items alone: what the persona's fuse does to the base without the persona.
BASE_ZERO = "base_zero"
REFERENCE, ZERO = "identity", "zero"
PERSONA, FACTUAL, SECOND = "persona", "factual", "factual_second"

Source = Literal["base", "identity"]


@dataclass(frozen=True, slots=True)
class Condition:
    """source: what is fused into; adapter: what is, zero with its learned numbers zero.

    claimed: whether "the persona is kept" is asked of it. published: its score of 20, if any.
    """

    kind: str
    label: str
    source: Source
    adapter: str
    zero: bool = False
    claimed: bool = False
    published: int | None = None

    @property
    def needs_persona_adapter(self) -> bool:
        return self.adapter == PERSONA


CONDITIONS = {
    one.kind: one
    for one in (
        Condition(REFERENCE, "identity only", "base", PERSONA, published=18),
        Condition("factual", "identity + factual", "identity", FACTUAL, claimed=True, published=18),
        Condition(
            "again", "identity + identity", "identity", PERSONA, claimed=True, published=18
        ),
        Condition(
            SECOND, "identity + factual", "identity", SECOND, claimed=True, published=18
        ),
        Condition(ZERO, "identity + zero-delta", "identity", FACTUAL, zero=True),
        Condition("base_factual", "base + factual", "base", FACTUAL, published=2),
        Condition(BASE_ZERO, "base + zero-delta", "base", PERSONA, zero=True),
    )
}  # fmt: skip
PUBLISHED_BASE = 2


def arm(kind: str, policy: str) -> str:
    """Name of an arm: a condition under a policy."""
    return f"{kind}_{policy}"


def label(name: str, settings: IdentitySettings) -> tuple[str, str]:
    """(condition, policy) of an arm in words; the policy is empty where it has none."""
    loose = {BASE: "base", UNFUSED: "identity beside", RERUN: "identity rerun"}
    if name in loose:
        return loose[name], settings.policies[0] if name == RERUN else ""
    kind, _, policy = name.rpartition("_")
    rank = settings.second_rank if kind == SECOND else settings.train.rank
    condition = CONDITIONS[kind]
    tail = f" r{rank}" if condition.adapter in (FACTUAL, SECOND) and not condition.zero else ""
    return condition.label + tail, policy


def kinds_of(has_adapter: bool) -> list[str]:
    """Conditions that the suite is put to. Without the persona's adapter it cannot be added again;
    "identity only" is then the model that was given.
    """
    return [
        kind
        for kind, one in CONDITIONS.items()
        if kind != BASE_ZERO and (has_adapter or not one.needs_persona_adapter or kind == REFERENCE)
    ]


def suite_arms(settings: IdentitySettings, has_adapter: bool) -> tuple[str, ...]:
    """All arms on the suite: the base, the persona beside it, a rerun, each condition by policy."""
    loose = (BASE, UNFUSED, RERUN) if has_adapter else (BASE, RERUN)
    return (
        *loose,
        *(arm(kind, policy) for policy in settings.policies for kind in kinds_of(has_adapter)),
    )


def item_arms(settings: IdentitySettings, has_adapter: bool) -> tuple[str, ...]:
    """All arms on the items of the broad regression."""
    kinds = (BASE_ZERO, REFERENCE) if has_adapter else (REFERENCE,)
    loose = (BASE, UNFUSED) if has_adapter else (BASE,)
    return (*loose, *(arm(kind, policy) for policy in settings.policies for kind in kinds))


def claims_of(settings: IdentitySettings, has_adapter: bool) -> tuple[tuple[str, str], ...]:
    """(condition, its reference) of each "the persona is kept"."""
    return tuple(
        (arm(kind, policy), arm(REFERENCE, policy))
        for policy in settings.policies
        for kind in kinds_of(has_adapter)
        if CONDITIONS[kind].claimed
    )


def pairs_of(settings: IdentitySettings, has_adapter: bool) -> list[tuple[str, str]]:
    """(arm, reference) of every comparison prompt by prompt, the claims among them."""
    found = [(RERUN, arm(REFERENCE, settings.policies[0]))]
    for policy in settings.policies:
        if has_adapter:
            found.append((arm(REFERENCE, policy), UNFUSED))
        found += [
            (arm(kind, policy), arm(REFERENCE, policy))
            for kind in kinds_of(has_adapter)
            if CONDITIONS[kind].source == "identity"
        ]
        found.append((arm("base_factual", policy), BASE))
    return found


def is_adapter(persona: Path, missing_is: bool | None = None) -> bool:
    """Whether the persona is an adapter, not a model. missing_is: the answer for a path that is not
    there, as in a plan for another machine; None: a model, to be resolved.
    """
    if (persona / "adapter_config.json").is_file():
        return True
    if missing_is is not None and not persona.exists():
        return missing_is
    return False


def unequal(arms: Sequence[tuple[str, Sequence[str]]]) -> str | None:
    """What differs, where arms answered different prompts; None where they are the same."""
    first_name, first = arms[0]
    for name, ids in arms[1:]:
        if list(ids) != list(first):
            return (
                f"{first_name} answered {len(first)} prompts, {name} {len(ids)}"
                if len(ids) != len(first)
                else f"{first_name} and {name} answered different prompts"
            )
    return None
