"""Rows of one batch, each with its own capability blocks: what a row is answered alone.

Run: pytest tests/serve/test_blocks.py
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxstacks import base_model
from mlxstacks.errors import InputError, ResourceLimitError
from mlxstacks.layers.blocks import block_arrays
from mlxstacks.routing.generation import Prompt
from mlxstacks.serve.pool import StackPool
from mlxstacks.serve.rows import RoutedRows
from mlxstacks.training.initial import set_initial_weights
from tests.layers.test_blocks import CONFIG, a_block, a_store
from tests.serve.serve_cases import Job, write

TEXTS = {"short": (1, 5, 9), "long": (7, 7, 3, 30, 4, 8, 15, 16, 23, 2, 11)}


def opened(path: Path, budget_bytes: int | None = None) -> Any:
    """As `serve_cases.Nano`; a text stands for its tokens."""
    model = base_model.build_model(CONFIG)
    set_initial_weights(model, 0)
    pool = StackPool(model, a_store(path), config=CONFIG, budget_bytes=budget_bytes)
    tokenizer = SimpleNamespace(eos_token_ids={39})
    return SimpleNamespace(
        base=SimpleNamespace(model=model, tokenizer=tokenizer), pool=pool,
        forward=RoutedRows(model, pool),
        prompt=lambda text: Prompt(TEXTS[text], len(TEXTS[text]) - 1),
    )  # fmt: skip


def test_rows_are_answered_as_alone(tmp_path: Path) -> None:
    tiny = opened(tmp_path / "store")
    jobs = [
        Job("short", {"a": 1.0}), Job("long", {}), Job("long", {"a": 0.4}, joins=2),
        Job("short", {}, joins=4), Job("short", {"a": 1.0}, leaves=3),
    ]  # fmt: skip
    for job, row in zip(jobs, write(tiny, jobs), strict=True):
        (single,) = write(tiny, [Job(job.text, job.weights)])
        model = base_model.build_model(CONFIG)
        set_initial_weights(model, 0)
        expected = model(mx.array([TEXTS[job.text]]))[0, -1]
        is_base = mx.allclose(row.logprobs[0], expected - mx.logsumexp(expected), atol=1e-4)
        assert is_base.item() == (not job.weights)
        assert row.tokens == single.tokens[: len(row.tokens)]
        for mine, alone in zip(row.logprobs, single.logprobs, strict=False):
            assert mx.allclose(mine, alone, atol=1e-4)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    tiny = opened(tmp_path / "store", budget_bytes=60_000)
    assert tiny.pool.names == ("a",)
    assert tiny.pool.nbytes >= sum(a.nbytes for a in block_arrays(a_block(1)).values())
    assert tiny.pool.hold({"a": 0.5}).weights == {"a": 0.5}
    with pytest.raises(ResourceLimitError, match="does not fit into memory now"):
        tiny.pool.hold({"a": 0.5}, reserved_bytes=60_000)
    with pytest.raises(InputError, match="the budget is 1000; raise the budget, or disable"):
        opened(tmp_path / "again", budget_bytes=1000)
    with pytest.raises(InputError, match="nothing named 'b' is served"):
        tiny.pool.hold({"b": 1.0})
    with pytest.raises(InputError, match="next to a store of capability blocks"):
        tiny.pool.add_adapter("adapter", None, None, False)
