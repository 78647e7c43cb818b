"""LoRA layers beside mlx-lm's own. Run: pytest tests/layers/test_lora.py"""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.layers.adapted import begin_step, projection_dims
from mlxstacks.layers.attach import attach_lora, lora_tensors
from mlxstacks.layers.lora import LoRALinear, LoRASwitchLinear, for_experts, lora_layer
from mlxstacks.layers.settings import LoRASettings, StackSettings
from mlxstacks.layers.stacked import StackedLayer
from mlxstacks.layers.targets import find_targets
from tests.layers.build import (
    K,
    M,
    N,
    assert_close,
    linear_base,
    normal,
    switch_base,
    switch_rows,
)
from tests.tiny_models import NUM_LAYERS, write_qwen_moe

SETTINGS = LoRASettings(rank=4, alpha=6.0)


def pair_of(layer: nn.Module) -> None:
    """Numbers as training might leave them."""
    layer.lora_b = 0.1 * normal(5, *layer.lora_b.shape)


def upstream_linear(base: nn.Module, ours: LoRALinear) -> nn.Module:
    from mlx_lm.tuner.lora import LoRALinear as Theirs

    theirs = Theirs.from_base(base, r=4, scale=ours.scale)
    theirs.lora_a, theirs.lora_b = ours.lora_a, ours.lora_b
    return theirs


def upstream_switch(base: nn.Module, ours: LoRASwitchLinear) -> nn.Module:
    from mlx_lm.tuner.lora import LoRASwitchLinear as Theirs

    theirs = Theirs.from_base(base, r=4, scale=ours.scale)
    theirs.lora_a, theirs.lora_b = ours.lora_a, ours.lora_b
    return theirs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 3, 4])
def test_linear_equals_mlx_lm_to_the_bit(bits: int | None, dtype: str) -> None:
    base = linear_base(0, 64, N)
    base.set_dtype(getattr(mx, dtype))
    layer_base = base if bits is None else nn.QuantizedLinear.from_linear(base, 32, bits)
    ours = LoRALinear(layer_base, SETTINGS, mx.random.key(0))
    assert (ours.input_dims, ours.output_dims) == (64, N)
    pair_of(ours)
    x = normal(3, 2, 7, 64).astype(getattr(mx, dtype))
    wanted = upstream_linear(layer_base, ours)(x)
    got = ours(x)
    assert got.dtype == wanted.dtype == x.dtype
    assert mx.array_equal(got, wanted)


@pytest.mark.parametrize("quantized", [False, True])
def test_switch_equals_mlx_lm_to_the_bit(quantized: bool) -> None:
    base = switch_base(0, 64, N)
    if quantized:
        base = base.to_quantized(group_size=32, bits=4)
    ours = LoRASwitchLinear(base, SETTINGS, mx.random.key(0))
    assert projection_dims(base) == ours.dims
    pair_of(ours)
    theirs = upstream_switch(base, ours)
    _, indices = switch_rows(3, 2, 5, 2)
    x = normal(4, 2, 5, 1, 1, 64)
    assert mx.array_equal(ours(x, indices), theirs(x, indices))
    flat = mx.sort(indices.flatten())
    rows = normal(5, flat.size, 1, 64)
    assert mx.array_equal(ours(rows, flat, True), theirs(rows, flat, True))


def test_a_new_one_changes_nothing_and_starts_as_published() -> None:
    base = linear_base()
    layer = LoRALinear(base, SETTINGS, mx.random.key(1))
    x = normal(0, 3, K)
    assert mx.array_equal(layer(x), base(x))
    assert layer.lora_a.shape == (K, 4)
    assert layer.lora_b.shape == (4, N)
    assert float(mx.max(mx.abs(layer.lora_a))) <= K**-0.5
    again = LoRALinear(base, SETTINGS, mx.random.key(1))
    assert mx.array_equal(again.lora_a, layer.lora_a)
    assert layer.weight is base.weight
    assert layer.bias is base.bias


