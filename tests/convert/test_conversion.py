"""A dense model and its mixture of equal experts are one function.

Run: pytest tests/convert/test_conversion.py
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.convert.conversion import shards_of, stored_conversion, upcycled, write
from mlxstacks.convert.run import convert
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.errors import CheckpointError, InputError
from tests.convert.gguf_cases import config_of, random_tensors, write_gguf
from tests.tiny_models import llama_config, write_llama, write_model

IDS = mx.array([[5, 6, 7, 8, 9]])


def logits_of(directory: Path) -> np.ndarray:
    from mlx_lm.utils import load_model

    model, _ = load_model(directory)
    model.set_dtype(mx.float32)
    return np.array(model(IDS))


def run(model: Path, out: Path, **options: Any) -> Path:
    convert(ConvertSettings(model=str(model), save_path=str(out), **options))
    return out


@pytest.mark.parametrize(
    ("bits", "tied", "experts", "top_k"),
    [(None, False, 2, 1), (4, True, 4, 2), (4, False, 3, 3), (None, True, 3, 3)],
)
def test_the_function_is_unchanged(
    bits: int | None, tied: bool, experts: int, top_k: int, tmp_path: Path
) -> None:
    overrides = {"down_proj": {"bits": 6}}
    dense = write_llama(tmp_path / "dense", bits=bits, tied=tied, overrides=overrides)
    out = run(dense, tmp_path / "moe", upcycle=experts, top_k=top_k)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "mixtral"
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (experts, top_k)
    expected = logits_of(dense)
    assert np.abs(logits_of(out) - expected).max() < 2e-5 * np.abs(expected).max()
    stored, source = (mx.load(str(directory / "model.safetensors")) for directory in (out, dense))
    for name in ("weight", *(["scales", "biases"] if bits else [])):
        one = source[f"model.layers.1.mlp.down_proj.{name}"]
        many = stored[f"model.layers.1.block_sparse_moe.switch_mlp.down_proj.{name}"]
        assert many.dtype == one.dtype
        assert all(mx.array_equal(expert, one) for expert in many)
        assert len(many) == experts


def test_routers_differ_by_layer_and_follow_the_seed(tmp_path: Path) -> None:
    dense = write_llama(tmp_path / "dense")

    def gates(name: str, seed: int) -> list[mx.array]:
        out = run(dense, tmp_path / name, upcycle=4, seed=seed)
        tensors = mx.load(str(out / "model.safetensors"))
        return [tensors[f"model.layers.{n}.block_sparse_moe.gate.weight"] for n in range(2)]

    first, again, other = gates("a", 0), gates("b", 0), gates("c", 1)
    assert first[0].dtype == mx.bfloat16
    assert mx.array_equal(first[0], again[0])
    assert not mx.array_equal(first[0], other[0])
    assert not mx.array_equal(first[0], first[1])


def test_a_gguf_file_becomes_experts_at_once(tmp_path: Path) -> None:
    """In one step or by way of the dense directory: the same bytes."""
    config = config_of("llama")
    tensors = random_tensors(config)
    file = write_gguf(
        tmp_path / "m.gguf", config, tensors, lambda _, array: "F32" if array.ndim == 1 else "Q5_1"
    )
    once = run(file, tmp_path / "once", upcycle=2)
    twice = run(run(file, tmp_path / "dense"), tmp_path / "twice", upcycle=2)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (once / name).read_bytes() == (twice / name).read_bytes(), name


def test_one_copy_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """Chunks are bounded by the source's tensors whatever the number of experts."""
    dense = stored_conversion(write_llama(tmp_path / "dense"))
    largest = max(len(bytes(chunk)) for part in dense.parts for _, chunk in part.chunks())
    experts = upcycled(dense, 64, 2, seed=0)
    for part in experts.parts:
        for _, chunk in part.chunks():
            assert len(bytes(chunk)) <= max(largest, 64 * 128 * 2)
    assert experts.nbytes > 20 * dense.nbytes


def test_shards_are_split_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_of, "__defaults__", (40_000,))
    dense = write_llama(tmp_path / "dense", shards=3)
    (tmp_path / "out").mkdir()
    conversion = stored_conversion(dense)
    files = write(conversion, tmp_path / "out")
    assert len(files) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file["file"] for file in files}
    assert np.array_equal(logits_of(tmp_path / "out"), logits_of(dense))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "model_type 'qwen3'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True, "rope_traditional": True}, "mlp_bias, rope_traditional"),
        ({"head_dim": 64}, "head_dim that is not"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"num_hidden_layers": None}, "mlx-lm cannot load it"),
        ({"head_dim": 64, "hidden_size": "x"}, "hidden_size is 'x'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_what_mixtral_would_compute_otherwise_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    dense = write_llama(tmp_path / "dense", bits=None)
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError) as error:
        run(dense, tmp_path / "moe", upcycle=2)
    assert message in str(error.value)
    assert not (tmp_path / "moe").exists()


def test_a_mixture_is_not_upcycled_again(tmp_path: Path) -> None:
    dense = write_model(
        tmp_path / "dense", llama_config(), bits=None, group_size=64, shards=1, dtype="float16"
    )
    moe = run(dense, tmp_path / "moe", upcycle=2)
    with pytest.raises(CheckpointError, match="model_type 'mixtral'"):
        run(moe, tmp_path / "again", upcycle=2)
    with pytest.raises(InputError, match="nothing to do"):
        run(dense, tmp_path / "same")
