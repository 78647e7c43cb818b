"""Arrow against its formula, on what the base's projections are given.

Run: pytest tests/routing/test_arrow.py
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.files.store import Store
from mlxstacks.layers.selection import base, ungated
from mlxstacks.layers.stacked import set_mode, stacked_layers
from mlxstacks.routing.arrow import ArrowRouter
from mlxstacks.routing.features import watched
from mlxstacks.routing.router import load_prompt_router
from mlxstacks.studies.route.served import open_served
from tests.studies.route_evaluate_cases import write_places

PROMPT = "what is the third letter of the word"


def test_shares_are_a_softmax_over_the_inputs_each_domain_answers_most(tmp_path: Path) -> None:
    """By dense deltas and NumPy, whatever stacks are on; a domain has all experts of its own."""
    places = write_places(tmp_path)
    served = open_served(Store.open(places.store), str(places.model), "auto")
    trained = load_prompt_router(served.store, served.model, served.tokenizer)
    arrow = ArrowRouter(trained, served.model)
    set_mode(served.model, ungated())
    (scores,) = arrow.scores([PROMPT])
    set_mode(served.model, base())
    inputs: dict[str, mx.array] = {}
    with ExitStack() as watching:
        for path, layer in stacked_layers(served.model):

            def note(x: mx.array, _: Any, path: str = path) -> None:
                inputs[path] = x

            watching.enter_context(watched(layer.linear, note))
        served.model(mx.array([trained.features.tokens(PROMPT)]))
    shares = []
    for path, layer in stacked_layers(served.model):
        deltas: dict[str, list[np.ndarray]] = {}
        for stack in layer.stacks.stacks():
            a, b = (
                np.array(t.astype(mx.float32), np.float64) for t in (stack.lora_a, stack.lora_b)
            )
            deltas.setdefault(stack.id.domain, []).extend(stack.shape.scale * b @ a)
        below = (np.concatenate(deltas[name]) for name in trained.domains)
        v = np.stack([np.linalg.svd(m, full_matrices=False)[2][0] for m in below])
        logits = np.abs(np.array(inputs[path], np.float64).reshape(-1, v.shape[1]) @ v.T)
        parts = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        shares.append(parts.mean(axis=0))
    assert len(shares) > 1
    assert sum(scores.values()) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose([*scores.values()], np.mean(shares, axis=0), atol=1e-5)
    assert arrow.header.threshold == 1 / 2
