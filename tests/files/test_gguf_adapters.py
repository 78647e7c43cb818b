"""llama.cpp's LoRA format: read back with the `gguf` package, laid on GGUF weights, round trips.

Run: pytest tests/files/test_gguf_adapters.py
"""

import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import AdapterError, TargetError
from mlxstacks.files.adapter_commands import convert_adapter, zero_adapter_command
from mlxstacks.files.adapters import load_any_adapter, match_adapter, read_adapter
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.gguf_adapters import _float32_alpha, read_gguf, write_gguf
from mlxstacks.files.lora_modules import FINGERPRINT_KEY, Adapter, LoraModule, mlx_config
from mlxstacks.files.settings import AdapterConvertSettings, AdapterZeroSettings
from mlxstacks.ops.affine import to_storage
from tests.convert import gguf_cases
from tests.files.peft_cases import assert_same, delta_of
from tests.tiny_models import random_adapter, write_model, write_qwen_moe

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
KEYS = {
    "llama": [*ATTENTION, "mlp.down_proj", "model.embed_tokens", "lm_head"],
    "mixtral": ["self_attn.q_proj", "block_sparse_moe.switch_mlp.gate_proj",
                "block_sparse_moe.gate"],
    "qwen3moe": ["self_attn.k_proj", *(f"mlp.switch_mlp.{n}_proj" for n in ("gate", "up", "down"))],
}  # fmt: skip
HYBRID = [
    *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")),
    "linear_attn.out_proj", "self_attn.q_proj", "mlp.gate", "mlp.shared_expert.up_proj",
    "mlp.shared_expert_gate", "mlp.switch_mlp.down_proj", "language_model.lm_head",
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Model and adapter of each architecture."""
    where = tmp_path_factory.mktemp("gguf")
    made = {}
    for name, keys in KEYS.items():
        model = write_model(
            where / name, gguf_cases.config_of(name), bits=None, group_size=64, shards=1,
            tokenizer=False,
        )  # fmt: skip
        made[name] = (
            model,
            random_adapter(model, keys, rank=3, std=0.05, directory=where / f"{name}-adapter"),
        )
    hybrid = write_qwen_moe(where / "hybrid", tokenizer=False)
    made["qwen35moe"] = (
        hybrid, random_adapter(hybrid, HYBRID, rank=3, std=0.05, directory=where / "hybrid-adapter")
    )  # fmt: skip
    return made


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", [*KEYS, "qwen35moe"])
def test_file_reads_back_to_the_bit(
    name: str, models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    model, adapter = models[name]
    settings = {"to": "gguf", "model": str(model), "adapter_path": str(adapter)}
    written = convert_adapter(AdapterConvertSettings(save_path=str(tmp_path / "out"), **settings))
    assert (written.source_format, written.format) == ("mlx", "gguf")
    file = tmp_path / "out" / "adapter.gguf"
    assert written.weight_bytes == file.stat().st_size
    checkpoint = open_checkpoint(model)
    for path in (tmp_path / "out", file):
        again = load_any_adapter(path, model=checkpoint)
        assert_same(again, read_adapter(adapter))
        match_adapter(again, checkpoint)
    fields = gguf.GGUFReader(file).fields
    architecture = "llama" if name == "mixtral" else name
    assert fields["general.architecture"].contents() == architecture
    assert fields["general.type"].contents() == "adapter"
    assert fields["adapter.type"].contents() == "lora"
    scale = next(iter(read_adapter(adapter).modules.values())).scale
    assert fields["adapter.lora.alpha"].contents() == np.float32(3 * scale)
    back = AdapterConvertSettings(
        to="mlx", model=str(model), adapter_path=str(file), save_path=str(tmp_path / "back")
    )
    convert_adapter(back)
    assert_same(read_adapter(tmp_path / "back"), read_adapter(adapter))


def test_a_conversion_holds_one_module_at_a_time(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """Fourteen modules of 3 to 8 MB."""
    model, adapter = models["llama"][0], tmp_path / "wide"
    random_adapter(model, rank=4096, directory=adapter)
    settings = AdapterConvertSettings(
        to="gguf", model=str(model), adapter_path=str(adapter), save_path=str(tmp_path / "out")
    )
    most = max(m.lora_a.nbytes + m.lora_b.nbytes for m in read_adapter(adapter).modules.values())
    tracemalloc.start()
    try:
        written = convert_adapter(settings)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * most < written.weight_bytes / 3


def test_a_streamed_adapter_holds_one_module_at_a_time(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """And gives the modules of one in memory, and is refused where its file has changed."""
    model, adapter = models["llama"][0], tmp_path / "wide"
    checkpoint = open_checkpoint(model)
    random_adapter(model, rank=4096, directory=adapter)
    write_gguf(read_adapter(adapter), tmp_path / "out", checkpoint)
    whole, sizes = load_any_adapter(tmp_path / "out", model=checkpoint), list[int]()
    tracemalloc.start()
    try:
        streamed = load_any_adapter(tmp_path / "out", model=checkpoint, stream=True)
        for match in match_adapter(streamed, checkpoint):
            sizes.append(match.module.lora_a.nbytes + match.module.lora_b.nbytes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * max(sizes) < sum(sizes) / 3
    assert_same(streamed, whole)
    assert streamed.config == whole.config
    file = tmp_path / "out" / "adapter.gguf"
    shutil.copyfile(file, tmp_path / "new")
    (tmp_path / "new").replace(file)
    with pytest.raises(AdapterError, match=r"adapter\.gguf: was changed"):
        streamed.modules[next(iter(streamed.modules))]


def test_a_disk_that_becomes_full_leaves_nothing(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy's error, by which the writer of `gguf` tells it, has no errno."""

    def full(self: gguf.GGUFWriter, tensor: np.ndarray) -> None:
        raise OSError("8192 requested and 488 written")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    model, adapter = models["llama"]
    with pytest.raises(TargetError, match="488 written: the disk is full"):
        write_gguf(read_adapter(adapter), tmp_path / "out", open_checkpoint(model))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", KEYS)
def test_delta_is_that_of_the_model_as_a_gguf_file(
    name: str, models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """W + alpha / rank * B A of the files is the GGUF file of mlx-lm's merged weights."""
    model, source = models[name]
    adapter, config = read_adapter(source), gguf_cases.config_of(name)
    write_gguf(adapter, tmp_path / "out", open_checkpoint(model))
    lora = tensors_of(tmp_path / "out" / "adapter.gguf")
    plain = gguf_cases.random_tensors(config)
    merged = {k: v.astype(np.float64) for k, v in plain.items()}
    for path, module in adapter.modules.items():
        merged[f"{path}.weight"] = merged[f"{path}.weight"] + delta_of(module)
    files = [
        tensors_of(gguf_cases.write_gguf(tmp_path / f"{n}.gguf", config,
                   {k: v.astype(np.float32) for k, v in tensors.items()}))
        for n, tensors in (("plain", plain), ("merged", merged))
    ]  # fmt: skip
    scale = next(iter(adapter.modules.values())).scale
    touched = 0
    for tensor, before in files[0].items():
        expected = files[1][tensor] - before.astype(np.float64)
        delta = np.zeros_like(expected)
        if f"{tensor}.lora_a" in lora:
            a, b = (lora[f"{tensor}.lora_{half}"].astype(np.float64) for half in "ab")
            # llama.cpp gathers rows of the embedding's lora_a
            delta = scale * (a @ b.T if tensor == "token_embd.weight" else b @ a)
            touched += 1
        np.testing.assert_allclose(delta, expected, atol=1e-6)
    assert touched == len(lora) // 2 == len(adapter.modules)


def test_value_heads_of_linear_attention_are_tiled(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """2 key heads of 2 value heads each, 32 wide: GGUF's head r * 2 + k is head k * 2 + r here."""
    model, source = models["qwen35moe"]
    adapter = read_adapter(source)
    write_gguf(adapter, tmp_path / "out", open_checkpoint(model))
    lora = tensors_of(tmp_path / "out" / "adapter.gguf")
    block = "language_model.model.layers.0.linear_attn"
    names = {"in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_a": "ssm_alpha",
             "in_proj_b": "ssm_beta", "out_proj": "ssm_out"}  # fmt: skip
    for part, name in names.items():
        module = adapter.modules[f"{block}.{part}"]
        a, b = (lora[f"blk.0.{name}.weight.lora_{half}"] for half in "ab")
        width = 1 if part[-2:] in ("_a", "_b") else 32
        start = 128 if part == "in_proj_qkv" else 0
        ours, theirs = module.lora_b.T, b
        if part == "out_proj":
            assert np.array_equal(b, module.lora_b.T)
            ours, theirs = module.lora_a, a.T
        assert np.array_equal(theirs[:start], ours[:start])
        for key_head in range(2):
            for number in range(2):
                to = start + (number * 2 + key_head) * width
                of = start + (key_head * 2 + number) * width
                assert np.array_equal(theirs[to : to + width], ours[of : of + width])


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_stays(
    dtype: str, models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    model, source = models["qwen3moe"]
    modules = {
        path: replace(module, lora_a=to_storage(module.lora_a, dtype),
                      lora_b=to_storage(module.lora_b, dtype), dtype=dtype)
        for path, module in read_adapter(source).modules.items()
    }  # fmt: skip
    config = mlx_config(modules, "some/base", "mlxstacks1:abc")
    adapter = Adapter(source, config, modules, {})
    write_gguf(adapter, tmp_path / "out", open_checkpoint(model))
    again = read_gguf(tmp_path / "out" / "adapter.gguf", open_checkpoint(model))
    assert_same(again, adapter)
    assert (again.config["model"], again.base_fingerprint) == ("some/base", config[FINGERPRINT_KEY])
    settings = AdapterZeroSettings(
        adapter_path=str(tmp_path / "out"), save_path=str(tmp_path / "zero"), model=str(model)
    )
    zero_adapter_command(settings)
    zero = read_gguf(tmp_path / "zero" / "adapter.gguf", open_checkpoint(model))
    assert zero.modules.keys() == modules.keys()
    assert not any(m.lora_a.any() or m.lora_b.any() for m in zero.modules.values())


def test_quantized_adapter_is_read_by_its_values(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """llama.cpp writes Q8_0 where it is asked to (rows of 32)."""
    kind = gguf.GGMLQuantizationType.Q8_0
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((32, 128), (128, 32)))
    stored = [gguf.quants.quantize(half, kind) for half in (a, b)]
    name = "blk.0.attn_v.weight"
    file = write_file(
        tmp_path / "q.gguf", {f"{name}.lora_{h}": x for h, x in zip("ab", stored, strict=True)},
        kind=kind,
    )  # fmt: skip
    (module,) = read_gguf(file, open_checkpoint(models["llama"][0])).modules.values()
    values = [gguf.quants.dequantize(half, kind) for half in stored]
    assert np.array_equal(module.lora_a, values[0].T)
    assert np.array_equal(module.lora_b, values[1].T)
    assert (module.dtype, module.scale) == ("F32", 0.5)


@given(
    st.integers(1, 256),
    st.floats(2.0**-20, 2.0**20, width=32) | st.sampled_from([0.1, 1.4, 2.0 / 3, 20.0]),
)
def test_alpha_gives_the_scale_again(rank: int, scale: float) -> None:
    quotient = np.float32(_float32_alpha(scale, rank)) / np.float32(rank)
    assert abs(float(quotient) - scale) <= 2.0**-23 * scale
    if rank & (rank - 1) == 0:
        assert quotient == np.float32(scale)


def write_file(
    path: Path,
    tensors: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType | None = None,
    **fields: Any,
) -> Path:
    keys: dict[str, Any] = {"architecture": "llama", "general": "adapter", "adapter": "lora"}
    keys["alpha"] = 16.0
    keys |= fields
    writer = gguf.GGUFWriter(path, keys["architecture"])
    writer.add_string("general.type", keys["general"])
    writer.add_string("adapter.type", keys["adapter"])
    writer.add_float32("adapter.lora.alpha", keys["alpha"])
    if "tokens" in keys:
        writer.add_array("adapter.alora.invocation_tokens", keys["tokens"])
    for name, array in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GOOD = {"blk.0.attn_v.weight.lora_a": np.ones((2, 128), np.float32),
        "blk.0.attn_v.weight.lora_b": np.ones((64, 2), np.float32)}  # fmt: skip
A, B = GOOD.values()


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        (GOOD, {"general": "model"}, r"general.type 'model'.*`mlxstacks convert`"),
        (GOOD, {"adapter": "control"}, "adapter.type 'control'"),
        (GOOD, {"architecture": "qwen2"}, "architecture 'qwen2'; .* is 'llama' to llama.cpp"),
        (GOOD, {"tokens": [1, 2]}, "activated LoRA"),
        (GOOD, {"alpha": float("inf")}, "adapter.lora.alpha is inf"),
        ({}, {}, "holds no LoRA tensors"),
        ({"blk.0.attn_norm.weight": B[:, 0]}, {}, "blk.0.attn_norm.weight: not a LoRA tensor"),
        ({"blk.0.attn_v.weight.lora_a": A}, {}, "attn_v.weight.lora_b: missing"),
        ({"blk.9.attn_v.weight.lora_a": A, "blk.9.attn_v.weight.lora_b": B}, {},
         "blk.9.attn_v.weight: no such tensor in"),
        (GOOD | {"blk.0.attn_v.weight.lora_b": B[:, :1]}, {}, r"expected \(R, K\) and \(N, R\)"),
        (GOOD | {"blk.0.attn_v.weight.lora_a": A * np.nan}, {}, r"NaN or Inf at index \[0, 0\]"),
        ({"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": B[:63]}, {},
         "63 rows are no 4 heads"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(
    tensors: dict[str, np.ndarray], fields: dict[str, Any], message: str,
    models: dict[str, tuple[Path, Path]], tmp_path: Path,
) -> None:  # fmt: skip
    file = write_file(tmp_path / "a.gguf", tensors, **fields)
    with pytest.raises(AdapterError, match=message):
        load_any_adapter(file, model=open_checkpoint(models["llama"][0]))


def test_what_cannot_be_written_is_said(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    model, source = models["llama"]
    adapter, checkpoint = read_adapter(source), open_checkpoint(model)
    with pytest.raises(AdapterError, match=r"give the MLX model .* with --model"):
        write_gguf(adapter, tmp_path / "out", None)
    other = replace(checkpoint, config={**checkpoint.config, "model_type": "falcon"})
    with pytest.raises(AdapterError, match=r"model_type 'falcon'; .* known for llama, .*peft"):
        write_gguf(adapter, tmp_path / "out", other)
    for key in ("num_attention_heads", "num_hidden_layers"):
        config = {k: v for k, v in checkpoint.config.items() if k != key}
        with pytest.raises(AdapterError, match=f"config.json: {key} is None"):
            write_gguf(adapter, tmp_path / "out", replace(checkpoint, config=config))
    stranger = {"x": LoraModule("x", A.T, B.T, "F32", 1.0)}
    with pytest.raises(AdapterError, match="x: llama has no tensor for it"):
        write_gguf(Adapter(source, {}, stranger, {}), tmp_path / "out", checkpoint)
    still = {p: replace(m, scale=0.0) for p, m in adapter.modules.items()}
    with pytest.raises(AdapterError, match=r"scale is 0, which llama.cpp takes as 1"):
        write_gguf(replace(adapter, modules=still), tmp_path / "out", checkpoint)
    tied = replace(
        checkpoint, tensors={n: t for n, t in checkpoint.tensors.items() if "lm_head" not in n}
    )
    embedding = {p: m for p, m in adapter.modules.items() if "embed" in p}
    with pytest.raises(AdapterError, match="the embedding is the head too"):
        write_gguf(replace(adapter, modules=embedding), tmp_path / "out", tied)
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}.gguf", GOOD)
    with pytest.raises(AdapterError, match=r"2 GGUF files; give one of them: a.gguf, b.gguf"):
        load_any_adapter(tmp_path, model=checkpoint)
    assert not (tmp_path / "out").exists()


def test_settings_name_what_goes_together() -> None:
    for to, experts in (("gguf", "stacked"), ("mlx", "per_expert")):
        with pytest.raises(ValueError, match=f"experts={experts} does not go with to={to}"):
            AdapterConvertSettings(to=to, experts=experts)
