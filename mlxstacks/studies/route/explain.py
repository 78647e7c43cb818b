"""`mlxstacks route explain`: why a prompt goes where it goes.

With an answer also what the domains do to its loss: each alone, those the router chose with their
weights, all of them, and the set that the search of `route discover` finds (the oracle).
"""

from dataclasses import dataclass, field
from typing import Any

from mlxstacks.data import Rendering
from mlxstacks.errors import InputError
from mlxstacks.files.store import Store
from mlxstacks.routing.gaps import is_loss_gap
from mlxstacks.routing.outcome_settings import OutcomeSettings
from mlxstacks.routing.outcomes import Rules
from mlxstacks.routing.route import Route
from mlxstacks.routing.router import PromptRouter, load_prompt_router
from mlxstacks.studies.route.data import template_of
from mlxstacks.studies.route.evaluate_losses import RowLosses, encode_pair
from mlxstacks.studies.route.evaluate_served import Served, open_served
from mlxstacks.studies.route.explain_settings import RouteExplainSettings


@dataclass(frozen=True)
class ConfigLoss:
    """Mean nats a token of the answer with these weights on."""

    name: str
    weights: dict[str, float]
    loss: float
    difference_to_base: float

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "weights": self.weights,
            "loss": self.loss,
            "difference_to_base": self.difference_to_base,
        }


@dataclass(frozen=True)
class Explanation:
    """losses: None without an answer; base, every domain alone, routed, all, oracle, in this order
    (a domain may have one of these names too).
    """

    prompt: str
    answer: str | None
    route: Route
    domains: tuple[str, ...]
    chat_domain: str | None
    chat_floor: float
    threshold: float
    template: str
    losses: list[ConfigLoss] | None = None
    oracle: tuple[str, ...] = ()
    loss_gap: bool | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        active = ", ".join(f"{name} {weight:.2f}" for name, weight in self.route.weights.items())
        said = f"answered with {active}." if active else "answered by the base alone."
        if self.route.gap:
            said += f" A gap: every score is below {self.threshold}."
        if self.losses is not None:
            routed, best = self.losses[-3], self.losses[-1]
            said += f" That changes the loss of the answer by {routed.difference_to_base:+.3f} nats"
            if self.loss_gap:
                said += "; no set of domains lowers it by as much as the search asks for."
            else:
                on = " + ".join(self.oracle) or "the base"
                said += f"; the best set found, {on}, by {best.difference_to_base:+.3f}."
        return said

    def as_json(self) -> dict[str, Any]:
        losses = None if self.losses is None else [one.as_json() for one in self.losses]
        return {
            "kind": "route explain",
            "prompt": self.prompt,
            "answer": self.answer,
            "scores": dict(self.route.scores),
            "chat_domain": self.chat_domain,
            "chat_floor": self.chat_floor,
            "threshold": self.threshold,
            "active": dict(self.route.weights),
            "gap": self.route.gap,
            "template": self.template,
            "losses": losses,
            "oracle": list(self.oracle) if losses else None,
            "loss_gap": self.loss_gap,
            "notes": self.notes,
            "verdict": self.verdict,
        }


def run(settings: RouteExplainSettings) -> Explanation:
    """Route one prompt, and measure; nothing is written.

    Raises: InputError: no or an empty prompt, no store, model or router, an answer of which nothing
        is left. StoreError: a damaged file, another base.
    """
    if settings.store_path is None:
        raise InputError("route explain needs a store: give --store-path")
    if settings.prompt is None or not settings.prompt.strip():
        raise InputError("route explain needs a prompt that is not blank")
    store = Store.open(settings.store_path)
    template = template_of(OutcomeSettings(template=settings.template), store)
    served = open_served(store, settings.model, settings.base)
    router = load_prompt_router(store, served.model, served.tokenizer, settings.router_path)
    scores = router.score(settings.prompt)
    route = router.decide(scores, hard=settings.hard, routable=served.domains)
    header = router.header
    about = (
        settings.prompt, settings.answer, route, served.domains, header.chat_domain,
        header.chat_floor, header.threshold, template,
    )  # fmt: skip
    notes = [*served.notes, *router.notes]
    if settings.answer is None:
        return Explanation(*about, notes=notes)
    row = encode_pair(
        settings.prompt, settings.answer, served.tokenizer, template, settings.max_tokens,
        Rendering.of(settings),
    )  # fmt: skip
    if row is None:
        raise InputError(
            f"nothing is left of the answer within max_tokens {settings.max_tokens}: it is blank, "
            "or the prompt alone is that long"
        )
    losses, oracle = _losses(settings, served, router, route, RowLosses(served, [row],
                             header.input_dims))  # fmt: skip
    gap = is_loss_gap(losses[0].loss, losses[-1].loss, settings.threshold)
    return Explanation(*about, losses=losses, oracle=oracle, loss_gap=gap, notes=notes)


def _losses(
    settings: RouteExplainSettings,
    served: Served,
    router: PromptRouter,
    route: Route,
    losses: RowLosses,
) -> tuple[list[ConfigLoss], tuple[str, ...]]:
    """(base, every domain alone, routed, all, oracle; domains of the oracle set)."""
    header = router.header
    chat = header.chat_domain if header.chat_domain in served.domains else None
    rules = Rules(served.domains, settings.threshold, chat, header.chat_floor)
    (found,) = losses.search(rules, [0])
    oracle = rules.ordered(found.best)
    configs: list[tuple[str, dict[str, float]]] = [
        ("base", {}),
        *((name, rules.weights(frozenset([name]))) for name in served.domains),
        ("routed", dict(route.weights)),
        ("all", dict.fromkeys(served.domains, 1.0)),
        ("oracle", rules.weights(found.best)),
    ]
    values = losses.of([(0, weights) for _, weights in configs])
    rows = zip(configs, values, strict=True)
    return [
        ConfigLoss(name, weights, loss, loss - values[0]) for (name, weights), loss in rows
    ], oracle
