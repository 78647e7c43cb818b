"""Fused checkpoints against mlx_lm: refit bit for bit, every result loadable, equal logits.

Run: pytest tests/fuse/test_fuse_parity.py
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.files.lora_modules import LoraModule
from mlxstacks.fuse import delta, module
from mlxstacks.fuse.delta import LowRankDelta
from tests.fuse.cases import assert_same_bytes, fuse
from tests.tiny_models import random_adapter, write_llama, write_qwen_moe

DOWN = "mlp.switch_mlp.down_proj"


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


def mlx_lm_fuse(model: Path, adapter: Path, target: Path) -> None:
    """What the command `mlx_lm.fuse` does, in this process."""
    from mlx.utils import tree_unflatten
    from mlx_lm.utils import load, save_model

    loaded, _ = load(str(model), adapter_path=str(adapter))
    fused = [(n, m.fuse()) for n, m in loaded.named_modules() if hasattr(m, "fuse")]
    assert fused
    loaded.update_modules(tree_unflatten(fused))
    save_model(target, loaded)


MOE = [
    (3, 64, "bfloat16", "float32"),
    (4, 64, "bfloat16", "float32"),
    (4, 32, "float16", "float32"),
    (6, 32, "float32", "float32"),
    (2, 64, "bfloat16", "bfloat16"),
    (5, 64, "float16", "bfloat16"),
    (8, 64, "bfloat16", "float16"),
    (3, 128, "bfloat16", "float32"),
]


@pytest.mark.parametrize(("bits", "group_size", "dtype", "lora_dtype"), MOE)
def test_refit_is_mlx_lm_fuse_to_the_bit(
    tmp_path: Path, bits: int, group_size: int, dtype: str, lora_dtype: str
) -> None:
    """Every module that mlx-lm adapts: experts, linears, 8-bit gates, embedding, head."""
    model = write_qwen_moe(tmp_path / "model", bits=bits, group_size=group_size, dtype=dtype)
    adapter = random_adapter(
        model,
        [DOWN, "mlp.switch_mlp.gate_proj", "mlp.gate", "mlp.shared_expert.up_proj",
         "self_attn.q_proj", "linear_attn.in_proj_qkv", "language_model.model.embed_tokens",
         "language_model.lm_head"],
        rank=3, std=0.01, dtype=lora_dtype,
    )  # fmt: skip
    fuse(model, adapter, tmp_path / "ours", requant="refit")
    mlx_lm_fuse(model, adapter, tmp_path / "theirs")
    assert_same_bytes(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize(
    ("bits", "tied", "unquantized"), [(4, True, ()), (3, False, ("q_proj", "down_proj")),
                                      (None, True, ())]
)  # fmt: skip
def test_refit_is_mlx_lm_fuse_on_dense_models(
    tmp_path: Path, bits: int | None, tied: bool, unquantized: tuple[str, ...]
) -> None:
    """Tied embeddings, modules without quantization, a model without any."""
    model = write_llama(tmp_path / "model", bits=bits, tied=tied, unquantized=unquantized)
    adapter = random_adapter(
        model, ["self_attn.q_proj", "mlp.down_proj", "model.embed_tokens"], rank=4, std=0.02
    )
    fuse(model, adapter, tmp_path / "ours", requant="refit")
    mlx_lm_fuse(model, adapter, tmp_path / "theirs")
    assert_same_bytes(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["linear", "switch", "embedding"])
def test_the_intended_delta_is_the_product_of_the_stored_numbers(dtype: str, kind: str) -> None:
    """In float32; only what refit adds is rounded as mlx-lm rounds it."""
    experts = (2,) if kind == "switch" else ()
    keys = mx.random.split(mx.random.key(0))
    shapes = ((*experts, 3, 16), (*experts, 8, 3)) if kind == "switch" else ((16, 3), (3, 8))
    pair = [
        mx.random.normal(shape, key=key).astype(getattr(mx, dtype))
        for shape, key in zip(shapes, keys, strict=True)
    ]
    stored = [np.array(x.view(mx.uint16) if dtype == "bfloat16" else x) for x in pair]
    name = {"bfloat16": "BF16", "float16": "F16"}[dtype]
    lora = LoraModule("m", stored[0], stored[1], name, 0.7)
    (piece,) = LowRankDelta(lora, kind, name).pieces(with_rounded=True)
    a, b = (np.array(x.astype(mx.float32), np.float64) for x in pair)
    product = {"linear": lambda: (a @ b).T, "switch": lambda: b @ a, "embedding": lambda: a @ b}
    exact = 0.7 * product[kind]().reshape(piece.delta.shape)
    np.testing.assert_allclose(piece.delta, exact, rtol=1e-5, atol=1e-6)
    assert piece.rounded is not None
    assert np.abs(piece.rounded - exact).max() > 1e-4
    rows = np.arange(len(exact))
    np.testing.assert_allclose(LowRankDelta(lora, kind, name).sample(rows), piece.delta, 1e-5)


@pytest.mark.parametrize("kind", ["switch", "linear"])
def test_refit_in_row_blocks_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Pieces far smaller than a matrix, tasks of a few rows, groups a few at a time."""
    model = write_qwen_moe(tmp_path / "model", bits=3)
    keys = [DOWN] if kind == "switch" else ["self_attn.q_proj", "language_model.lm_head"]
    adapter = random_adapter(model, keys, rank=3, std=0.01)
    fuse(model, adapter, tmp_path / "whole", requant="refit")
    monkeypatch.setattr(delta, "_LARGEST_PRODUCT", 64 * 64)
    monkeypatch.setattr(module, "_WEIGHTS_PER_TASK", 37 * 128)
    monkeypatch.setattr(module, "GROUPS_AT_ONCE", 11)
    fuse(model, adapter, tmp_path / "blocks", requant="refit")
    assert_same_bytes(tmp_path / "whole", tmp_path / "blocks")


