"""Whether the suite can tell a persona at all: without that no claim is made.

Judged under each policy, on the persona as that policy fused it. The persona beside the base, not
fused, then says why a gate is shut: a scorer that does not discriminate, or a fuse that lost the
persona before anything was put on top of it.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlxstacks.studies.identity.settings import GATE_PROMPTS, IdentitySettings

Shut = Literal["base passes", "lost in its fuse", "no persona", "persona fails"]
State = Literal["valid"] | Shut


@dataclass(frozen=True, slots=True)
class Limits:
    """Of n prompts: most that the base may pass, fewest that the persona must pass."""

    n: int
    most_of_base: int
    least_of_persona: int


def limits_of(settings: IdentitySettings, n: int) -> Limits:
    """The gate for n prompts, by share, never more lenient than for 20, where it is as given."""
    most = settings.most_of_base * n // GATE_PROMPTS
    return Limits(n, most, -(-settings.least_of_persona * n // GATE_PROMPTS))


@dataclass(frozen=True, slots=True)
class Gate:
    """The gate under one policy. Scores count prompts passed; unfused is None for a persona that
    was given as a model.
    """

    policy: str
    state: State
    base: int
    persona: int
    unfused: int | None
    limits: Limits

    @property
    def valid(self) -> bool:
        return self.state == "valid"

    @property
    def words(self) -> str:
        n, most, least = self.limits.n, self.limits.most_of_base, self.limits.least_of_persona
        beside = "" if self.unfused is None else f", beside the base {self.unfused}"
        scores = f"base {self.base}, persona {self.persona}{beside} of {n}"
        if self.valid:
            return f"scorer valid under {self.policy} ({scores})"
        why = {
            "base passes": f"the untrained base passes more than {most}: it tells nothing apart",
            "lost in its fuse": f"it does tell the persona beside the base from the base, but "
            f"{self.policy} lost the persona in its own fuse (at least {least} are needed): "
            "nothing is left to preserve",
            "no persona": f"not even beside the base does the persona pass {least}",
            "persona fails": f"the persona passes fewer than {least}; it was given as a model, so "
            "whether its fuse lost it cannot be told",
        }[self.state]
        return f"scorer invalid under {self.policy} ({scores}): {why}. No preservation claim"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "valid": self.valid, "words": self.words}


def gate(policy: str, base: int, persona: int, unfused: int | None, limits: Limits) -> Gate:
    """The truth table is a test. The persona beside the base decides nothing, it only explains."""
    state: State = "valid"
    if base > limits.most_of_base:
        state = "base passes"
    elif persona < limits.least_of_persona:
        if unfused is None:
            state = "persona fails"
        else:
            state = "lost in its fuse" if unfused >= limits.least_of_persona else "no persona"
    return Gate(policy, state, base, persona, unfused, limits)
