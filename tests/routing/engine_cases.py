"""A tiny hybrid model, a store of random stacks for it and a random router, on disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxstacks import base_model
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.router_file import RouterHeader
from mlxstacks.files.store import Store
from mlxstacks.routing.engine import RoutedModel, open_routed
from mlxstacks.routing.router import MetaRouter, router_tensors
from mlxstacks.routing.settings import AnswerSettings
from tests.files.store_cases import header, tensors
from tests.routing.resident_cases import shapes_of
from tests.tiny_models import write_qwen_moe

DOMAINS = ("islands", "letters", "tolu")
PROJECTIONS = ("linear_attn.out_proj", "self_attn.q_proj")
HIDDEN, ROUTER_HIDDEN = 64, 16
# Roles, a generation prompt that is not in the history, and earlier thoughts left out.
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ '?' if enable_thinking else '!' }}{% endif %}"
)


@dataclass(frozen=True)
class Places:
    model: Path
    store: Path


def write_places(directory: Path) -> Places:
    """One stack a domain, and a router whose scores differ from prompt to prompt."""
    model = write_qwen_moe(
        directory / "model", bits=None, dtype="float32", hidden_size=HIDDEN, shards=1
    )
    (model / "chat_template.jinja").write_text(TEMPLATE)
    base = fingerprint(open_checkpoint(model))
    store = Store.create(directory / "store", "tiny", base)
    built, _, _ = base_model.load(model)
    paths = [path for path, _ in built.named_modules() if path.endswith(PROJECTIONS)]
    shapes = shapes_of(built, paths)
    for seed, name in enumerate(DOMAINS, start=1):
        with store.change("train", domain=name) as change:
            head = header(name, projections=shapes, base_fingerprint=base)
            values = {key: 0.3 * value for key, value in tensors(head, seed).items()}
            record = change.add_stack(values, head)
            change.manifest = change.manifest.with_domain(DomainRecord(name, True, (record,)))
    add_router(store)
    return Places(model, store.path)


def add_router(store: Store, domains: Sequence[str] = DOMAINS, bias: float = 0.0) -> None:
    """bias: on every logit; far below zero, no domain fits any prompt."""
    network = MetaRouter(HIDDEN, len(domains), ROUTER_HIDDEN, key=mx.random.key(5))
    network.domain_queries = 4 * mx.random.normal(
        network.domain_queries.shape, key=mx.random.key(6)
    )
    network.logit.weight = 30 * network.logit.weight
    network.logit.bias = mx.array([bias])
    by_name = {domain.name: domain for domain in store.manifest.domains}
    head = RouterHeader(
        domains=tuple(domains),
        stacks={name: tuple(s.file.sha256 for s in by_name[name].stacks) for name in domains},
        base_model="tiny", base_fingerprint=store.manifest.base_fingerprint, input_dims=HIDDEN,
        hidden_dims=ROUTER_HIDDEN,
    )  # fmt: skip
    with store.change("route train") as change:
        change.set_router(router_tensors(network), head)


def engine_for(places: Places, **changes: Any) -> RoutedModel:
    values = {"model": str(places.model), "store_path": str(places.store), "gap_log": "none"}
    return open_routed(AnswerSettings.model_validate(values | changes))


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