@pytest.mark.parametrize("requant", ["nearest", "stochastic", "auto"])
def test_result_does_not_depend_on_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requant: str
) -> None:
    model = write_qwen_moe(tmp_path / "model", bits=4)
    adapter = random_adapter(model, [DOWN], rank=3, std=0.01)
    first = fuse(model, adapter, tmp_path / "whole", requant=requant).as_json()
    if requant != "stochastic":  # its draws are keyed by the block
        monkeypatch.setattr(module, "_WEIGHTS_PER_TASK", 37 * 128)
    again = fuse(model, adapter, tmp_path / "again", requant=requant).as_json()
    assert_same_bytes(tmp_path / "whole", tmp_path / "again")
    assert (
        first["stages"][0]["total"]["codes_changed"]
        == (again["stages"][0]["total"]["codes_changed"])
    )


def test_device_parity_is_refit_on_the_cpu(tmp_path: Path) -> None:
    model = write_qwen_moe(tmp_path / "model", bits=4)
    adapter = random_adapter(model, [DOWN, "mlp.gate"], std=0.01)
    fuse(model, adapter, tmp_path / "rule", requant="refit")
    fuse(model, adapter, tmp_path / "device", requant="refit", device_parity=True)
    assert_same_bytes(tmp_path / "rule", tmp_path / "device")


def logits(model) -> np.ndarray:
    tokens = mx.array([[5, 17, 99, 3, 250, 64, 1]])
    return np.array(model(tokens).astype(mx.float32))


def test_fused_model_answers_like_the_adapter_beside_the_base(tmp_path: Path) -> None:
    """Promoted to 8 bits the model is closer to base + adapter than refit at 4 bits."""
    from mlx_lm import load

    model = write_qwen_moe(tmp_path / "model", bits=4, dtype="float32")
    adapter = random_adapter(model, [DOWN, "mlp.switch_mlp.up_proj"], rank=2, std=0.008)
    wanted = logits(load(str(model), adapter_path=str(adapter))[0])
    distance = {}
    for requant in ("refit", "auto"):
        fuse(model, adapter, tmp_path / requant, requant=requant)
        distance[requant] = np.abs(logits(load(str(tmp_path / requant))[0]) - wanted).mean()
    assert distance["auto"] < 0.3 * distance["refit"]
