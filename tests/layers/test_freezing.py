"""Freezing, storage and the store's way in and out. Run: pytest tests/layers/test_freezing.py"""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxstacks.layers.adapted import Dims
from mlxstacks.layers.freezing import (
    add_frozen,
    freeze_active,
    frozen_parts,
    frozen_stack,
    remove_frozen,
    stack_from_tensors,
    stack_tensors,
)
from mlxstacks.layers.moe_lora import MoELoRADelta, Rows
from mlxstacks.layers.packed import PackedStacks
from mlxstacks.layers.selection import StackId
from mlxstacks.layers.stacked import StackedLayer
from tests.layers.build import (
    K,
    N,
    assert_close,
    linear_base,
    normal,
    random_stack,
    settings_of,
    stacked,
    switch_rows,
    trained_delta,
)

FORMS = ("linear", "shared", "per_expert")


def model_of(count: int = 2) -> nn.Module:
    """Projections side by side, a trained stack at each."""
    model = nn.Module()
    model.layers = [StackedLayer(linear_base(seed)) for seed in range(count)]
    for seed, layer in enumerate(model.layers):
        layer.active = trained_delta("linear", seed)
    model.eval()
    return model


def outputs(model: nn.Module, x: mx.array) -> mx.array:
    return mx.stack([layer(x) for layer in model.layers])


@pytest.mark.parametrize("form", FORMS)
def test_a_frozen_stack_is_the_trained_one(form: str) -> None:
    """In float32 nothing but the order of sums may differ; the cast is measured apart."""
    delta = trained_delta(form)
    delta.eval()
    if form == "linear":
        x, rows = normal(0, 7, K), Rows()
    else:
        x, indices = switch_rows(0, 2, 4, 2)
        rows = Rows(indices)
    pack = PackedStacks()
    pack.replace_all([frozen_stack(delta, StackId("a", "chat"), mx.float32)])
    assert_close(pack(x, rows), delta(x, rows)[0], 1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float16, 1e-3), (mx.bfloat16, 8e-3)])
def test_freezing_changes_the_output_by_the_cast_alone(dtype: mx.Dtype, tolerance: float) -> None:
    model = model_of()
    x = normal(3, 20, 50, K)  # so many rows that some are close to a tie
    before = outputs(model, x)
    by_hand: list[mx.array] = []
    for layer in model.layers:
        cast = trained_delta("linear", len(by_hand))
        for name in ("lora_a", "lora_b"):
            cast[name] = cast[name].astype(dtype).astype(mx.float32)
        cast.eval()
        by_hand.append(layer.linear(x) + cast(x)[0])
    parts = freeze_active(model, "chat/0", "chat", dtype)
    assert {part.lora_a.dtype for part in parts.values()} == {dtype}
    assert {part.tensors()["router"].dtype for part in parts.values()} == {mx.float32}
    assert all(layer.active is None for layer in model.layers)
    after = outputs(model, x)
    assert_close(after, mx.stack(by_hand), 1e-6)
    assert_close(after, before, tolerance)
    loss = [mx.mean(y**2).item() for y in (before, after)]
    assert loss[0] == pytest.approx(loss[1], rel=tolerance)
    model.train()
    assert mx.array_equal(outputs(model, x), after)


def test_overflow_is_refused_by_name_and_nothing_is_changed() -> None:
    model = model_of()
    model.layers[1].active.lora_b = model.layers[1].active.lora_b + 1e5
    with pytest.raises(ValueError, match=r"layers.1: lora_b reaches 1e\+05.*bfloat16"):
        freeze_active(model, "chat/0", "chat")
    assert all(layer.active is not None for layer in model.layers)
    assert not any(layer.stacks.ids for layer in model.layers)
    freeze_active(model, "chat/0", "chat", mx.bfloat16)


def test_nan_is_told_apart_from_overflow() -> None:
    model = model_of()
    model.layers[0].active.router = mx.full((4, K), float("nan"))
    with pytest.raises(ValueError, match="router holds NaN or Inf before it is frozen"):
        freeze_active(model, "chat/0", "chat")


