"""What frozen stacks write on given samples: the rows from which protected directions are made."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks.layers.nullspace import NullBasis
from mlxstacks.layers.selection import Selection
from mlxstacks.layers.stacked import stacked_layers


def collect_delta_rows(
    model: nn.Module,
    samples: Iterable[mx.array],
    forward: Callable[[nn.Module, mx.array], object] | None = None,
) -> dict[str, np.ndarray]:
    """Delta rows (n, N) float32 of every projection with frozen stacks, by path.

    samples: token ids (T,) each, without padding: a row is the mean over all rows that the
        projection saw of one sample.
    forward: (model, tokens (1, T)) -> anything; default `model(tokens)`. What it returns is not
        evaluated: no logits are made, and no layer above the last one with stacks.
    Runs in evaluation mode, all frozen stacks at weight 1, no active one; afterwards each
    projection has its mode and training flag back.
    """
    run = forward or (lambda model, tokens: model(tokens))
    layers = dict(stacked_layers(model))
    before = {path: layer.mode for path, layer in layers.items()}
    training = [module for module in model.modules() if module.training]
    latest: dict[str, mx.array] = {}
    rows: dict[str, list[np.ndarray]] = {}
    model.eval()
    for path, layer in layers.items():
        layer.select(Selection(active=False))
        layer.record(partial(_keep_mean, latest, path))
    try:
        for tokens in samples:
            latest.clear()
            run(model, tokens[None])
            mx.eval(latest)
            for path, row in latest.items():
                rows.setdefault(path, []).append(np.array(row))
    finally:
        for path, layer in layers.items():
            layer.record(None)
            layer.select(*before[path])
        for module in training:
            module._set_training_mode(True)
    # one by one: all lists and all matrices together are gigabytes for a large base
    return {path: np.stack(rows.pop(path)) for path in list(rows)}


def _keep_mean(latest: dict[str, mx.array], path: str, delta: mx.array) -> None:
    """delta (..., N): its mean over all rows, float32."""
    flat = delta.reshape(-1, delta.shape[-1]).astype(mx.float32)
    latest[path] = mx.mean(flat, axis=0)


def protect_active(model: nn.Module, bases: Mapping[str, NullBasis]) -> int:
    """Keep the stack in training out of these directions, by path; others are not restricted.

    Returns the number of projections protected. Raises: ValueError naming paths without an active
    stack.
    """
    active = {path: layer.active for path, layer in stacked_layers(model)}
    missing = [path for path in bases if active.get(path) is None]
    if missing:
        raise ValueError(f"no stack is in training at {', '.join(missing)}")
    for path, basis in bases.items():
        delta = active[path]
        assert delta is not None
        if basis.vectors.shape[1]:
            delta.protect(basis.vectors)
    return len(bases)
