"""Packed frozen stacks against the loop over them; modes and weights per sequence.

Run: pytest tests/layers/test_packed.py
"""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.layers.moe_lora import Rows
from mlxstacks.layers.packed import FrozenStack, PackedStacks, pack_all, weighted
from mlxstacks.layers.row_order import expert_order
from mlxstacks.layers.selection import Selection, StackId, base, routed, subset, ungated
from mlxstacks.layers.stacked import StackedLayer, set_mode
from tests.layers.build import (
    K,
    N,
    assert_close,
    normal,
    random_stack,
    settings_of,
    stacked,
    switch_rows,
)

FORMS = ("linear", "shared", "per_expert")


def packed(stacks: list[FrozenStack], selection: Selection | None = None) -> PackedStacks:
    made = PackedStacks()
    made.replace_all(stacks)
    if selection is not None:
        made.serve(selection)
    return made


def alone(stack: FrozenStack, x: mx.array, rows: Rows) -> mx.array:
    """What one stack gives in a pack of its own."""
    delta = packed([stack])(x, rows)
    assert delta is not None
    return delta


def summed(stacks: list[FrozenStack], x: mx.array, rows: Rows) -> mx.array:
    """The per-stack loop."""
    return mx.sum(mx.stack([alone(stack, x, rows) for stack in stacks]), axis=0)


def in_full(stack: FrozenStack, x: mx.array) -> np.ndarray:
    """One linear stack the plain way, in NumPy: every expert's output made, then gated."""
    tensors = stack.tensors()
    a, b, router = (np.array(tensors[name].astype(mx.float32), dtype=np.float64)
                    for name in ("lora_a", "lora_b", "router"))  # fmt: skip
    rows = np.array(x, dtype=np.float64).reshape(-1, x.shape[-1])
    logits = rows @ router.T
    order = np.argsort(-logits, axis=-1, kind="stable")[:, : stack.shape.top_k]
    kept = np.full_like(logits, -np.inf)
    np.put_along_axis(kept, order, np.take_along_axis(logits, order, -1), -1)
    gates = np.exp(kept - kept.max(-1, keepdims=True))
    gates /= gates.sum(-1, keepdims=True)
    outputs = np.einsum("enr,erk,tk->ten", b, a, rows)
    delta = stack.shape.scale * np.einsum("te,ten->tn", gates, outputs)
    return delta.reshape(*x.shape[:-1], -1)


def rows_of(form: str) -> tuple[mx.array, Rows]:
    if form == "linear":
        return normal(0, 3, 5, K), Rows()
    x, indices = switch_rows(0, 3, 5, 2)
    return x, Rows(indices)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_packed_equals_the_loop(form: str, count: int) -> None:
    stacks = [random_stack(form, seed) for seed in range(count)]
    x, rows = rows_of(form)
    assert_close(packed(stacks)(x, rows), summed(stacks, x, rows), 3e-6)


def test_stacks_of_different_shapes_share_a_projection() -> None:
    """Another rank, other experts, a plain LoRA, another scale: segments, and the same sum."""
    stacks = [
        random_stack("linear", 0),
        random_stack("linear", 1, rank=5),
        random_stack("linear", 2, num_experts=2),
        random_stack("linear", 3, num_experts=1),
        random_stack("linear", 4, alpha=3.0),
        random_stack("linear", 5),
    ]
    both = packed(stacks)
    assert len(both.ids) == 6
    x = normal(1, 2, 4, K)
    assert_close(both(x, Rows()), summed(stacks, x, Rows()), 3e-6)


