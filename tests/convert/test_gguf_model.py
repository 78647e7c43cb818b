"""GGUF files of every architecture as mlx-lm models: names, order of heads, config, widths.

Judge: the model that the file was written from, in mlx-lm's own classes.
Run: pytest tests/convert/test_gguf_model.py
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.convert.run import convert
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.errors import CheckpointError, InputError
from tests.convert.gguf_cases import (
    config_of,
    dense_values,
    gguf_name,
    permuted,
    random_tensors,
    write_gguf,
)

ARCHITECTURES = ("llama", "mixtral", "qwen2", "qwen3", "qwen3moe")
Made = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Writes a GGUF file and converts it: (directory, its config)."""

    def make(
        config: dict[str, Any], tensors: dict[str, np.ndarray], kinds: Any = None, **more: Any
    ) -> tuple[Path, dict[str, Any]]:
        options = more.pop("options", {})
        file = write_gguf(
            tmp_path / "m.gguf", config, tensors, kinds or (lambda name, array: "F32"), **more
        )
        out = tmp_path / "out"
        convert(ConvertSettings(model=str(file), save_path=str(out), force=True, **options))
        return out, json.loads((out / "config.json").read_text())

    return make


def _tensors(directory: Path) -> dict[str, mx.array]:
    loaded: dict[str, mx.array] = mx.load(str(directory / "model.safetensors"))
    return loaded


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), *((name, False) for name in ARCHITECTURES)]
)
def test_a_float_file_becomes_the_model_it_was_made_of(
    architecture: str, tied: bool, made: Made
) -> None:
    from mlx_lm import load

    config = config_of(architecture, tied)
    tensors = random_tensors(config)
    out, written = made(config, tensors)
    values = dense_values(_tensors(out))
    assert values.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert np.array_equal(values[name], expected), name
    for key in config.keys() - {"architectures", "eos_token_id"}:
        if key in written or key not in ("head_dim", "intermediate_size"):
            assert written[key] == config[key], key
    assert written["eos_token_id"] == 257
    model, tokenizer = load(str(out))
    logits = model(mx.array([[1, 2, 3]]))
    assert logits.shape == (1, 3, 320)
    assert tokenizer.decode(tokenizer.encode("cab")) == "cab"


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("qwen3moe", "Q4_1"), *(("llama", kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))],
)
def test_a_quantized_file_keeps_its_values_to_the_bit(
    kind: str, architecture: str, made: Made
) -> None:
    """Attention, experts and embedding; other widths than the commonest stand in the config."""
    import gguf

    config = config_of(architecture)
    tensors = random_tensors(config)

    def kinds(name: str, array: np.ndarray) -> str:
        if array.ndim == 1 or name.endswith("gate.weight"):
            return "F32"
        return "Q8_0" if name.startswith(("model.embed", "lm_head")) else kind

    out, written = made(config, tensors, kinds)
    values = dense_values(_tensors(out))
    for name, array in tensors.items():
        quantization = gguf.GGMLQuantizationType[kinds(name, array)]
        expected = gguf.quants.dequantize(gguf.quants.quantize(array, quantization), quantization)
        assert np.array_equal(values[name], expected), name
    bits = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}[kind]
    assert written["quantization"]["bits"] == bits
    assert written["quantization"]["group_size"] == 32
    if bits != 8:
        assert written["quantization"]["lm_head"] == {"group_size": 32, "bits": 8}
    from mlx_lm.utils import load_model

    model, _ = load_model(out)
    assert model.model.embed_tokens.bits == 8
    assert model.layers[1].self_attn.q_proj.bits == bits


def test_heads_in_the_wrong_order_would_be_seen(made: Made) -> None:
    """The control of the tests above: the order that llama.cpp stores is another one."""
    config = config_of("llama")
    tensors = random_tensors(config)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(permuted(tensors[name], 4), tensors[name])
    out, _ = made({**config, "model_type": "qwen3"}, random_tensors(config_of("qwen3")))
    stored = dense_values(_tensors(out))[name]
    assert np.array_equal(stored, random_tensors(config_of("qwen3"))[name])


def test_other_kinds_are_values_and_the_report_says_so(made: Made) -> None:
    config = config_of("llama")
    tensors = random_tensors(config)
    out, written = made(config, tensors, lambda name, array: "BF16" if array.ndim > 1 else "F32")
    stored = _tensors(out)
    assert stored["lm_head.weight"].dtype == mx.bfloat16
    # values of float16 that bfloat16 cannot hold
    assert stored["model.norm.weight"].dtype == mx.float32
    report = json.loads((out / "result.json").read_text())
    assert "5 tensors hold values that are none of bfloat16" in report["notes"][0]
    assert "quantization" not in written


