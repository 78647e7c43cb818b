"""Top-k gates and the balance loss. Run: pytest tests/layers/test_gates.py"""

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.layers.gates import (
    balance_gradient,
    balance_loss,
    balance_slopes,
    balance_sums,
    router_logits,
    top_k_mask,
    top_k_softmax,
    training_logits,
)
from tests.layers.build import assert_close, normal


def load_balance(logits: mx.array, chosen: mx.array, scale: float = 1.0) -> mx.array:
    return balance_loss(balance_sums(logits, chosen, mx.ones((len(logits), 1)), scale))


@pytest.mark.parametrize(("experts", "k"), [(4, 2), (4, 1), (4, 4), (7, 3), (64, 5)])
def test_exactly_k_gates_are_not_zero_and_sum_to_one(experts: int, k: int) -> None:
    logits = normal(0, 50, experts)
    routing = top_k_softmax(logits, k)
    gates = np.array(routing.gates)
    assert ((gates > 0).sum(-1) == k).all()
    assert_close(gates.sum(-1), np.ones(50), 1e-6)
    kept = np.sort(np.array(logits), axis=-1)[:, -k:]
    np.testing.assert_array_equal(np.sort(np.array(logits)[np.array(routing.chosen)].reshape(50, k)), kept)  # fmt: skip # noqa: E501


def test_k_of_all_experts_is_a_dense_softmax() -> None:
    logits = normal(1, 9, 5)
    np.testing.assert_array_equal(top_k_softmax(logits, 5).gates, mx.softmax(logits, axis=-1))


def test_equal_logits_keep_the_first_experts() -> None:
    logits = mx.array([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 3.0, 3.0]])
    wanted = [[0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0]]
    np.testing.assert_array_equal(np.array(top_k_mask(logits, 2)), np.array(wanted, dtype=bool))


def test_gates_are_float32_whatever_the_model_computes_in() -> None:
    x, router = normal(2, 5, 16).astype(mx.bfloat16), normal(3, 4, 16).astype(mx.float16)
    logits = router_logits(x, router)
    assert logits.dtype == mx.float32
    assert_close(logits, np.array(x.astype(mx.float32)) @ np.array(router.astype(mx.float32)).T)


def test_zero_noise_weights_still_give_noise_of_softplus_zero() -> None:
    x, router, draw = normal(4, 6, 8), normal(5, 4, 8), normal(6, 6, 4)
    noisy, again = training_logits(x, router, mx.zeros((4, 8)), draw)
    assert mx.array_equal(noisy, again)
    assert_close(noisy - router_logits(x, router), 0.6931472 * draw, 1e-5)


def test_balance_is_k_for_uniform_and_e_for_collapsed_routing() -> None:
    uniform = mx.zeros((12, 4))
    # Equal probability; over the rows each expert is chosen equally often.
    rotated = mx.array([[(row + i) % 4 < 2 for i in range(4)] for row in range(12)])
    assert load_balance(uniform, rotated).item() == pytest.approx(2.0)
    assert load_balance(uniform, rotated, scale=1 / 2).item() == pytest.approx(1.0)
    collapsed = mx.array([[100.0, 0.0, 0.0, 0.0]] * 12)
    assert load_balance(collapsed, top_k_mask(collapsed, 2)).item() == pytest.approx(4.0)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_balance_lies_between_zero_and_e(k: int) -> None:
    for seed in range(10):
        logits = 3 * normal(seed, 30, 4)
        assert 0 < load_balance(logits, top_k_mask(logits, k)).item() <= 4 + 1e-5


def test_balance_gradient_is_that_of_the_probabilities_with_fixed_counts() -> None:
    logits = normal(7, 10, 4)
    chosen = top_k_mask(logits, 2)
    share = np.array(chosen).mean(0)

    def by_hand(values: mx.array) -> mx.array:
        return 4 * mx.sum(mx.mean(mx.softmax(values, axis=-1), axis=0) * mx.array(share))

    def whole(values: mx.array) -> mx.array:
        return load_balance(values, top_k_mask(values, 2))

    got = mx.grad(whole)(logits)
    assert float(mx.max(mx.abs(got))) > 0
    assert_close(got, mx.grad(by_hand)(logits))


@pytest.mark.parametrize("with_noise", [True, False])
def test_twin_logits_differ_in_the_gradient_to_x_alone(with_noise: bool) -> None:
    """Against autograd of the formula, with a stop_gradient where the second twin has one."""
    arrays = [normal(1, 2, 5, 8), normal(2, 4, 8), normal(3, 4, 8)]
    draw = normal(4, 2, 5, 4) if with_noise else None
    left, right = normal(5, 2, 5, 4), normal(6, 2, 5, 4)

    def formula(x: mx.array, router: mx.array, noise: mx.array) -> mx.array:
        logits = x @ router.T
        return logits if draw is None else logits + mx.logaddexp(x @ noise.T, 0) * draw

    def twice(*arrays: mx.array) -> mx.array:
        x, router, noise = arrays
        gates, balance = training_logits(x, router, noise, draw)
        return mx.sum(gates * left) + mx.sum(balance**2 * right)

    def plainly(x: mx.array, *weights: mx.array) -> mx.array:
        balance = formula(mx.stop_gradient(x), *weights)
        return mx.sum(formula(x, *weights) * left) + mx.sum(balance**2 * right)

    got, wanted = (mx.grad(f, argnums=(0, 1, 2))(*arrays) for f in (twice, plainly))
    for ours, by_hand in zip(got, wanted, strict=True):
        assert_close(ours, by_hand)


@pytest.mark.parametrize("with_noise", [True, False])
def test_slopes_of_batches_give_the_gradient_of_the_whole(with_noise: bool) -> None:
    """Added up over uneven parts, against autograd over all rows that are no padding."""
    x, router, noise = normal(1, 9, 8), normal(2, 4, 8), normal(3, 4, 8)
    draw = normal(4, 9, 4) if with_noise else None
    counted = mx.array([1.0, 1, 0, 1, 1, 0, 0, 1, 1])[:, None]

    def sums_of(rows: slice, router: mx.array, noise: mx.array) -> dict[str, mx.array]:
        normal = None if draw is None else draw[rows]
        logits, _ = training_logits(x[rows], router, noise, normal)
        sums = balance_sums(logits, top_k_mask(logits, 2), counted[rows], 0.5)
        slopes = balance_slopes(x[rows], logits, counted[rows], 0.5, noise, normal)
        return sums | {"slopes": slopes}

    def whole(router: mx.array, noise: mx.array) -> mx.array:
        return balance_loss(sums_of(slice(9), router, noise))

    parts = [sums_of(rows, router, noise) for rows in (slice(2), slice(2, 9))]
    together = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    value, wanted = mx.value_and_grad(whole, argnums=(0, 1))(router, noise)
    assert_close(balance_loss(together), value, 1e-6)
    got = balance_gradient(together)
    assert list(got) == ["router", "noise"][: 1 + with_noise]
    for gradient, by_autograd in zip(got.values(), wanted, strict=False):
        assert_close(gradient, by_autograd, 1e-5)
