"""A training step with the loss in pieces: loss and gradients of the whole form, on several kinds
of models, checkpointed, compiled, masked; and the same validation loss.

Tolerance: 2e-6 of the loss and of each gradient's norm in float32; compiled 1e-4, as the compiler
fuses and rounds differently.
Run: pytest tests/training/test_head.py
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.data import Batch, Row
from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.layers.output_head import OutputHead, find_output_head
from mlxstacks.ops import token_loss
from mlxstacks.training.checkpointing import checkpoint_layers
from mlxstacks.training.step import GradientStep, StepGradients, counted_places, cross_entropy_loss
from tests.tiny_models import VOCAB_SIZE, llama_config, qwen_moe_config
from tests.training.test_checkpointing import tiny
from tests.training.tiny import TinyModel, random_tokens

MODELS: dict[str, Callable[..., Any]] = {
    "hybrid": lambda **more: tiny(
        qwen_moe_config(64), None, ["mlp.switch_mlp.down_proj", "linear_attn.in_proj_qkv"], **more
    ),
    "hybrid tied 4-bit": lambda **more: tiny(
        qwen_moe_config(64, tied=True), 4, ["mlp.switch_mlp.up_proj", "self_attn.q_proj"], **more
    ),
    "dense": lambda **more: tiny(llama_config(64), None, ["self_attn.v_proj"], **more),
    "dense tied 8-bit": lambda **more: tiny(
        llama_config(64, tied=True), 8, ["self_attn.v_proj", "mlp.up_proj"], **more
    ),
}
PIECE = 8


class Frozen(nn.Module):
    """An embedding that trains, and a head that does not."""

    def __init__(self) -> None:
        super().__init__()
        key = mx.random.key(0)
        self.embed = nn.Embedding(VOCAB_SIZE, 8)
        self.embed.weight = mx.random.normal((VOCAB_SIZE, 8), key=key)
        self.head = nn.Linear(8, VOCAB_SIZE)
        self.head.weight = mx.random.normal((VOCAB_SIZE, 8), key=key)
        self.head.freeze()

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.head(mx.tanh(self.embed(tokens)))


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(token_loss, "PIECE_LOGITS", PIECE * VOCAB_SIZE)
    with base_model.gated_delta_installed():
        yield


def head_of(model: nn.Module) -> OutputHead:
    head, note = find_output_head(model)
    assert head is not None, note
    assert head.piece_tokens == PIECE
    return head


def batch(rows: int = 2, length: int = 14, prompt: int = 0) -> Batch:
    weights = np.ones((rows, length), np.float32)
    weights[:, :prompt] = 0
    weights[-1, length - 3 :] = 0.25
    return Batch(random_tokens(rows, length), weights)


def agree(found: StepGradients, expected: StepGradients, tolerance: float = 2e-6) -> None:
    loss = expected.loss.item()
    assert abs(found.loss.item() - loss) <= tolerance * abs(loss)
    there = dict(tree_flatten(expected.gradients))
    here = dict(tree_flatten(found.gradients))
    assert here.keys() == there.keys()
    for name, value in there.items():
        off, size = mx.linalg.norm(here[name] - value).item(), mx.linalg.norm(value).item()
        assert size > 0, name
        assert off <= tolerance * size, f"{name}: {off / size}"


@pytest.mark.parametrize(
    ("name", "checkpointed"), [*((name, False) for name in MODELS), ("hybrid", True)]
)
def test_pieces_give_the_loss_and_gradients_of_the_whole(name: str, checkpointed: bool) -> None:
    """With dropout, so that the draws have to be the same as well."""
    model = MODELS[name](dropout=0.2)
    head = head_of(model)
    for prompt in (0, 9):
        mx.random.seed(1)
        expected = GradientStep(model, cross_entropy_loss())([batch(prompt=prompt)], 0, 0)
        mx.random.seed(1)
        with checkpoint_layers(model) if checkpointed else nullcontext():
            step = GradientStep(model, cross_entropy_loss(head=head))
            agree(step([batch(prompt=prompt)], 0, 0), expected)


def test_compiled_steps_agree() -> None:
    """Twice, with masks of other lengths: the shapes of the pieces change. The model is as small as
    can be, since each shape is built by the system's C++ compiler.
    """
    model = Frozen()
    whole = GradientStep(model, cross_entropy_loss())
    pieces = GradientStep(model, cross_entropy_loss(head=head_of(model)), compiled=True)
    for prompt in (0, 9):
        agree(pieces([batch(prompt=prompt)], 0, 0), whole([batch(prompt=prompt)], 0, 0), 1e-4)


def test_accumulated_batches_agree() -> None:
    model = MODELS["dense"]()
    batches = [batch(prompt=3), batch(rows=3, length=9, prompt=2)]
    expected = GradientStep(model, cross_entropy_loss())(batches, 0, 0)
    agree(GradientStep(model, cross_entropy_loss(head=head_of(model)))(batches, 0, 0), expected)


def test_what_the_forward_adds_is_kept() -> None:
    def forward(model: nn.Module, tokens: mx.array) -> tuple[mx.array, mx.array]:
        return model(tokens), mx.sum(trained(model) ** 2)

    def trained(model: nn.Module) -> mx.array:
        return tree_flatten(model.trainable_parameters())[0][1]

    model = MODELS["dense"]()
    expected = GradientStep(model, cross_entropy_loss(forward, 0.5))([batch()], 0, 0)
    step = GradientStep(model, cross_entropy_loss(forward, 0.5, head_of(model)))
    found = step([batch()], 0, 0)
    agree(found, expected)
    assert found.parts["extra_loss"].item() == expected.parts["extra_loss"].item() > 0


def test_a_model_is_itself_after_a_failed_step() -> None:
    def broken(model: nn.Module, tokens: mx.array) -> tuple[mx.array, None]:
        model(tokens)
        raise RuntimeError("stop")

    model = MODELS["dense"]()
    before = [type(module) for module in model.modules()]
    weights = dict(tree_flatten(model.parameters()))
    for compiled in (False, True):
        step = GradientStep(model, cross_entropy_loss(broken, 0.0, head_of(model)), None, compiled)
        with pytest.raises(RuntimeError, match="stop"):
            step([batch()], 0, 0)
    assert [type(module) for module in model.modules()] == before
    after = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(after[name], weights[name]).item() for name in weights)


def test_a_model_that_trains_its_head_stays_whole() -> None:
    head, note = find_output_head(TinyModel())
    assert head is None
    assert "out is trained" in note


# --- the tokens that count ------------------------------------------------------------------------


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 30)),
        elements=st.sampled_from([0, 0.5]),
    )
)
def test_every_weight_is_counted_and_shapes_are_few(weights: np.ndarray) -> None:
    places = counted_places(weights)
    flat = weights.reshape(-1)
    assert set(np.flatnonzero(flat)) <= set(places.tolist())
    assert (np.diff(places) > 0).all()
    assert 1 <= len(places) <= flat.size
    eighth = -(-flat.size // 8)
    assert len(places) in {min(k * eighth, flat.size) for k in range(1, 9)}
    assert len(places) - np.count_nonzero(flat) <= eighth


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hybrid tied 4-bit", "dense"])
def test_the_validation_loss_is_the_same(name: str) -> None:
    model = MODELS[name]()
    model.eval()
    rng = np.random.default_rng(2)
    rows = []
    for length in (3, 7, 12, 25):
        tokens = tuple(int(t) for t in rng.integers(0, VOCAB_SIZE, length))
        drawn = (float(weight) for weight in rng.integers(0, 2, length - 2))
        rows.append(Row(tokens, (0.0, *drawn, 1.0)))
    whole = evaluate_mean_loss(model, rows, batch_size=3)
    pieces = evaluate_mean_loss(model, rows, batch_size=3, head=head_of(model))
    assert pieces == pytest.approx(whole, rel=2e-6)


def test_evaluation_holds_one_piece_of_logits() -> None:
    config = llama_config(64) | {"vocab_size": 1 << 15}
    model = tiny(config, None, ["self_attn.v_proj"])
    model.eval()
    rows = [Row((1, 2, 3) * 22, (0.0, *[1.0] * 65))]
    head, _ = find_output_head(model)
    assert head is not None

    def peak_bytes(head: OutputHead | None) -> int:
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        evaluate_mean_loss(model, rows, head=head)
        return mx.get_peak_memory() - before

    assert head.piece_tokens == 1
    assert peak_bytes(head) < 0.1 * peak_bytes(None)