def test_freezing_needs_a_stack_and_a_free_name() -> None:
    model = model_of()
    freeze_active(model, "chat/0", "chat")
    with pytest.raises(ValueError, match="no stack is in training"):
        freeze_active(model, "chat/1", "chat")
    model.layers[0].active = trained_delta()
    with pytest.raises(ValueError, match="named chat/0 is there already"):
        freeze_active(model, "chat/0", "chat")


def test_frozen_stacks_keep_their_bytes_while_others_come_and_go() -> None:
    model = model_of()
    freeze_active(model, "chat/0", "chat")
    before = {k: np.array(v) for k, v in stack_tensors(frozen_parts(model, "chat/0")).items()}
    x = normal(1, 4, K)
    alone = outputs(model, x)
    for seed, layer in enumerate(model.layers):
        layer.active = trained_delta("linear", seed + 40)
    freeze_active(model, "code/0", "code")
    model.set_dtype(mx.bfloat16)
    after = stack_tensors(frozen_parts(model, "chat/0"))
    assert after.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(np.array(after[name]), value)
    for layer, fresh in zip(model.layers, model_of().layers, strict=True):
        layer.linear = fresh.linear
    removed = remove_frozen(model, "code/0")
    assert mx.array_equal(outputs(model, x), alone)
    add_frozen(model, removed)
    assert [i.name for i in model.layers[0].stacks.ids] == ["chat/0", "code/0"]
    with pytest.raises(ValueError, match="no frozen stack is named math"):
        remove_frozen(model, "math")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("experts", [4, 1])
def test_save_and_load_round_trip_is_bit_exact(
    form: str, dtype: mx.Dtype, experts: int, tmp_path: Path
) -> None:
    delta = trained_delta(form, num_experts=experts)
    stack = frozen_stack(delta, StackId("chat/0", "chat"), dtype)
    parts = {"layers.0.up_proj": stack, "layers.1.up_proj": stack}
    file = str(tmp_path / "stack.safetensors")
    mx.save_safetensors(file, stack_tensors(parts))
    shapes = {path: part.shape for path, part in parts.items()}
    loaded = stack_from_tensors(mx.load(file), stack.id, shapes)
    x, indices = switch_rows(0, 2, 4, 2)
    for path, part in parts.items():
        for name, array in part.tensors().items():
            assert loaded[path].tensors()[name].dtype == array.dtype
            assert mx.array_equal(loaded[path].tensors()[name], array)
    packs = [PackedStacks(), PackedStacks()]
    for pack, source in zip(packs, (parts, loaded), strict=True):
        pack.replace_all([source["layers.0.up_proj"]])
    assert mx.array_equal(packs[0](x, Rows(indices)), packs[1](x, Rows(indices)))


def test_missing_and_unknown_tensors_are_listed() -> None:
    stack = random_stack("linear")
    tensors = stack_tensors({"a.q_proj": stack})
    tensors["a.extra"] = tensors.pop("a.q_proj.router")
    with pytest.raises(ValueError, match=r"(?s)a.q_proj.router: missing.*a.extra: unexpected"):
        stack_from_tensors(tensors, stack.id, {"a.q_proj": stack.shape})


def test_parts_that_fit_no_projection_are_listed() -> None:
    model = model_of()
    narrow = MoELoRADelta(Dims(8, N, None), settings_of("linear"), mx.random.key(0))
    part = frozen_stack(narrow, StackId("a", "b"), mx.float16)
    with pytest.raises(ValueError, match=r"(?s)x.y: no projection.*layers.0: the stack maps 8 to"):
        add_frozen(model, {"x.y": part, "layers.0": part})


def test_noise_weights_are_not_kept() -> None:
    layer = stacked("linear", [random_stack("linear")])
    assert set(layer.stacks.stacks()[0].tensors()) == {"lora_a", "lora_b", "router"}
    assert layer.stacks.nbytes == 4 * 4 * (3 * (K + N) + K)
