"""The match of an adapter with a checkpoint: names, shapes, grids, and what is refused.

Run: pytest tests/files/test_adapter_match.py
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.errors import AdapterError, CheckpointError
from mlxstacks.files.adapters import match_adapter, read_adapter
from mlxstacks.files.checkpoint import Checkpoint, fingerprint, open_checkpoint
from mlxstacks.files.lora_modules import Adapter, LoraModule, mlx_config
from mlxstacks.files.stored_weight import stored_weight
from tests.files.adapter_cases import Q_PROJ, edited
from tests.tiny_models import random_adapter, write_llama


def test_every_module_finds_its_weight_kind_and_grid(moe: Path, moe_adapter: Path) -> None:
    matches = {
        m.module.path: m for m in match_adapter(read_adapter(moe_adapter), open_checkpoint(moe))
    }
    layer = "language_model.model.layers.0"
    down = matches[f"{layer}.mlp.switch_mlp.down_proj"]
    assert (down.kind, down.stored.bits, down.stored.group_size) == ("switch", 4, 64)
    assert down.stored.weight.name == f"{layer}.mlp.switch_mlp.down_proj.weight"
    assert down.stored.scales is not None
    assert down.stored.biases is not None
    assert down.base == "not verifiable"
    gate = matches[f"{layer}.mlp.gate"]
    assert (gate.kind, gate.stored.bits, gate.stored.group_size) == ("linear", 8, 64)
    assert matches["language_model.model.embed_tokens"].kind == "embedding"
    assert matches["language_model.lm_head"].kind == "linear"


def test_unquantized_modules_of_a_quantized_model_are_plain(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m", bits=4, unquantized=["o_proj"])
    path = random_adapter(model, ["self_attn.q_proj", "self_attn.o_proj"])
    by_path = {m.module.path: m for m in match_adapter(read_adapter(path), open_checkpoint(model))}
    q, o = by_path[Q_PROJ], by_path[Q_PROJ.replace("q_proj", "o_proj")]
    assert (q.stored.bits, q.stored.group_size) == (4, 64)
    assert (o.stored.bits, o.stored.group_size, o.stored.scales) == (None, None, None)


def test_a_narrower_adapter_does_not_make_the_weight_look_narrower(
    llama: Path, llama_adapter: Path, tmp_path: Path
) -> None:
    """A 3-bit row of 64-groups read as 6 bits would have half the input_dims."""

    def halve(tensors: dict[str, mx.array], _: dict[str, Any]) -> None:
        for name in list(tensors):
            if name.endswith("lora_a"):
                tensors[name] = tensors[name][: tensors[name].shape[0] // 2]

    checkpoint = open_checkpoint(llama)
    assert Q_PROJ not in checkpoint.config["quantization"]
    adapter = read_adapter(edited(llama_adapter, tmp_path / "a", halve))
    with pytest.raises(AdapterError, match="3 bits, group_size 64"):
        match_adapter(adapter, checkpoint)


def test_every_mismatch_is_in_one_error_with_nearest_names(
    llama: Path, llama_adapter: Path, tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, mx.array], _: dict[str, Any]) -> None:
        for leaf in ("lora_a", "lora_b"):
            tensors[f"model.layers.0.self_attn.qproj.{leaf}"] = tensors.pop(f"{Q_PROJ}.{leaf}")
        down = "model.layers.1.mlp.down_proj.lora_a"
        tensors[down] = tensors[down][:-1]

    adapter = read_adapter(edited(llama_adapter, tmp_path / "a", spoil))
    with pytest.raises(AdapterError) as error:
        match_adapter(adapter, open_checkpoint(llama))
    text = str(error.value)
    assert "2 problems" in text
    assert f"self_attn.qproj: no such module in the model; nearest: {Q_PROJ}" in text
    assert "model.layers.1.mlp.down_proj: lora_a [" in text
    assert "3 bits, group_size 64" in text


def test_adapter_of_another_model_is_refused(moe: Path, llama_adapter: Path) -> None:
    with pytest.raises(AdapterError, match=r"nearest: language_model\.model\.layers"):
        match_adapter(read_adapter(llama_adapter), open_checkpoint(moe))


def test_base_fingerprint_is_compared(llama: Path, llama_adapter: Path) -> None:
    checkpoint, adapter = open_checkpoint(llama), read_adapter(llama_adapter)

    def marked(value: str) -> Adapter:
        return replace(adapter, metadata={"mlxstacks_base_fingerprint": value})

    right = match_adapter(marked(fingerprint(checkpoint)), checkpoint)
    assert {m.base for m in right} == {"verified"}
    with pytest.raises(AdapterError, match="--allow-base"):
        match_adapter(marked("0" * 64), checkpoint)
    overridden = match_adapter(marked("0" * 64), checkpoint, allow_base=True)
    assert {m.base for m in overridden} == {"overridden"}


def with_config(checkpoint: Checkpoint, **quantization: Any) -> Checkpoint:
    merged = checkpoint.config["quantization"] | quantization
    return replace(checkpoint, config=checkpoint.config | {"quantization": merged})


def without(checkpoint: Checkpoint, name: str) -> Checkpoint:
    tensors = {k: v for k, v in checkpoint.tensors.items() if k != name}
    return replace(checkpoint, tensors=tensors)


def retyped(checkpoint: Checkpoint, name: str, dtype: str) -> Checkpoint:
    info = replace(checkpoint.tensors[name], dtype=dtype)
    return replace(checkpoint, tensors=checkpoint.tensors | {name: info})


def no_quantization(checkpoint: Checkpoint, **config: Any) -> Checkpoint:
    kept = {k: v for k, v in checkpoint.config.items() if not k.startswith("quantization")}
    return replace(checkpoint, config=kept | config)


CONTRADICTIONS: list[tuple[Callable[[Checkpoint], Checkpoint], str]] = [
    (
        lambda c: with_config(c, **{Q_PROJ: {"bits": 4, "group_size": 64}}),
        "says 4 bits.*contradict",
    ),
    (lambda c: with_config(c, **{Q_PROJ: False}), "not quantized.*scales is there"),
    (
        lambda c: with_config(c, **{Q_PROJ: {"mode": "mxfp4"}}),
        "are not mxfp4, which has 4 bits",
    ),
    (lambda c: without(c, f"{Q_PROJ}.scales"), "packed.*scales is missing"),
    (lambda c: without(c, f"{Q_PROJ}.biases"), "biases is missing"),
    (lambda c: retyped(c, f"{Q_PROJ}.biases", "F32"), "must be alike"),
    (lambda c: retyped(c, f"{Q_PROJ}.weight", "F16"), "scales is there, but the weight is F16"),
    (lambda c: retyped(c, f"{Q_PROJ}.scales", "U8"), "mxfp4 or mxfp8 or nvfp4"),
    (lambda c: no_quantization(c), "config.json has no `quantization`"),
    (
        lambda c: no_quantization(c, quantization_config={"quant_method": "fp8"}),
        "quantized as fp8.*mlx_lm.convert",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), CONTRADICTIONS)
def test_config_and_shapes_that_disagree_are_named(
    spoil: Callable[[Checkpoint], Checkpoint], message: str, llama: Path, llama_adapter: Path
) -> None:
    checkpoint = spoil(open_checkpoint(llama))
    with pytest.raises(AdapterError, match=message):
        match_adapter(read_adapter(llama_adapter), checkpoint)


@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "named"),
    [
        ("mxfp4", 4, 32, True), ("mxfp4", 4, 32, False), ("nvfp4", 4, 16, False),
        ("mxfp8", 8, 32, False),
    ],
)  # fmt: skip
def test_fp4_and_fp8_are_told_by_the_config_or_by_their_scales(
    mode: str, bits: int, group_size: int, named: bool, llama_adapter: Path, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "m", bits=None)
    tensors = mx.load(str(model / "model.safetensors"))
    assert isinstance(tensors, dict)
    weight = mx.random.normal(tensors[f"{Q_PROJ}.weight"].shape)
    packed, scales = mx.quantize(weight, group_size=group_size, bits=bits, mode=mode)
    tensors |= {f"{Q_PROJ}.weight": packed, f"{Q_PROJ}.scales": scales}
    mx.save_safetensors(str(model / "model.safetensors"), tensors)
    (model / "model.safetensors.index.json").unlink()
    config = json.loads((model / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 64}
    if named:
        config["quantization"][Q_PROJ] = {"bits": bits, "group_size": group_size, "mode": mode}
    (model / "config.json").write_text(json.dumps(config))
    found = stored_weight(open_checkpoint(model), Q_PROJ)
    assert (found.mode, found.bits, found.group_size) == (mode, bits, group_size)
    assert (found.input_dims, found.biases, found.dtype) == (weight.shape[-1], None, "BF16")
    assert match_adapter(read_adapter(llama_adapter), open_checkpoint(model))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.down_proj.qweight",
        "model.layers.0.mlp.down_proj.g_idx",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.7.up_proj.weight",
    ],
)
def test_hub_layout_that_mlx_lm_cannot_load_is_refused(
    name: str, llama_adapter: Path, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "m", extra_tensors={name: mx.zeros((4, 4))})
    with pytest.raises(CheckpointError, match=r"mlx-lm cannot load it.*parameters not in model"):
        match_adapter(read_adapter(llama_adapter), open_checkpoint(model))


def test_hub_layout_of_side_parts_is_no_reason_to_refuse(
    llama: Path, llama_adapter: Path, tmp_path: Path
) -> None:
    side = {
        "mtp.layers.0.mlp.experts.gate_up_proj": mx.zeros((2, 4, 4)),
        "vision_tower.conv1d.weight": mx.zeros((8, 1, 4)),
    }
    model = write_llama(tmp_path / "m", bits=3, extra_tensors=side)
    assert len(match_adapter(read_adapter(llama_adapter), open_checkpoint(model))) == 4


def test_square_embedding_and_linear_are_told_apart_by_name(tmp_path: Path) -> None:
    weight = mx.zeros((64, 64))
    tensors = {"model.embed_tokens.weight": weight, "model.layers.0.mlp.up_proj.weight": weight}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    (tmp_path / "config.json").write_text("{}")
    pair = np.zeros((64, 2), np.float32), np.zeros((2, 64), np.float32)
    modules = {
        n: LoraModule(n, *pair, "F32", 1.0)
        for n in ("model.embed_tokens", "model.layers.0.mlp.up_proj")
    }
    adapter = Adapter(tmp_path, mlx_config(modules), modules, {})
    kinds = [m.kind for m in match_adapter(adapter, open_checkpoint(tmp_path))]
    assert kinds == ["embedding", "linear"]
