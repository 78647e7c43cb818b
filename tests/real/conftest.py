"""The real model for the tests of this folder, which skip without it: `make test-real` has it.

Arithmetic is in float32: MLX's CPU backend takes minutes for float16.
"""

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

DIRECTORY = os.environ.get("MLXSTACKS_REAL_MODEL", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.real)
            if not DIRECTORY:
                item.add_marker(pytest.mark.skip(reason="no real model; `make test-real` has it"))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """`dense`, `experts` and the GGUF file that both were made of."""
    return Path(DIRECTORY)


def load_float32(directory: Path) -> tuple[Any, Any]:
    """Model and tokenizer as `mlx_lm.load` gives them, computing in float32."""
    from mlx_lm import load

    model, tokenizer = load(str(directory))
    model.set_dtype(mx.float32)
    return model, tokenizer


@pytest.fixture(scope="session")
def dense(real_model: Path) -> tuple[Any, Any]:
    return load_float32(real_model / "dense")


@pytest.fixture(scope="session")
def experts(real_model: Path) -> tuple[Any, Any]:
    return load_float32(real_model / "experts")
