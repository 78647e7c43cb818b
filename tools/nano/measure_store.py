"""What the sample stacks and the sample router do: losses and answers by domain, gaps.

Three ways to answer, on questions that nothing was trained with: the base alone, all stacks at
weight 1 (ungated), and as the router says for each prompt (routed, weights as they are served).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.data import Row
from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.store import Store
from mlxstacks.layers.selection import Selection, base, routed, ungated
from mlxstacks.layers.stack_files import serve
from mlxstacks.layers.stacked import set_mode
from mlxstacks.nano.settings import HELD_OUT
from mlxstacks.routing.router import PromptRouter, Route, load_prompt_router
from mlxstacks.stats import wilson_interval
from mlxstacks.training.modes import evaluating
from tools.nano.choices import ChoiceResult, score_continuations
from tools.nano.corpus import Document, Item, validation_documents
from tools.nano.curriculum import curriculum_documents, curriculum_items
from tools.nano.encode import encode_documents, encode_items
from tools.nano.measure import float_values
from tools.nano.settings import RebuildSettings

# At most so many questions of a domain; islands has 79 items.
ITEMS, OWN_ROWS, HELD_OUT_ROWS = 60, 16, 100
MODES = ("base", "ungated", "routed")


@dataclass(frozen=True)
class Served:
    """The model in float32 with every stack, its tokenizer, the router of the store."""

    model: nn.Module
    tokenizer: Any
    router: PromptRouter

    def routes(self, prompts: Sequence[str]) -> list[Route]:
        return self.router.routes(prompts)

    def logits_of(self, selection: Selection) -> Callable[[mx.array], mx.array]:
        set_mode(self.model, selection, mx.float32)

        def logits(tokens: mx.array) -> mx.array:
            found: mx.array = self.model(tokens)
            return found

        return logits


def load_served(store_path: Path, model_path: Path) -> Served:
    """The store at `store_path` on its base. Raises: as `serve` and `load_prompt_router`."""
    store = Store.open(store_path)
    model, tokenizer, _ = base_model.load(model_path)
    float_values(model)
    base = fingerprint(open_checkpoint(model_path), store.manifest.base_fingerprint)
    serve(model, store, base_fingerprint=base)
    return Served(model, tokenizer, load_prompt_router(store, model, tokenizer))


def measure_store(store_path: Path, model_path: Path, settings: RebuildSettings) -> dict[str, Any]:
    """Figures of the store at `store_path` on its base, for nano's manifest."""
    served, seed = load_served(store_path, model_path), settings.seed
    own = validation_documents(min(settings.validation_per_domain, OWN_ROWS), seed)
    count = min(settings.items_per_domain, ITEMS)
    items = {domain: curriculum_items(domain, count, seed) for domain in served.router.domains}
    with evaluating(served.model):
        return {
            "domains": {name: measure_items(served, several) for name, several in items.items()},
            "own_domains_loss": _measure_own(served, own),
            "router": _measure_router(served, items),
            "gaps": _measure_gaps(served, items, own),
        }


def measure_items(served: Served, items: Sequence[Item]) -> dict[str, Any]:
    """Accuracy on items, and loss of their right answers, in each mode."""
    encoded = encode_items(items, served.tokenizer)
    tokens = sum(len(item.continuations[item.answer_index]) for item in encoded)
    figures: dict[str, Any] = {"items": len(items)}
    for mode in MODES:
        correct, loss = 0, 0.0
        for selection, places in _parts(served, mode, [item.prompt for item in items]):
            chosen = [encoded[place] for place in places]
            scores = score_continuations(served.logits_of(selection), chosen)
            correct += ChoiceResult.of(chosen, scores, "sum").correct
            pairs = zip(chosen, scores, strict=True)
            loss -= sum(sums[item.answer_index] for item, sums in pairs)
        figures[mode] = {
            "accuracy": correct / len(items),
            "interval": wilson_interval(correct, len(items)).as_json(),
            "loss": loss / tokens,
        }
    return figures


def _parts(served: Served, mode: str, prompts: Sequence[str]) -> list[tuple[Selection, list[int]]]:
    """Which prompts share a selection: all of them, or routed each has its own."""
    if mode != "routed":
        return [(base() if mode == "base" else ungated(), list(range(len(prompts))))]
    return [
        (
            routed(list(route.weights), list(route.weights.values())) if route.weights else base(),
            [i],
        )
        for i, route in enumerate(served.routes(prompts))
    ]


def _loss_sum(logits: Callable[[mx.array], mx.array], rows: Sequence[Row]) -> float:
    return evaluate_mean_loss(logits, rows) * _weight(rows)


def _weight(rows: Sequence[Row]) -> float:
    return sum(sum(row.weights) for row in rows)


def _measure_own(served: Served, documents: Sequence[Document]) -> dict[str, dict[str, float]]:
    """Mode -> nano's own domain -> loss: what the stacks do to what the base knows."""
    found: dict[str, dict[str, float]] = {mode: {} for mode in MODES}
    for domain in dict.fromkeys(document.domain for document in documents):
        mine = [document for document in documents if document.domain == domain]
        rows = encode_documents(mine, served.tokenizer)
        for mode in MODES:
            parts = _parts(served, mode, [document.prompt for document in mine])
            total = sum(
                _loss_sum(served.logits_of(selection), [rows[place] for place in places])
                for selection, places in parts
            )
            found[mode][domain] = total / _weight(rows)
    return found


def _measure_router(served: Served, items: Mapping[str, Sequence[Item]]) -> dict[str, Any]:
    """By domain of the question: how often its own domain scores highest and is active, how often
    each other domain is active, mean number of active domains.
    """
    figures: dict[str, Any] = {"hidden_dims": served.router.header.hidden_dims}
    for domain, several in items.items():
        routes = served.routes([item.prompt for item in several])
        n = len(routes)
        top = sum(max(r.scores, key=lambda name: r.scores[name]) == domain for r in routes)
        figures[domain] = {
            "top_is_own": top / n,
            "active_percent": {
                name: 100 * sum(name in route.weights for route in routes) / n
                for name in served.router.domains
            },
            "mean_active": sum(len(route.weights) for route in routes) / n,
        }
    return figures


def _measure_gaps(
    served: Served, items: Mapping[str, Sequence[Item]], own: Sequence[Document]
) -> dict[str, Any]:
    """How often no domain is said to fit: right on an unseen domain and on what the base knows,
    a false alarm on the domains of the store.
    """
    unseen = [document.prompt for document in curriculum_documents(HELD_OUT, HELD_OUT_ROWS)]
    known = [item.prompt for several in items.values() for item in several]
    return {
        "threshold": served.router.header.threshold,
        f"detected_on_unseen_{HELD_OUT}": _gap_rate(served, unseen),
        "false_alarms_on_known": _gap_rate(served, known),
        "on_nanos_own_domains": _gap_rate(served, [document.prompt for document in own]),
    }


def _gap_rate(served: Served, prompts: Sequence[str]) -> dict[str, Any]:
    gaps = sum(route.gap for route in served.routes(prompts))
    interval = wilson_interval(gaps, len(prompts)).as_json()
    return {"gaps": gaps, "n": len(prompts), "rate": gaps / len(prompts), "interval": interval}
