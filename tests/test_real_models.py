"""The real-model benchmark prints what RESULTS.md quotes, and mixes no arms of other options.

Arms are written by hand: none is made. Run: pytest tests/test_real_models.py
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_models import (
    OPTIONS,
    TASKS,
    Questions,
    arm_file,
    check_options,
    finished,
    policy_tables,
)
from mlxstacks.studies.benchmarks.tasks import BenchItem
from mlxstacks.studies.confound.fuses import write_controls
from tests.tiny_models import random_adapter, write_llama

GOLDS = [0, 1, 2, 3]
TOTAL = {
    "weights": 1000, "delta_over_step": 0.0327, "survival": 0.7875, "correlation": 0.0906,
    "noise": 8.659, "codes_changed": 0.549,
}  # fmt: skip


def arm(name: str, picks: list[int], fuse: dict[str, Any] | None = None) -> dict[str, Any]:
    text = {"tokens": 7, "loss": 7.0, "kl_base": 0.7, "kl_unfused": 0.07}
    return {
        "arm": name, "fuse": fuse, "picks": dict.fromkeys(TASKS, picks), "passed": [True, False],
        "golds": dict.fromkeys(TASKS, GOLDS),
        "texts": [text | {"flips_base": 1, "flips_unfused": 2}] * 3,
    }  # fmt: skip


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_compare_with_the_base_and_the_unfused_adapter() -> None:
    rows = [
        arm("base", [0, 1, 0, 0]),
        arm("unfused", [0, 1, 2, 0]),
        arm("refit", [0, 0, 2, 3], {"total": TOTAL, "extra_bytes": 500}),
    ]
    lines = "\n".join(policy_tables(rows, 2000)).splitlines()
    head, _, base, unfused, refit, _, weights, _, columns, _, *changes = lines
    assert len(cells(head)) == len(cells(base)) == len(cells(unfused)) == len(cells(refit)) == 9
    assert "50.0% (15 to 85), 1 other" in cells(base)  # the unfused adapter's row comes later
    assert cells(refit)[:3] == ["refit", "0.091", "0.1000 (0.1000 to 0.1000)"]
    assert weights == "The base's weights are 0.0 MB."
    assert [len(cells(change)) for change in changes] == 3 * [len(cells(columns))]
    assert set(cells(changes[0])[1:]) == {""}
    figures = ["1,000", "0.033", "78.8%", "8.66", "54.9%", "0.0 (25.0%), 4.00"]
    assert cells(changes[2])[1:7] == figures
    assert cells(changes[2])[7:] == ["2 of 2, 100.0% (34.2 to 100.0); 1 of 2"] * 2
    *_, all_right = policy_tables([arm("base", GOLDS), arm("keep", GOLDS)], 1)
    assert cells(all_right)[7:] == ["0 of 0; 0 of 4"] * 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, two adapters of the first, texts."""
    directory = tmp_path_factory.mktemp("real-models")
    for name, bits in (("model", 4), ("other_model", 3)):
        write_llama(directory / name, bits=bits, tokenizer=False)
    for name, seed in (("adapter", 0), ("other_adapter", 1)):
        target = directory / name
        random_adapter(directory / "model", ["self_attn.q_proj"], seed=seed, directory=target)
    row = dict.fromkeys(("question", "answer", "text", "instruction", "input", "output"), "words")
    for name in ("gsm8k_test", "tinystories", "alpaca"):
        (directory / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    return directory


def checked(models: Path, save_path: Path, **changes: Any) -> None:
    names: dict[str, Any] = {"model": "model", "adapter_path": "adapter", "gold": 0}
    values = names | {"rows": 1, "tokens": 8, "items": 4} | changes
    golds = [values.pop("gold"), *GOLDS[1:]]
    items = [BenchItem(str(number), "", gold) for number, gold in enumerate(golds)]
    paths = {key: models / values.pop(key) for key in ("model", "adapter_path")}
    options = argparse.Namespace(**values, **paths, data=models, save_path=save_path)
    check_options(
        options, Questions(dict.fromkeys(TASKS, items), ()), finished(save_path, ["base"])
    )


OTHERS = [
    ({"model": "other_model"}, "model: "),
    ({"adapter_path": "other_adapter"}, "adapter: "),
    ({"rows": 2}, "rows: 1 there, 2 now"),
    ({"tokens": 9}, "tokens: 8 there, 9 now"),
    ({"gold": 1}, "texts and items: "),
]


@pytest.mark.parametrize(("changes", "message"), [*OTHERS, ({"items": 3}, "items: 4 there, 3 now")])
def test_arms_of_other_options_are_refused(
    models: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    checked(models, tmp_path)
    before = (tmp_path / OPTIONS).read_text()
    with pytest.raises(SystemExit, match=message):
        checked(models, tmp_path, **changes)
    checked(models, tmp_path)
    assert (tmp_path / OPTIONS).read_text() == before


@pytest.mark.parametrize(("changes", "message"), OTHERS[1:])
def test_arms_without_options_are_taken_where_all_that_they_show_agrees(
    models: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    arm_file(tmp_path, "base").write_text(json.dumps(arm("base", GOLDS)))
    with pytest.raises(SystemExit, match="adapter: unknown there"):
        checked(models, tmp_path)
    write_controls(models / "adapter", tmp_path / "zero", tmp_path / "random", seed=0)
    with pytest.raises(SystemExit, match=message):
        checked(models, tmp_path, **changes)
    assert not (tmp_path / OPTIONS).exists()
    checked(models, tmp_path)
    assert (tmp_path / OPTIONS).exists()
