"""The conversion of a real GGUF file: codes, ids, function, fuse. Run: make test-real"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxstacks.convert.real_model import EXPERTS, GGUF_NAME, TOP_K, is_whole
from mlxstacks.convert.run import convert
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.gguf_file import open_gguf
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from tests.convert.gguf_cases import dense_values, gguf_name, permuted
from tests.tiny_models import random_adapter

FIXTURES = Path(__file__).parents[1] / "fixtures"
TEXT = (
    "The Eiffel Tower is a wrought-iron tower in Paris, France. It is named after the engineer "
    "Gustave Eiffel, whose company designed and built the tower from 1887 to 1889. It was first "
    "criticised by some of France's leading artists, but it has become a cultural icon of France."
)


@pytest.fixture(scope="module")
def chat(dense: tuple[Any, Any]) -> list[int]:
    message = [{"role": "user", "content": "What is the capital of France?"}]
    ids: list[int] = dense[1].apply_chat_template(message, add_generation_prompt=True)
    return ids


def loss(model: nn.Module, ids: list[int]) -> float:
    """Mean negative log-likelihood of a text, nats per token."""
    logits = model(mx.array([ids[:-1]]))
    return float(nn.losses.cross_entropy(logits, mx.array([ids[1:]]), reduction="mean").item())


def test_the_cache_is_what_this_code_writes(real_model: Path, tmp_path: Path) -> None:
    """An older conversion in the cache is not taken for today's; raise VERSION where bytes change.

    Converting both from the file again takes some seconds.
    """
    assert is_whole(real_model)
    for part, number in (("dense", None), ("experts", EXPERTS)):
        settings = ConvertSettings(
            model=str(real_model / GGUF_NAME), save_path=str(tmp_path / part), upcycle=number,
            top_k=TOP_K,
        )  # fmt: skip
        convert(settings)
        for file in (real_model / part).iterdir():
            assert (tmp_path / part / file.name).read_bytes() == file.read_bytes(), file.name


def test_every_tensor_has_the_files_values_to_the_bit(real_model: Path) -> None:
    import gguf

    file = open_gguf(real_model / GGUF_NAME)
    stored = mx.load(str(real_model / "dense" / "model.safetensors"))
    values = dense_values(stored)
    assert len(values) == len(file.tensors) == 272
    for name, array in values.items():
        tensor = file.tensors[gguf_name(name)]
        kind = gguf.GGMLQuantizationType[tensor.kind]
        raw = file.read(tensor)
        if kind == gguf.GGMLQuantizationType.F32:
            raw = raw.view(np.float32)
        expected = gguf.quants.dequantize(raw, kind).reshape(tensor.shape)
        heads = 9 if "q_proj" in name else 3 if "k_proj" in name else 0
        assert np.array_equal(permuted(array, heads) if heads else array, expected), name


def test_ids_are_those_of_the_published_algorithm(dense: tuple[Any, Any]) -> None:
    """tests/fixtures/smollm2_ids.py made them without the `tokenizers` library."""
    rows = json.loads((FIXTURES / "smollm2_ids.json").read_text(encoding="utf-8"))
    assert len(rows) > 250
    for text, ids in rows:
        assert dense[1].encode(text, add_special_tokens=False) == ids, text
        assert dense[1].decode(ids) == text


def test_the_chat_is_rendered_as_the_model_learned_it(chat: list[int]) -> None:
    assert chat[:3] == [1, 9690, 198]  # <|im_start|>system\n
    assert chat.count(1) == 3
    assert chat.count(2) == 2
    assert len(chat) == 37


def test_it_answers(dense: tuple[Any, Any], chat: list[int]) -> None:
    from mlx_lm.generate import generate_step

    model, tokenizer = dense
    assert tokenizer.eos_token_ids == {2}
    answer = []
    for token, _ in generate_step(mx.array(chat), model, max_tokens=12):
        if int(token) in tokenizer.eos_token_ids:
            break
        answer.append(int(token))
    assert "Paris" in tokenizer.decode(answer)


def test_experts_compute_what_the_dense_model_computes(
    dense: tuple[Any, Any], experts: tuple[Any, Any], chat: list[int]
) -> None:
    ids = mx.array([chat])
    expected = np.array(dense[0](ids))
    logits = np.array(experts[0](ids))
    assert np.abs(expected).max() > 20
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    router = experts[0].layers[0].block_sparse_moe.gate
    gates = np.array(router(mx.random.normal((64, 576), key=mx.random.key(0))))
    assert len(set(gates.argmax(-1).tolist())) == 4


def test_heads_in_the_files_order_are_a_broken_model(dense: tuple[Any, Any]) -> None:
    """The control of the order of q and k rows: without it the loss is far above."""
    model, tokenizer = dense
    ids = tokenizer.encode(TEXT)
    right = loss(model, ids)
    assert right < 3.0
    weights = [
        (module, part, getattr(module, part))
        for layer in model.layers
        for module in (layer.self_attn.q_proj, layer.self_attn.k_proj)
        for part in ("weight", "scales", "biases")
    ]
    try:
        for module, part, array in weights:
            heads = 9 if array.shape[0] == 576 else 3
            setattr(module, part, mx.array(permuted(np.array(array), heads)))
        assert loss(model, ids) > right + 1.0
    finally:
        for module, part, array in weights:
            setattr(module, part, array)


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_keep_fuse_of_nothing_changes_no_byte(
    name: str, real_model: Path, tmp_path: Path
) -> None:
    model = real_model / name
    adapter = random_adapter(model, rank=2, num_layers=3, directory=tmp_path / "adapter")
    settings = FuseSettings(
        model=str(model), adapter_path=(str(adapter),), save_path=str(tmp_path / "fused"),
        requant="keep", zero_delta=True,
    )  # fmt: skip
    report = fuse(settings)
    assert len(report.stages[0].modules) >= 3 * 7
    before, after = (
        open_checkpoint(path).tensors["model.layers.29.self_attn.o_proj.weight"].file
        for path in (model, tmp_path / "fused")
    )
    assert before.read_bytes() == after.read_bytes()


def test_the_command_line_says_what_it_did(real_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlxstacks", "convert", str(real_model / GGUF_NAME)]
    command += ["--save-path", str(tmp_path / "out"), "--dry-run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["status"] == "planned"
    report = result["data"]
    assert not (tmp_path / "out").exists()
    kinds = {row["kind"]: (row["tensors"], row["stored"]) for row in report["tensors"]}
    assert kinds == {
        "Q4_1": (210, "4 bits in groups of 32, the same codes"),
        "Q8_0": (1, "8 bits in groups of 32, the same codes"),
        "F32": (61, "float16"),
    }
    assert report["written_bytes"] == 98_275_968
