"""Sums of log p beside lm-evaluation-harness with transformers, item by item: make test-real.

    MLXSTACKS_REAL_MODEL=... pytest tests/real/test_eval_parity.py

Theirs are in tests/fixtures/lm_eval_scores.json.gz (lm_eval_scores.py beside it has the commands);
MLXSTACKS_PARITY_ITEMS of each task are compared, four unless it says otherwise, 200 are there.
"""

import gzip
import json
import os
from pathlib import Path

import mlx_lm
import numpy as np
import pytest

from mlxstacks.studies.benchmarks.arms import open_arms
from mlxstacks.studies.benchmarks.settings import ArmSettings
from mlxstacks.studies.benchmarks.tasks import BenchItem

FIXTURE = Path(__file__).parents[1] / "fixtures" / "lm_eval_scores.json.gz"
ROWS = json.loads(gzip.decompress(FIXTURE.read_bytes()))["items"]
COUNT = int(os.environ.get("MLXSTACKS_PARITY_ITEMS", "4"))
# Nats a token, of a float32 model of thirty layers; measured: up to 3e-4.
TOLERANCE = 5e-4


@pytest.fixture(scope="module")
def plain(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As their model was made: values in the dtype of the scales."""
    target = tmp_path_factory.mktemp("plain") / "model"
    mlx_lm.convert(str(real_model / "dense"), str(target), dequantize=True, dtype="float32")
    return target


@pytest.mark.parametrize("task", list(dict.fromkeys(row["task"] for row in ROWS)))
def test_sums_are_those_of_the_harness(task: str, plain: Path) -> None:
    rows = [row for row in ROWS if row["task"] == task][:COUNT]
    items = [
        BenchItem(str(number), row["prompt"], 0, tuple(row["candidates"]))
        for number, row in enumerate(rows)
    ]
    settings = ArmSettings(model=str(plain), base="float32", chat="none")
    arms = open_arms(["base"], settings)
    arm = next(arms)
    for row, scored in zip(rows, arm.score(items), strict=True):
        off = np.abs(np.subtract(scored.sums, row["sums"])) / scored.tokens
        assert off.max() < TOLERANCE, row["prompt"]
        assert int(np.argmax(scored.sums)) == int(np.argmax(row["sums"]))
