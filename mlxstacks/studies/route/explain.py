"""`mlxstacks route explain`: why a prompt goes where it goes.

With an answer also what the domains do to its loss: each alone, those the router chose with their
weights, all of them, and the set that the search of `route discover` finds (the oracle).
"""

from collections.abc import Mapping
from typing import Any

from mlxstacks.data import Row, encode_pair
from mlxstacks.data.text_settings import Rendering
from mlxstacks.errors import InputError
from mlxstacks.files.store import Store
from mlxstacks.routing.candidate_losses import choose_batch_tokens
from mlxstacks.routing.gaps import is_loss_gap
from mlxstacks.routing.router import PromptRouter, Route, load_prompt_router
from mlxstacks.studies.route.data import template_of
from mlxstacks.studies.route.served import RowLosses, Served, open_served, rules_for
from mlxstacks.studies.route.settings import RouteExplainSettings
from mlxstacks.study.document import Columns, Table
from mlxstacks.study.result import Result


def run(settings: RouteExplainSettings) -> Result:
    """Route one prompt, and measure; nothing is written.

    Raises: InputError: no or an empty prompt, no store, model or router, an answer of which nothing
        is left. StoreError: a damaged file, another base.
    """
    if settings.store_path is None:
        raise InputError("route explain needs a store: give --store-path")
    if settings.prompt is None or not settings.prompt.strip():
        raise InputError("route explain needs a prompt that is not blank")
    store = Store.open(settings.store_path)
    template = template_of(settings.template, store)
    served = open_served(store, settings.model, settings.base)
    router = load_prompt_router(store, served.model, served.tokenizer, settings.router_path)
    (route,) = router.routes([settings.prompt], hard=settings.hard, routable=served.domains)
    data: dict[str, Any] = {
        "prompt": settings.prompt,
        "answer": settings.answer,
        "scores": dict(route.scores),
        "chat_domain": router.header.chat_domain,
        "chat_floor": router.header.chat_floor,
        "threshold": router.header.threshold,
        "active": dict(route.weights),
        "gap": route.gap,
        "gap_by": "detector" if router.detector is not None else "scores",
        "template": template,
        "losses": None,
        "oracle": None,
        "loss_gap": None,
    }
    tables = [_score_table(data, served.domains)]
    if settings.answer is not None:
        row = encode_pair(
            settings.prompt, settings.answer, served.tokenizer, template, settings.max_tokens,
            Rendering.of(settings),
        )  # fmt: skip
        if row is None:
            raise InputError(
                f"nothing is left of the answer within max_tokens {settings.max_tokens}: it is "
                "blank, or the prompt alone is that long"
            )
        data |= _losses(settings, served, router, route, row)
        tables.append(_loss_table(data))
    return Result(
        kind="route explain", title="A prompt's route", status="done",
        question="Why does a prompt go where it goes, and does that help its answer?",
        settings=settings.model_dump(mode="json"), verdict=verdict(data), data=data,
        outcome=(" + ".join(route.weights) or "the base alone") + (", a gap" if route.gap else ""),
        blocks=tuple(tables), notes=(*served.notes, *router.notes),
    )  # fmt: skip


def _losses(
    settings: RouteExplainSettings, served: Served, router: PromptRouter, route: Route, row: Row
) -> dict[str, Any]:
    """losses: base, every domain alone, routed, all, oracle, in this order (a domain may have one
    of these names too), in nats per token. oracle: domains of the best set that the search finds.
    """
    header = router.header
    losses = RowLosses(served, [row], batch_tokens=choose_batch_tokens(header.input_dims))
    rules = rules_for(header, served.domains, settings.threshold)
    (outcome,) = losses.search(rules, [0])
    sets: list[tuple[str, dict[str, float]]] = [
        ("base", {}),
        *((name, rules.weights(frozenset([name]))) for name in served.domains),
        ("routed", dict(route.weights)),
        ("all", dict.fromkeys(served.domains, 1.0)),
        ("oracle", rules.weights(outcome.best)),
    ]
    values = losses.of([(0, weights) for _, weights in sets])
    return {
        "losses": [
            {
                "name": name, "weights": weights, "loss": loss,
                "difference_to_base": loss - values[0],
            }
            for (name, weights), loss in zip(sets, values, strict=True)
        ],
        "oracle": list(rules.ordered(outcome.best)),
        "loss_gap": is_loss_gap(values[0], values[-1], settings.threshold),
    }  # fmt: skip


def verdict(data: Mapping[str, Any]) -> str:
    active = ", ".join(f"{name} {weight:.2f}" for name, weight in data["active"].items())
    text = "would be answered "
    text += f"with {active}." if active else "by the base alone."
    if data["gap"]:
        if data["gap_by"] == "detector":
            text += " A gap: the prompt is like none that the router was trained on."
        else:
            text += f" A gap: every score is below {data['threshold']}."
    if data["losses"] is not None:
        routed, best = (data["losses"][place]["difference_to_base"] for place in (-3, -1))
        text += f" That changes the loss of the answer by {routed:+.3f} nats"
        if data["loss_gap"]:
            text += "; no set of domains lowers it by as much as the search asks for."
        else:
            oracle = " + ".join(data["oracle"]) or "the base"
            text += f"; the best set found, {oracle}, by {best:+.3f}."
    return text


def _score_table(data: Mapping[str, Any], served: tuple[str, ...]) -> Table:
    chat, floor = data["chat_domain"], data["chat_floor"]
    rows = []
    for name, score in data["scores"].items():
        why = "" if name in served else "not served"
        why = f"floor {floor:.2f}" if name == chat and score < floor else why
        rows.append((name, score, data["active"].get(name), why))
    columns: Columns = {"domain": "text", "score": ("number", 3), "weight": ("number", 3)}
    if any(why for *_, why in rows):
        columns = {**columns, "why": "text"}
    lowest = f"; {chat} is never below {floor:.2f}" if chat else ""
    return Table.of(
        "scores", "Domains", columns, [row[: len(columns)] for row in rows],
        caption=f"Active above {data['threshold']:.2f}; template {data['template']}{lowest}.",
    )  # fmt: skip


def _loss_table(data: Mapping[str, Any]) -> Table:
    rows = []
    for row in data["losses"]:
        weights = ", ".join(f"{name} {weight:.2f}" for name, weight in row["weights"].items())
        rows.append((row["name"], row["loss"], row["difference_to_base"], weights or "none"))
    return Table.of("losses", "The answer, nats per token", {
        "set": "text", "loss": ("number", 3), "to base": ("change", 3), "weights": "text"
    }, rows)  # fmt: skip