def test_dtype_rounds_what_is_no_code(made: Made) -> None:
    config = config_of("llama")
    tensors = {name: array + np.float32(1e-4) for name, array in random_tensors(config).items()}
    kinds = lambda name, array: "Q8_0" if array.ndim > 1 else "F32"  # noqa: E731
    out, _ = made(config, tensors, kinds)
    assert _tensors(out)["model.norm.weight"].dtype == mx.float32
    out, _ = made(config, tensors, kinds, options={"dtype": "float16"})
    expected = mx.array(tensors["model.norm.weight"]).astype(mx.float16)
    assert mx.array_equal(_tensors(out)["model.norm.weight"], expected)
    with pytest.raises(InputError, match="scales are float16"):
        made(config, tensors, kinds, options={"dtype": "bfloat16"})


def test_bits_quantize_what_has_no_grid_as_mlx_does(made: Made) -> None:
    config = config_of("llama")
    tensors = random_tensors(config)
    kinds = lambda name, array: "Q8_0" if "down_proj" in name else "F32"  # noqa: E731
    options = {
        "bits": 4,
        "module_bits": (
            "*.v_proj=6",
            "lm_head=none",
            "*.0.mlp.down_proj=8",
            "*.1.mlp.down_proj=none",
        ),
    }
    out, written = made(config, tensors, kinds, options=options)
    stored = _tensors(out)
    for module, bits in (("self_attn.o_proj", 4), ("self_attn.v_proj", 6)):
        name = f"model.layers.1.{module}"
        values = mx.array(tensors[f"{name}.weight"]).astype(mx.float16)
        expected = mx.quantize(values, 64, bits, stream=mx.cpu)
        for part, array in zip(("weight", "scales", "biases"), expected, strict=True):
            assert mx.array_equal(stored[f"{name}.{part}"], array), (name, part)
    assert written["quantization"]["bits"] == 4
    assert written["quantization"]["model.layers.0.mlp.down_proj"] == {"group_size": 32, "bits": 8}
    assert "lm_head.scales" not in stored
    assert "model.layers.1.mlp.down_proj.scales" not in stored
    with pytest.raises(InputError, match="no module of this model matches"):
        made(config, tensors, kinds, options={"module_bits": ("*.q_prj=6",)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "--bits 3: 16 tensors (Q4_1) would keep .* without --bits 3 to .*'*=3'"),
        ({"bits": 4, "group_size": 64}, "--bits 4 --group-size 64: .*'*=4' --group-size 32."),
        (
            {"group_size": 64},
            "--group-size 64: .* without --group-size 64 to .*'*=4' --group-size 32.",
        ),
        ({"bits": 3, "group_size": 128}, "--bits 3 --group-size 128: .*'*=3' --group-size 32."),
        ({"module_bits": ("*=3",)}, "--module-bits: 2 tensors .*--group-size 32."),
    ],
)
def test_codes_that_stay_are_refused_where_others_were_asked_for(
    options: dict[str, Any], message: str, made: Made
) -> None:
    config = {**config_of("llama"), "intermediate_size": 96}
    kinds = lambda name, array: "Q4_1" if array.ndim > 1 else "F32"  # noqa: E731
    with pytest.raises(InputError, match=re.escape(message).replace(r"\.\*", ".*")):
        made(config, random_tensors(config), kinds, options=options)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_codes_are_rounded_once_more_as_the_refusal_says(architecture: str, made: Made) -> None:
    config = config_of(architecture)
    tensors = random_tensors(config)
    is_code = lambda name, array: array.ndim > 1 and not name.endswith("gate.weight")  # noqa: E731
    kinds = lambda name, array: "Q4_1" if is_code(name, array) else "F32"  # noqa: E731
    with pytest.raises(InputError) as refused:
        made(config, tensors, kinds, options={"bits": 3})
    patterns = tuple(re.findall(r"--module-bits '(.*?)'", str(refused.value)))
    assert ("*.gate=none" in patterns) == (architecture == "qwen3moe")
    _, written = made(config, tensors, kinds, options={"bits": 3, "module_bits": patterns})
    assert written["quantization"] == {"group_size": 64, "bits": 3, "mode": "affine"}
    _, written = made(config, tensors, kinds, options={"bits": 4})
    assert written["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 256,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        ),
    ],
)
def test_rope_scaling_is_carried_over(
    extra: dict[str, Any], expected: dict[str, Any] | None, made: Made
) -> None:
    config = config_of("llama")
    _, written = made(config, random_tensors(config), extra=extra)
    assert written.get("rope_scaling") == expected