def test_scale_rules() -> None:
    assert LoRASettings(rank=16, alpha=16.0).scale == 1.0
    assert LoRASettings(rank=16, alpha=16.0, scale_rule="rslora").scale == 4.0


@pytest.mark.parametrize("rank", [0, N + 1])
def test_rank_outside_the_smaller_dim_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        LoRALinear(linear_base(), LoRASettings(rank=rank), mx.random.key(0))


def test_the_kind_of_base_decides_the_class() -> None:
    key = mx.random.key(0)
    assert type(lora_layer(linear_base(), SETTINGS, key)) is LoRALinear
    switch = lora_layer(switch_base(), SETTINGS, key)
    assert type(switch) is LoRASwitchLinear
    assert switch.num_experts == M
    with pytest.raises(ValueError, match="cannot be adapted"):
        lora_layer(nn.RMSNorm(8), SETTINGS, key)
    with pytest.raises(ValueError, match="LoRASwitchLinear"):
        LoRALinear(switch_base(), SETTINGS, key)


def test_dropout_is_the_same_again_under_a_checkpoint() -> None:
    layer = LoRALinear(linear_base(), LoRASettings(rank=4, dropout=0.4), mx.random.key(0))
    layer.freeze()
    layer.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    pair_of(layer)
    x = normal(1, 6, K)
    with pytest.raises(ValueError, match="begin_step"):
        layer(x)

    def gradients(call: nn.Module) -> list[tuple[str, mx.array]]:
        begin_step(layer, mx.random.key(7))
        grad = nn.value_and_grad(layer, lambda x: mx.sum(call(x) ** 2))(x)[1]
        return tree_flatten(grad)

    plain, recomputed = gradients(layer), gradients(nn.utils.checkpoint(layer))
    for (name, left), (_, right) in zip(plain, recomputed, strict=True):
        assert mx.array_equal(left, right), name
    begin_step(layer, mx.random.key(8))
    changed = layer(x)
    begin_step(layer, mx.random.key(7))
    assert not mx.array_equal(changed, layer(x))
    layer.eval()
    assert mx.array_equal(layer(x), layer(x))


def test_saved_adapter_loads_in_mlx_lm_with_the_same_logits(tmp_path: Path) -> None:
    """Attention, linear attention, shared expert and routed experts, by way of the files."""
    from mlx_lm.tuner.utils import load_adapters

    where = write_qwen_moe(tmp_path / "model", bits=4)
    model, _, _ = base_model.load(where)
    targets = find_targets(model)
    attach_lora(model, targets, SETTINGS, mx.random.key(3))
    for _, layer in model.named_modules():
        if "lora_b" in layer:
            pair_of(layer)
    paths = [target.path for target in targets]
    base_model.save_adapter(
        tmp_path / "adapter", lora_tensors(model), NUM_LAYERS, 4, SETTINGS.scale, paths
    )
    tokens = mx.array([[1, 2, 3, 4, 5, 6, 7]])
    theirs = load_adapters(base_model.load(where)[0], str(tmp_path / "adapter"))
    model.eval()
    theirs.eval()
    assert mx.array_equal(model(tokens), theirs(tokens))
    plain = base_model.load(where)[0]
    assert not mx.array_equal(plain(tokens), theirs(tokens))
    saved = mx.load(str(tmp_path / "adapter" / "adapters.safetensors"))
    trainable = dict(tree_flatten(model.trainable_parameters()))
    assert saved.keys() == trainable.keys()
    np.testing.assert_equal(len(saved), 2 * len(paths))


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("bits", [None, 3, 4])
def test_fuse_is_that_of_mlx_lm_to_the_bit(bits: int | None, dequantize: bool) -> None:
    for base, kind, upstream in (
        (linear_base(0, 64, N), LoRALinear, upstream_linear),
        (switch_base(0, 64, N), LoRASwitchLinear, upstream_switch),
    ):
        layer_base = base if bits is None else base.to_quantized(group_size=32, bits=bits)
        ours = kind.from_base(layer_base, r=4, scale=6.0, key=mx.random.key(0))
        pair_of(ours)
        fused, wanted = ours.fuse(dequantize), upstream(layer_base, ours).fuse(dequantize)
        assert type(fused) is type(wanted)
        assert fused.parameters().keys() == wanted.parameters().keys()
        for (name, got), (_, theirs) in zip(
            tree_flatten(fused.parameters()), tree_flatten(wanted.parameters()), strict=True
        ):
            assert mx.array_equal(got, theirs), name
        assert not mx.array_equal(fused.weight, layer_base.weight)


