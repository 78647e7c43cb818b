"""Few rows through their chosen experts, many in one pass: both equal the stacks made in full.

Run: pytest tests/layers/test_packed_rows.py
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.layers.gates import top_k_softmax
from mlxstacks.layers.moe_lora import Rows
from mlxstacks.layers.packed import FrozenStack, PackedStacks, StackShape, pack, pack_all, weighted
from mlxstacks.layers.packed_rows import FEW_ROWS, top_k_from_last
from mlxstacks.layers.selection import Selection, StackId, routed, subset
from mlxstacks.layers.stacked import set_mode
from tests.layers.build import K, N, assert_close, normal, random_stack, stacked, switch_rows
from tests.layers.test_packed import in_full


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=9).flatmap(
        lambda row: st.tuples(st.just(row), st.integers(1, len(row)))
    )
)
def test_chosen_are_the_largest_and_of_equal_ones_the_last(case: tuple[list[int], int]) -> None:
    row, k = case
    logits = mx.array([row], mx.float32)
    chosen, gates = top_k_from_last(logits, k)
    order = np.argsort(np.array(row), kind="stable")[-k:]
    assert np.array(chosen)[0].tolist() == order.tolist()
    dense = np.zeros(len(row), np.float32)
    dense[order] = np.array(gates)[0]
    reversed_gates = np.array(top_k_softmax(logits[:, ::-1], k).gates)[0, ::-1]
    np.testing.assert_allclose(dense, reversed_gates, rtol=1e-6)


def test_of_equal_experts_the_first_answer_in_both_ways() -> None:
    """A router of zeros gives ties everywhere: the first two of four experts, one row or many."""
    stack = random_stack("linear")
    assert stack.router is not None
    flat = FrozenStack(
        stack.id, stack.shape, stack.lora_a, stack.lora_b, mx.zeros(stack.router.shape)
    )
    layer = stacked("linear", [flat])
    layer.eval()
    x = normal(0, 1, FEW_ROWS + 1, K)
    a, b = (np.array(array, np.float64) for array in (stack.lora_a, stack.lora_b))
    first = sum(np.array(x, np.float64) @ a[e].T @ b[e].T for e in range(2))
    wanted = np.array(layer.linear(x), np.float64) + stack.shape.scale * 0.5 * first
    assert_close(layer(x), wanted)
    assert_close(layer(x[:, :1]), wanted[:, :1])


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("experts", [(4, 2), (4, 1), (3, 3), (7, 3)])
def test_both_ways_equal_every_expert_made_in_full(
    count: int, rows: int, experts: tuple[int, int]
) -> None:
    E, k = experts
    changes: dict[str, Any] = {"num_experts": E, "experts_per_token": k}
    stacks = [random_stack("linear", seed, domain=f"d{seed}", **changes) for seed in range(count)]
    layer = stacked("linear", stacks)
    layer.eval()
    x, numbers = normal(1, 1, rows, K), [0.3 + 0.2 * i for i in range(count)]
    domains = [f"d{i}" for i in range(count)]
    deltas = [in_full(stack, x) for stack in stacks]
    base = np.array(layer.linear(x), np.float64)
    for selection, wanted in [
        (subset(domains), sum(deltas)),
        (routed(domains, [0.5] * count), 0.5 * sum(deltas)),
        (routed(domains, numbers), sum(w * d for w, d in zip(numbers, deltas, strict=True))),
    ]:
        set_mode(layer, selection)
        assert_close(layer(x), base + wanted)


@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS + 1])
def test_weights_per_sequence_of_few_rows(rows: int) -> None:
    stacks = [random_stack("linear", i, domain=f"d{i}") for i in range(3)]
    layer = stacked("linear", stacks)
    layer.eval()
    x = normal(0, 2, rows, K)
    weights = np.array([[1.0, 0.0, 0.3], [0.5, 0.25, 2.0]])
    set_mode(layer, routed(["d0", "d1", "d2"], weights))
    wanted = np.array(layer.linear(x), np.float64)
    for i in range(2):
        wanted[i] += sum(w * in_full(s, x[i]) for w, s in zip(weights[i], stacks, strict=True))
    assert_close(layer(x), wanted)


def test_one_token_of_a_switch_projection() -> None:
    """gate_proj has one row for all base experts, down_proj one for each."""
    stacks = [random_stack("shared", i) for i in range(2)]
    layer = stacked("shared", stacks)
    layer.eval()
    x, indices = switch_rows(0, 1, 1, 3)
    each = mx.broadcast_to(x, (1, 1, 3, 1, K))
    for rows in (x, each):
        wanted = layer.linear(rows, indices) + sum(in_full(stack, rows) for stack in stacks)
        assert_close(layer(rows, indices), wanted)


def test_no_rows_at_all() -> None:
    layer = stacked("linear", [random_stack("linear")])
    assert layer(mx.zeros((1, 0, K))).shape == (1, 0, N)


def test_gradients_of_few_rows_are_those_of_many() -> None:
    """The same rows one by one and together: training may have short sequences."""
    layer = stacked("linear", [random_stack("linear", i, domain=f"d{i}") for i in range(2)])
    set_mode(layer, routed(["d0", "d1"], [0.5, 2.0]))
    x, goal = normal(0, 1, FEW_ROWS + 2, K), normal(1, 1, FEW_ROWS + 2, N)

    def loss(x: mx.array, goal: mx.array) -> mx.array:
        return mx.sum((layer(x) - goal) ** 2)

    together = mx.grad(loss)(x, goal)
    parts = [mx.grad(loss)(x[:, i : i + 1], goal[:, i : i + 1]) for i in range(FEW_ROWS + 2)]
    assert_close(mx.concatenate(parts, axis=1), together)


def test_few_rows_read_the_chosen_experts_only() -> None:
    """NaN in an expert that no row chose does not reach the result."""
    stack = random_stack("linear")
    x = normal(0, 1, 1, K)
    assert stack.router is not None
    unused = np.argsort(np.array(x[0] @ stack.router.T)[0])[:2]
    a, b = np.array(stack.lora_a), np.array(stack.lora_b)
    a[unused], b[unused] = np.nan, np.nan
    poisoned = FrozenStack(stack.id, stack.shape, mx.array(a), mx.array(b), stack.router)
    clean, dirty = stacked("linear", [stack]), stacked("linear", [poisoned])
    assert mx.array_equal(clean(x), dirty(x))


def test_packed_memory_is_that_of_the_stacks() -> None:
    shape = StackShape("linear", 4, 16, 2, 4.0)
    stacks = []
    for i in range(3):
        arrays = normal(i, 4, 16, 640), normal(i, 4, 512, 16), normal(i, 4, 640)
        stacks.append(FrozenStack(StackId(f"s{i}", "chat"), shape, *arrays))
    mx.eval([list(stack.tensors().values()) for stack in stacks])
    mx.clear_cache()  # a buffer that is used again may be larger than what is asked for
    wanted = sum(array.nbytes for stack in stacks for array in stack.tensors().values())
    before = mx.get_active_memory()
    segment = pack(stacks)
    grown = mx.get_active_memory() - before
    assert segment.nbytes == wanted
    # Buffers are rounded up, the few routers are there twice; a second a or b would be far more.
    assert grown < 1.15 * wanted


def test_weights_share_the_packed_arrays() -> None:
    (segment,) = pack_all([random_stack(seed=1), random_stack(seed=2)])
    before = mx.get_active_memory()
    halves = weighted(segment, {"chat/1": 0.5, "chat/2": 0.25})
    assert halves.a_all is segment.a_all
    assert halves.views is segment.views
    assert mx.get_active_memory() - before <= 256


def test_half_precision_and_plain_lora_take_the_other_ways() -> None:
    stack = random_stack("linear")
    half = FrozenStack(
        stack.id, stack.shape, stack.lora_a.astype(mx.float16), stack.lora_b.astype(mx.float16),
        stack.router,
    )  # fmt: skip
    plain = random_stack("linear", 3, num_experts=1)
    x = normal(0, 1, 1, K)
    for one in (half, plain):
        (segment,) = pack_all([one])
        assert segment.views is None
        made, y = PackedStacks(), normal(1, 1, 1, N)
        made.install([segment])
        delta = made(x, Rows())
        assert delta is not None
        assert mx.allclose(made.add_to(y, x, Rows()), y + delta, atol=1e-5)
    (wide,) = pack_all([half], mx.float32)
    assert wide.views is not None
    made.replace_all([half])
    made.serve(
        Selection("subset", False, (StackId("chat/0", "chat").name,), np.ones(1)), mx.float32
    )
    (served,) = made._served
    assert served.views is not None
