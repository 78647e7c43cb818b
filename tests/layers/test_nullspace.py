"""Protected directions: construction, projection, folding.

Run: pytest tests/layers/test_nullspace.py
"""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from mlxstacks import base_model
from mlxstacks.layers.attach import add_active, attach_stacks
from mlxstacks.layers.delta_rows import collect_delta_rows, protect_active
from mlxstacks.layers.freezing import freeze_active, frozen_stack
from mlxstacks.layers.latent import latent_pairs
from mlxstacks.layers.moe_lora import Rows
from mlxstacks.layers.nullspace import NullBasis, fold_into, null_basis, right_singular_vectors
from mlxstacks.layers.packed import PackedStacks
from mlxstacks.layers.selection import StackId, base
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.stacked import set_mode, stacked_layers
from mlxstacks.layers.targets import find_targets
from tests.layers.build import (
    K,
    N,
    active_of,
    assert_close,
    dims_of,
    fill_active,
    normal,
    switch_rows,
    trained_delta,
)
from tests.tiny_models import qwen_moe_config

PROTECTED = 6


def directions(seed: int = 0, width: int = N, count: int = PROTECTED) -> mx.array:
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((width, count)))
    return mx.array(q.astype(np.float32))


def low_rank_rows(n: int, width: int, rank: int, noise: float = 0.01) -> np.ndarray:
    rng = np.random.default_rng(1)
    signal = rng.standard_normal((n, rank)) @ rng.standard_normal((rank, width))
    return signal + noise * rng.standard_normal((n, width))


@pytest.mark.parametrize("form", ["linear", "shared", "per_expert"])
def test_folded_basis_equals_the_projected_forward(form: str) -> None:
    delta = trained_delta(form)
    vectors = directions()
    delta.protect(vectors)
    x, rows = normal(0, 9, K), Rows()
    if form != "linear":
        x, indices = switch_rows(0, 2, 4, 2)
        rows = Rows(indices)
    trained, _ = delta(x, rows, mx.random.key(0))
    assert_close(trained @ vectors, mx.zeros((*trained.shape[:-1], PROTECTED)), 1e-5)
    delta.eval()
    still, _ = delta(x, rows)
    pack = PackedStacks()
    pack.replace_all([frozen_stack(delta, StackId("a", "chat"), mx.float32)])
    assert_close(pack(x, rows), still, 3e-6)


def test_folding_leaves_nothing_in_the_span() -> None:
    vectors = directions()
    folded = np.array(fold_into(trained_delta().lora_b, vectors), dtype=np.float64)
    inside = np.array(vectors, dtype=np.float64).T @ folded
    assert np.abs(inside).max() < 1e-6 * np.abs(folded).max()


def test_train_only_is_the_published_behaviour() -> None:
    delta = trained_delta(projector_mode="train_only", router_noise=False)
    free = trained_delta(router_noise=False)
    delta.protect(directions())
    x = normal(0, 5, K)
    in_training = delta(x)[0]
    assert float(mx.max(mx.abs(in_training @ directions()))) < 1e-4
    delta.eval()
    free.eval()
    assert mx.array_equal(delta(x)[0], free(x)[0])
    stack = frozen_stack(delta, StackId("a", "chat"), mx.float32)
    assert mx.array_equal(stack.lora_b, free.lora_b)


def test_adam_does_not_leak_into_the_span_when_folded() -> None:
    delta = trained_delta(router_noise=False)
    vectors = directions()
    delta.protect(vectors)
    optimizer = optim.AdamW(1e-2)
    goal = normal(3, 16, N)
    x = normal(4, 16, K)
    step = nn.value_and_grad(delta, lambda: mx.mean((delta(x)[0] - goal) ** 2))
    losses = []
    for _ in range(10):
        loss, gradient = step()
        optimizer.update(delta, gradient)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    raw = float(mx.max(mx.abs(vectors.T @ delta.lora_b)))
    frozen = frozen_stack(delta, StackId("a", "chat"), mx.float32)
    assert raw > 1e-3  # Adam put B into the span; freezing takes it out
    assert float(mx.max(mx.abs(vectors.T @ frozen.lora_b))) < 1e-5


@pytest.mark.parametrize(("n", "width", "k"), [(5, 12, 4), (9, 30, 6), (12, 8, 20), (60, 40, 10)])
def test_singular_vectors_are_those_of_a_plain_svd(n: int, width: int, k: int) -> None:
    rows = low_rank_rows(n, width, min(4, n, width))
    vectors, values = right_singular_vectors(rows, k)
    _, all_values, right = np.linalg.svd(rows)
    leading = min(4, k)
    assert_close(values[:leading], all_values[:leading], 1e-3)
    overlap = np.linalg.norm(vectors[:, :leading].T @ right[:leading].T, axis=1)
    assert (overlap > 0.99).all()
    assert_close(vectors.T @ vectors, np.eye(vectors.shape[1]), 1e-10)