@pytest.mark.parametrize("shared", ["lora_a", "lora_b"])
@pytest.mark.parametrize("bits", [None, 4])
def test_shared_half_is_as_many_equal_ones(shared: str, bits: int | None) -> None:
    """To float32 rounding in the forward pass, and to the bit when it is fused."""
    base = switch_base(0, 64, N)
    base = base if bits is None else base.to_quantized(group_size=32, bits=bits)
    ours = LoRASwitchLinear(base, SETTINGS, mx.random.key(0), shared)
    sizes = {name: len(ours[name]) for name in ("lora_a", "lora_b")}
    assert sizes == {name: 1 if name == shared else M for name in sizes}
    pair_of(ours)
    whole = LoRASwitchLinear(base, SETTINGS, mx.random.key(0))
    whole.lora_a, whole.lora_b = (for_experts(ours[name], M) for name in sizes)
    _, indices = switch_rows(3, 2, 5, 2)
    x = normal(4, 2, 5, 1, 1, 64)
    assert_close(ours(x, indices), whole(x, indices))
    for (name, got), (_, wanted) in zip(
        tree_flatten(ours.fuse().parameters()), tree_flatten(whole.fuse().parameters()), strict=True
    ):
        assert mx.array_equal(got, wanted), name


def test_from_base_takes_what_mlx_lm_takes() -> None:
    from mlx_lm.tuner.lora import LoRALinear as Theirs

    base = linear_base()
    ours, theirs = LoRALinear.from_base(base), Theirs.from_base(base)
    assert ours.scale == theirs.scale
    assert (ours.lora_a.shape, ours.lora_b.shape) == (theirs.lora_a.shape, theirs.lora_b.shape)
    assert not mx.array_equal(ours.lora_a, LoRALinear.from_base(base).lora_a)
    drawn = [LoRALinear.from_base(base, key=mx.random.key(3)).lora_a for _ in range(2)]
    assert mx.array_equal(*drawn)
    for options in ({"r": 0}, {"r": 21}, {"dropout": 1.0}):
        with pytest.raises(ValueError, match=r"rank|dropout"):
            LoRALinear.from_base(base, **options)
    with pytest.raises(ValueError, match="LoRALinear"):
        LoRASwitchLinear.from_base(base)


def test_mlx_lm_fuses_a_model_of_these_layers() -> None:
    """Its `fuse` walks over what has that method."""
    model = nn.Sequential(LoRALinear.from_base(linear_base(), r=2), StackedLayer(linear_base(1, N)))
    pair_of(model.layers[0])
    x = normal(2, 3, K)
    expected = model(x)
    base_model.fuse_lora(model)
    assert [type(layer) for layer in model.layers] == [nn.Linear, nn.Linear]
    assert mx.allclose(model(x), expected, atol=1e-5)


def test_stacks_are_not_fused() -> None:
    layer = StackedLayer.from_base(linear_base())
    assert layer.fuse() is layer.linear
    layer.add_active(StackSettings(rank=2), mx.random.key(0))
    with pytest.raises(ValueError, match="stacks export"):
        layer.fuse()
