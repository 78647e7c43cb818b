"""Tiny models and adapters of mlx-lm that several test files read; nobody changes them."""

from pathlib import Path

import pytest

from tests.tiny_models import random_adapter, write_llama, write_qwen_moe


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def moe(model_folder: Path) -> Path:
    return write_qwen_moe(model_folder / "moe", bits=4)


@pytest.fixture(scope="session")
def llama(model_folder: Path) -> Path:
    return write_llama(model_folder / "llama", bits=3)


@pytest.fixture(scope="session")
def moe_adapter(moe: Path, model_folder: Path) -> Path:
    """Every module that mlx-lm adapts, and the embedding and head."""
    keys = [
        "linear_attn.in_proj_qkv",
        "linear_attn.out_proj",
        "self_attn.q_proj",
        "mlp.gate",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert_gate",
        "mlp.switch_mlp.gate_proj",
        "mlp.switch_mlp.up_proj",
        "mlp.switch_mlp.down_proj",
        "language_model.model.embed_tokens",
        "language_model.lm_head",
    ]
    return random_adapter(moe, keys, rank=3, std=0.05, directory=model_folder / "moe-adapter")


@pytest.fixture(scope="session")
def llama_adapter(llama: Path, model_folder: Path) -> Path:
    keys = ["self_attn.q_proj", "mlp.down_proj"]
    return random_adapter(llama, keys, std=0.05, directory=model_folder / "llama-adapter")