def test_llama_3s_rope_is_recognized_by_its_divisors(made: Made) -> None:
    """Judge: the frequencies of mlx-lm's own class for the published settings of Llama 3.2."""
    from mlx_lm.models.rope_utils import Llama3RoPE

    settings = {
        "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    rope = Llama3RoPE(32, base=500000.0, scaling_config=settings)
    plain = 500000.0 ** (np.arange(0, 32, 2) / 32)
    divisors = (np.array(rope._freqs) / plain).astype(np.float32)
    config = {**config_of("llama"), "rope_theta": 500000.0}
    tensors = random_tensors(config)
    _, written = made(config, tensors, more_tensors={"rope_freqs.weight": divisors})
    assert written["rope_scaling"] == {"rope_type": "llama3", **settings}
    divisors[3] *= 1.5
    with pytest.raises(CheckpointError, match="not Llama 3's scaling"):
        made(config, tensors, more_tensors={"rope_freqs.weight": divisors})


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("llama", {"extra": {"general.architecture": "gemma9"}}, "architecture 'gemma9'; known"),
        ("llama", {"without": ("llama.block_count",)}, "llama.block_count is missing"),
        ("llama", {"extra": {"llama.block_count": 3}}, "9 tensors are missing: blk.2"),
        ("llama", {"extra": {"llama.block_count": 1}}, "'blk.1.attn_q.weight' belongs to no"),
        ("llama", {"extra": {"llama.block_count": 2**31 - 1}}, "block_count is 2,147,483,647"),
        ("llama", {"extra": {"llama.rope.freq_base": "x"}}, "a float is needed"),
        ("llama", {"extra": {"llama.rope.freq_base": -1.0}}, "a number above 0 is needed"),
        (
            "llama",
            {"extra": {"llama.attention.head_count": 1000},
             "without": ("llama.attention.key_length", "llama.attention.value_length")},
            "heads of 0",
        ),
        ("llama", {"extra": {"llama.attention.head_count_kv": 3}}, "do not fit the keys of llama"),
        ("llama", {"extra": {"llama.feed_forward_length": 8}}, "do not fit the keys of llama"),
        ("llama", {"extra": {"tokenizer.ggml.pre": "new"}}, "tokenizer.ggml.pre is 'new'"),
        ("llama", {"extra": {"llama.attention.sliding_window": 8}}, "sliding_window: not known"),
        ("llama", {"extra": {"llama.embedding_length": 64}}, "rows of 128"),
        ("llama", {"extra": {"llama.attention.head_count": [4, 4]}}, "one whole number is needed"),
        ("llama", {"extra": {"llama.rope.scaling.type": "longrope"}}, "rope scaling 'longrope'"),
        ("llama", {"extra": {"llama.rope.dimension_count": 16}}, "heads of 32, but llama.rope"),
        ("qwen2", {"extra": {"qwen2.attention.key_length": 64}}, "heads of 64"),
        (
            "qwen3moe",
            {"extra": {"qwen3moe.rope.scaling.type": "yarn", "qwen3moe.rope.scaling.factor": 4.0,
                       "qwen3moe.rope.scaling.original_context_length": 256}},
            "qwen3_moe would ignore",
        ),
        (
            "llama",
            {"more_tensors": {"blk.0.attn_q.bias": np.zeros(128, np.float32)}},
            "no biases as in this file",
        ),
        (
            "llama",
            {"more_tensors": {"blk.0.new.weight": np.zeros(128, np.float32)}},
            "'blk.0.new.weight' belongs to no llama",
        ),
        (
            "llama",
            {"more_tensors": {"rope_freqs.weight": np.zeros(16, np.float32)}},
            "rope_freqs.weight holds divisors that are not above 0",
        ),
        (
            "qwen3moe", {"extra": {"qwen3moe.expert_used_count": 5}},
            "expert_used_count is 5, and there are 4",
        ),
        (
            "llama",
            {"extra": {"tokenizer.ggml.tokens": [chr(1000 + n) for n in range(321)]}},
            "321 tokens, but token_embd.weight has only 320 rows",
        ),
        (
            "llama",
            {"extra": {"tokenizer.ggml.tokens": ["a" * 1_000_000]}},
            "a token of 1,000,000 letters",
        ),
    ],
)  # fmt: skip
def test_what_mlx_lm_cannot_compute_is_refused(
    architecture: str, change: dict[str, Any], message: str, made: Made, tmp_path: Path
) -> None:
    config = config_of(architecture)
    with pytest.raises(CheckpointError) as error:
        made(config, random_tensors(config), **change)
    assert message in str(error.value)
    assert "m.gguf" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_an_embedding_without_rows_is_refused(made: Made) -> None:
    config = config_of("llama")
    tensors = random_tensors(config)
    name = "model.embed_tokens.weight"
    with pytest.raises(CheckpointError, match="rows of no numbers"):
        made(config, {**tensors, name: tensors[name].reshape(-1)})


def test_a_tie_of_dtypes_is_the_first_in_the_file(made: Made) -> None:
    """The order of a set would depend on the hash seed of the process."""
    config = config_of("llama")
    tensors = random_tensors(config)
    matrices = [name for name, array in tensors.items() if array.ndim > 1]
    order = ["F16", "BF16"] * (len(matrices) // 2)
    for first, expected in (("F16", "float16"), ("BF16", "bfloat16")):
        kinds = dict(zip(matrices, order if first == "F16" else order[::-1], strict=True))
        out, _ = made(config, tensors, lambda name, _, kinds=kinds: kinds.get(name, "F32"))
        assert str(_tensors(out)[matrices[0]].dtype).endswith(expected)


def test_names_of_the_cases_are_llama_cpps() -> None:
    """Judge: the gguf package's own map of names."""
    import gguf

    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name in random_tensors(config_of("llama")):
        assert f"{known.get_name(name.removesuffix('.weight'))}.weight" == gguf_name(name)