def test_randomized_route_is_seeded_and_captures_as_much() -> None:
    rows = low_rank_rows(200, 50, 20, noise=0.1)
    basis = null_basis(rows, 12, seed=3)
    again, other = null_basis(rows, 12, seed=3), null_basis(rows, 12, seed=4)
    assert mx.array_equal(basis.vectors, again.vectors)
    assert not mx.array_equal(basis.vectors, other.vectors)
    values = np.linalg.svd(rows, compute_uv=False) ** 2
    best = values[:12].sum() / values.sum()
    assert basis.captured_energy is not None
    assert best - 0.01 < basis.captured_energy <= best + 1e-6
    assert basis.capacity == 12 / 50


def test_rank_deficient_rows_protect_what_is_there_and_no_more() -> None:
    rows = low_rank_rows(9, 30, 3, noise=0)
    basis = null_basis(rows, 8)
    assert basis.vectors.shape == (30, 3)
    assert basis.captured_energy == pytest.approx(1.0)
    empty = null_basis(np.zeros((5, 30)), 8)
    assert empty.vectors.shape == (30, 0)
    assert empty.captured_energy is None


def test_cumulative_scope_keeps_the_old_basis_and_adds_to_it() -> None:
    first = null_basis(low_rank_rows(20, 40, 5), 5)
    rng = np.random.default_rng(9)
    rows = rng.standard_normal((20, 40))
    both = null_basis(rows, 5, scope="cumulative", previous=first)
    assert both.vectors.shape == (40, 10)
    assert mx.array_equal(both.vectors[:, :5], first.vectors)
    assert_close(both.vectors.T @ both.vectors, mx.eye(10), 1e-6)
    assert both.capacity == 0.25
    aggregate = null_basis(rows, 5, scope="aggregate", previous=first)
    assert aggregate.vectors.shape == (40, 5)
    inside = np.array(first.vectors, dtype=np.float64)
    same = null_basis(rng.standard_normal((6, 5)) @ inside.T, 5, scope="cumulative",
                      previous=first)  # fmt: skip
    assert same.vectors.shape == (40, 5)


def test_wrong_bases_are_refused() -> None:
    delta = trained_delta()
    with pytest.raises(ValueError, match=r"allowed is \(20, k\)"):
        delta.protect(directions(width=N + 1))
    with pytest.raises(ValueError, match="not orthonormal"):
        delta.protect(2 * directions())
    with pytest.raises(ValueError, match="finite"):
        null_basis(np.full((3, 4), np.nan), 2)
    with pytest.raises(ValueError, match="0 directions"):
        null_basis(np.ones((3, 4)), 0)


def test_a_latent_stack_stays_out_after_d_out_and_can_be_folded() -> None:
    pair = latent_pairs({"q_proj": dims_of("linear")}, 10, "base")["q_proj"]
    delta = trained_delta(latent=pair)
    vectors = directions()
    x = normal(0, 7, K)
    delta.eval()
    before = delta(x)[0]
    assert float(mx.max(mx.abs(before @ vectors))) > 0.1
    delta.protect(vectors)
    after = delta(x)[0]
    assert float(mx.max(mx.abs(after @ vectors))) < 1e-5 * float(mx.max(mx.abs(after)))
    pack = PackedStacks()
    pack.replace_all([frozen_stack(delta, StackId("a", "chat"), mx.float32)])
    assert_close(pack(x, Rows()), after, 3e-6)


def test_rows_of_a_model_are_means_over_the_tokens_of_each_sample() -> None:
    """Dense, linear-attention, shared-expert and routed projections of a tiny hybrid model."""
    mx.random.seed(0)
    model = base_model.build_model(qwen_moe_config())
    attach_stacks(model, find_targets(model))
    add_active(model, StackSettings(rank=2), mx.random.key(0))
    for index, (_, layer) in enumerate(stacked_layers(model)):
        fill_active(layer, index)
    freeze_active(model, "chat/0", "chat", mx.float32)
    set_mode(model, base())
    samples = [mx.array([1, 2, 3, 4, 5]), mx.array([7, 8, 9])]
    model.train()
    rows = collect_delta_rows(model, samples)
    assert model.training
    assert rows.keys() == {path for path, _ in stacked_layers(model)}
    for path, layer in stacked_layers(model):
        assert rows[path].shape == (2, layer.output_dims)
        assert np.abs(rows[path]).max() > 0
        assert layer.mode[0].mode == "base"
        assert layer.training
    path = "language_model.model.layers.0.linear_attn.in_proj_qkv"
    block = model.language_model.model.layers[0]
    hidden = model.language_model.model.embed_tokens(samples[1][None])
    x = block.input_layernorm(hidden)
    layer = dict(stacked_layers(model))[path]
    by_hand = mx.mean(in_full_pack(layer, x)[0], axis=0)
    assert_close(rows[path][1], by_hand, 1e-5)

    add_active(model, StackSettings(rank=2), mx.random.key(1))
    bases = {p: null_basis(r, 2) for p, r in rows.items()}
    assert protect_active(model, bases) == len(rows)
    assert all(active_of(layer).null_vectors is not None for _, layer in stacked_layers(model))
    with pytest.raises(ValueError, match="no stack is in training at nowhere"):
        protect_active(model, {"nowhere": NullBasis(directions(), None, 0.1)})


def in_full_pack(layer, x: mx.array) -> mx.array:
    pack = PackedStacks()
    pack.replace_all(layer.stacks.stacks())
    return pack(x, Rows())
