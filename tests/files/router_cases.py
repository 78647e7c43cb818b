"""Small routers for the tests of the store and of routing: random numbers under a valid header."""

from typing import Any

import mlx.core as mx

from mlxstacks.files.router_file import RouterHeader, router_shapes
from mlxstacks.files.store import Store
from tests.files.store_cases import BASE


def router_header(store: Store | None = None, **changes: Any) -> RouterHeader:
    """Of all domains of a store with its present stacks, or of two made-up ones."""
    stacks: dict[str, tuple[str, ...]] = {"chat": ("a" * 64,), "code": ("b" * 64, "c" * 64)}
    if store is not None:
        stacks = {d.name: tuple(s.file.sha256 for s in d.stacks) for d in store.manifest.domains}
    values: dict[str, Any] = {
        "domains": tuple(stacks),
        "stacks": stacks,
        "base_model": "tiny",
        "base_fingerprint": BASE if store is None else store.manifest.base_fingerprint,
        "input_dims": 6,
        "hidden_dims": 4,
        "training": {"seed": 42, "metrics": {"val_bce": 0.25}},
    }
    return RouterHeader(**(values | changes))


def router_tensors(head: RouterHeader, seed: int = 0) -> dict[str, mx.array]:
    shapes = router_shapes(head.input_dims, len(head.domains), head.hidden_dims)
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return {
        name: mx.random.normal(shape, key=key)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def set_router(store: Store, seed: int = 0, **changes: Any) -> RouterHeader:
    """Give a store a router."""
    head = router_header(store, **changes)
    with store.change("route train") as change:
        change.set_router(router_tensors(head, seed), head)
    return head
