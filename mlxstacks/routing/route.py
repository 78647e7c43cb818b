"""From a router's scores to a route: which domains answer a request, and with what weight.

    score    raw sigmoid of the router for a domain
    weight   what the deltas of the domain's stacks are multiplied by

A chat domain never falls below its floor; a domain is active where its weight is above the
threshold (strictly), and only active domains have a weight in a route. Everything goes by the
domain's name.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

CHAT_DOMAIN = "chat"
CHAT_FLOOR = 0.20
THRESHOLD = 0.12

RouteMode = Literal["base", "ungated", "routed", "pinned"]


@dataclass(frozen=True)
class Route:
    """How one request is answered.

    scores: of every domain the router knows, empty where it was not asked. weights: of the active
    domains, in the router's order; empty in mode ungated too, where every stack counts 1. gap: all
    scores are below the threshold, so no domain is known to fit.
    """

    mode: RouteMode
    scores: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    gap: bool = False


def decide(
    scores: Mapping[str, float],
    *,
    chat_domain: str | None = None,
    chat_floor: float = CHAT_FLOOR,
    threshold: float = THRESHOLD,
    hard: bool = False,
    routable: Collection[str] | None = None,
) -> Route:
    """The route of one prompt (spec/router.md, sections 7 and 8).

    hard: active domains count 1 instead of their score. routable: domains that may get a weight;
    None for all. The gap is judged on raw scores: with the floor applied it could never be.

    Raises: ValueError for a score outside [0, 1].
    """
    # NaN is in no range
    strange = {name: score for name, score in scores.items() if not 0 <= score <= 1}
    if strange:
        raise ValueError(f"scores must lie in [0, 1]; got {strange}")
    weights = {}
    for name, score in scores.items():
        weight = max(score, chat_floor) if name == chat_domain else score
        if weight > threshold and (routable is None or name in routable):
            weights[name] = 1.0 if hard else weight
    gap = bool(scores) and all(score < threshold for score in scores.values())
    return Route("routed", dict(scores), weights, gap)


def pinned(names: Iterable[str]) -> Route:
    """These domains at weight 1, whatever the prompt."""
    return Route("pinned", weights=dict.fromkeys(names, 1.0))


def ungated_route() -> Route:
    """Every stack at weight 1."""
    return Route("ungated")


def base_route() -> Route:
    """The base alone."""
    return Route("base")