def test_taking_stacks_out_of_a_pack_gives_their_bytes() -> None:
    for form in FORMS:
        stacks = [random_stack(form, seed) for seed in range(3)]
        for before, after in zip(stacks, packed(stacks).stacks(), strict=True):
            assert (after.id, after.shape) == (before.id, before.shape)
            for name, array in before.tensors().items():
                assert mx.array_equal(after.tensors()[name], array), (form, name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", [["d1"], ["d0", "d2"]])
def test_packs_for_a_gpu_have_no_gaps(
    form: str, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A custom kernel copies an input whose rows do not follow each other, at every call."""
    stacks = [random_stack(form, seed, domain=f"d{seed}") for seed in range(3)]
    on_cpu = packed(stacks, subset(kept))
    gpu = SimpleNamespace(type=mx.DeviceType.gpu)
    monkeypatch.setattr(mx, "default_device", lambda: gpu)  # the layout alone follows it
    on_gpu = packed(stacks, subset(kept))
    (mine,), (other,) = on_gpu._served, on_cpu._served
    assert mine.views is None
    for array, same in ((mine.a_all, other.a_all), (mine.b_all, other.b_all)):
        assert mx.array_equal(array, same)
        assert np.array(array, copy=False).flags.c_contiguous


def test_half_precision_stacks_answer_in_the_dtype_of_x() -> None:
    stack = random_stack("linear")
    pair = (stack.lora_a.astype(mx.float16), stack.lora_b.astype(mx.float16))
    half = FrozenStack(stack.id, stack.shape, *pair, stack.router)
    x = normal(0, 4, K)
    made = packed([half])
    assert alone(half, x.astype(mx.bfloat16), Rows()).dtype == mx.bfloat16
    assert_close(made(x, Rows()), in_full(half, x))
    before = alone(half, x, Rows())
    made.serve(ungated(), mx.float32)
    assert_close(made(x, Rows()), before, 1e-6)  # two orders of the same sums
    assert made.stacks()[0].lora_a.dtype == mx.float16


def test_installed_stacks_answer_until_a_mode_is_set() -> None:
    """Packed elsewhere and handed over: the same numbers as serving them from the layer itself."""
    names = {"chat/0": 1.0, "code/1": 0.5, "code/2": 0.5}
    stacks = [
        random_stack("linear", 0, domain="chat"),
        random_stack("linear", 1, domain="code"),
        random_stack("linear", 2, domain="code", rank=5),
    ]
    x = normal(1, 2, 5, K)
    own, guest = stacked("linear", stacks), stacked("linear", [])
    for layer in (own, guest):
        layer.eval()
    set_mode(own, routed(["chat", "code"], [1.0, 0.5]))
    segments = [weighted(segment, names) for segment in pack_all(stacks)]
    assert [len(segment.ids) for segment in segments] == [2, 1]
    guest.install(segments)
    assert mx.array_equal(guest(x), own(x))
    assert guest.stacks.ids == []
    set_mode(guest, base())
    assert mx.array_equal(guest(x), guest.linear(x))
    own.install([])
    assert mx.array_equal(own(x), own.linear(x))
    set_mode(own, routed(["chat", "code"], [1.0, 0.5]))
    guest.install(segments)
    assert mx.array_equal(guest(x), own(x))


def test_weights_of_one_are_no_array() -> None:
    (segment,) = pack_all([random_stack(seed=1), random_stack(seed=2)])
    same = weighted(segment, {"chat/1": 1.0, "chat/2": 1.0, "other": 3.0})
    assert same.weights is None
    half = weighted(segment, {"chat/1": 1.0, "chat/2": 0.5})
    assert half.weights is not None
    assert half.weights.tolist() == [1.0, 0.5]
    assert weighted(half, {"chat/1": 1.0, "chat/2": 1.0}).weights is None
    with pytest.raises(ValueError, match="no weight for stack chat/2"):
        weighted(segment, {"chat/1": 1.0})


def test_packing_widens_and_refuses_two_of_one_name() -> None:
    stack = random_stack("linear")
    pair = (stack.lora_a.astype(mx.float16), stack.lora_b.astype(mx.float16))
    half = FrozenStack(stack.id, stack.shape, *pair, stack.router)
    (narrow,), (wide,) = pack_all([half]), pack_all([half], mx.float32)
    assert (narrow.stack(0).lora_a.dtype, wide.stack(0).lora_a.dtype) == (mx.float16, mx.float32)
    assert mx.array_equal(wide.stack(0).lora_b, half.lora_b.astype(mx.float32))
    assert wide.nbytes > narrow.nbytes > 0
    assert pack_all([]) == ()
    with pytest.raises(ValueError, match="two stacks named chat/1"):
        pack_all([random_stack(seed=1), random_stack(seed=1)])


def test_modes() -> None:
    stacks = [random_stack("linear", i, domain=d) for i, d in enumerate(("chat", "code", "code"))]
    layer = stacked("linear", stacks)
    layer.eval()
    x = normal(1, 2, 5, K)
    plain = layer.linear(x)
    parts: list[Any] = [alone(stack, x, Rows()) for stack in stacks]
    for selection, wanted in [
        (base(), plain),
        (ungated(), plain + sum(parts)),
        (subset(["code"]), plain + parts[1] + parts[2]),
        (subset(["chat/0", "code/2"]), plain + parts[0] + parts[2]),
        (routed(["chat", "code"], [0.25, 0.5]), plain + 0.25 * parts[0] + 0.5 * (parts[1] + parts[2])),  # noqa: E501
        (routed(["chat", "code"], [0.1, 0.5], threshold=0.1), plain + 0.5 * (parts[1] + parts[2])),
        (routed(["chat"], [0.0]), plain),
    ]:  # fmt: skip
        set_mode(layer, selection)
        assert_close(layer(x), wanted, 3e-6)
    set_mode(layer, base())
    assert mx.array_equal(layer(x), plain)


def test_domains_that_are_off_are_sliced_away() -> None:
    layer = stacked("linear", [random_stack("linear", i, domain=f"d{i}") for i in range(5)])
    off = [0.0, 0.1, 0.7, 0.1, 0.9]
    set_mode(layer, routed([f"d{i}" for i in range(5)], off, threshold=0.1))
    (served,) = layer.stacks._served
    assert [stack_id.domain for stack_id in served.ids] == ["d2", "d4"]
    assert served.a_all.shape == (2 * 12, K)
    assert served.b_all.shape == (N, 2 * 12)
    per_sequence = [[0.0, 0.1, 0.7, 0, 0], [0.05, 0.0, 0.0, 0, 0.4]]
    set_mode(layer, routed([f"d{i}" for i in range(5)], per_sequence, threshold=0.1))
    (served,) = layer.stacks._served
    np.testing.assert_allclose(np.array(served.weights), [[0.7, 0], [0, 0.4]], rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_weights_per_sequence_are_those_of_each_sequence_alone(form: str) -> None:
    stacks = [random_stack(form, i, domain=f"d{i}") for i in range(3)]
    layer = stacked(form, stacks)
    layer.eval()
    x, rows = rows_of(form)
    weights = np.array([[1.0, 0.0, 0.3], [0.0, 0.0, 0.0], [0.5, 0.25, 2.0]])
    set_mode(layer, routed(["d0", "d1", "d2"], weights))
    arguments = [] if rows.indices is None else [rows.indices]
    together = layer(x, *arguments)
    for i in range(3):
        set_mode(layer, routed(["d0", "d1", "d2"], weights[i]))
        by_itself = layer(x[i : i + 1], *(a[i : i + 1] for a in arguments))
        assert_close(together[i : i + 1], by_itself, 3e-6)


@pytest.mark.parametrize("form", ["shared", "per_expert"])
def test_weights_per_sequence_follow_rows_sorted_by_expert(form: str) -> None:
    """The whole of mlx-lm's SwitchGLU, once below and once above its limit for sorting."""
    from mlx_lm.models.switch_layers import SwitchGLU

    from mlxstacks.layers.row_order import stop_telling, tell_order

    glu = SwitchGLU(K, N, 6)
    output_dims = {"gate_proj": N, "up_proj": N, "down_proj": K}
    for place, (name, n) in enumerate(output_dims.items()):
        layer = StackedLayer(glu[name])
        layer.add_active(settings_of(form), mx.random.key(place))
        glu[name] = layer
        freeze_with_numbers(layer, place, n)
    kind = type(glu)
    tell_order(glu)
    assert isinstance(glu, SwitchGLU)
    glu.eval()
    x = normal(3, 2, 20, K)
    indices = mx.argsort(normal(4, 2, 20, 6), axis=-1)[..., :3]
    weights = np.array([[1.0, 0.2], [0.0, 0.7]])
    set_mode(glu, routed(["d0", "d1"], weights))
    assert indices.size >= 64
    together = glu(x, indices)
    for i in range(2):
        set_mode(glu, routed(["d0", "d1"], weights[i]))
        assert_close(together[i : i + 1], glu(x[i : i + 1], indices[i : i + 1]), 1e-5)
    set_mode(glu, routed(["d0", "d1"], weights))
    stop_telling(glu)
    assert type(glu) is kind
    with pytest.raises(ValueError, match="do not say their sequence"):
        glu(x, indices)


def freeze_with_numbers(layer: StackedLayer, place: int, output_dims: int) -> None:
    """Two frozen stacks of random numbers, domains d0 and d1."""
    from mlxstacks.layers.freezing import frozen_stack

    active = layer.active
    assert active is not None
    stacks = []
    for index in range(2):
        active.lora_b = 0.3 * normal(10 * place + index, *active.lora_b.shape)
        active.router = 0.3 * normal(20 * place + index, *active.router.shape)
        stacks.append(frozen_stack(active, StackId(f"s{index}", f"d{index}"), mx.float32))
    assert stacks[0].lora_b.shape[1] == output_dims
    layer.drop_active()
    layer.set_stacks(stacks)


def test_the_order_of_sorted_rows_is_mlx_lms() -> None:
    from mlx_lm.models.switch_layers import _gather_sort

    _, indices = switch_rows(5, 4, 6, 3)
    marked = mx.arange(24).reshape(4, 6, 1, 1, 1)
    rows, _, _ = _gather_sort(marked, indices)
    places = Rows(indices, True, expert_order(indices))
    assert mx.array_equal(rows.flatten(), places.part(24, "token"))
    assert mx.array_equal(rows.flatten() // 6, places.part(4, "sequence"))


def test_bad_weights_and_names_are_refused() -> None:
    layer = stacked("linear", [random_stack("linear", 0, domain="chat")])
    with pytest.raises(ValueError, match="'chta' is no stack or domain here; close: chat"):
        set_mode(layer, subset(["chta"]))
    with pytest.raises(ValueError, match=r"got shape \(2,\)"):
        routed(["chat"], [1.0, 2.0])
    with pytest.raises(ValueError, match="NaN"):
        routed(["chat"], [float("nan")])
    set_mode(layer, routed(["chat"], [[0.5], [1.0]]))
    with pytest.raises(ValueError, match="2 sequences"):
        layer(normal(0, 3, 4, K))
