"""What a command reads. Run: pytest tests/recipe/test_inputs.py"""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.data import TrainDataSettings
from mlxstacks.recipe import config_plan as inputs
from mlxstacks.recipe.config_plan import Input, inputs_of
from mlxstacks.studies.benchmarks.settings import EvalSettings
from mlxstacks.training.settings import TrainSettings

ARC = ("arc_easy", "arc_challenge")


@pytest.mark.parametrize("here", ["", "ARC-Easy", "ARC-Challenge", "ARC-Easy ARC-Challenge"])
def test_a_data_set_of_two_tasks_is_here_where_both_their_parts_are(
    monkeypatch: pytest.MonkeyPatch, here: str
) -> None:
    monkeypatch.setattr(inputs, "_is_data_set_here", lambda dataset, name, split: name in here)
    for tasks in (ARC, ARC[::-1]):
        (found,) = inputs_of("eval", EvalSettings(tasks=tasks))
        assert (found.key, found.path, found.here) == ("data", "allenai/ai2_arc", " " in here)
        assert ("hf download --repo-type dataset allenai/ai2_arc" in found.words) == (
            not found.here
        )


def test_rows_to_train_on_are_listed_as_they_are_read(work_dir: Path) -> None:
    for name in ("mlx/train.jsonl", "mlx/valid.jsonl", "parts/train-0.jsonl", "a.jsonl"):
        (work_dir / name).parent.mkdir(exist_ok=True)
        (work_dir / name).write_text('{"text": "a"}\n')

    def data_of(data: Any) -> list[Input]:
        return [i for i in inputs_of("train", TrainSettings(data=data)) if i.key == "data"]

    mlx = [
        Input("data", f"mlx/{part}.jsonl", True, 1, part == "train") for part in ("train", "valid")
    ]
    assert data_of("mlx") == mlx
    assert data_of("a.jsonl") == [Input("data", "a.jsonl", True, 1)]
    (work_dir / "long.jsonl").write_text('{"text": "' + "a" * 5_000_000 + '"}\n')
    tracemalloc.start()
    assert data_of("long.jsonl") == [Input("data", "long.jsonl", True, 1)]
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()
    assert data_of("parts") == [Input("data", "parts", True)]
    assert data_of("gone.jsonl") == [Input("data", "gone.jsonl", False)]
    assert data_of("owner/set") == [Input("data", "owner/set", False)]
    assert [(i.path, i.here, i.needed) for i in data_of("gone")] == [
        ("gone/train.jsonl", False, True),
        ("gone/valid.jsonl", False, False),
    ]
    several = TrainDataSettings.model_validate({"sources": ["a.jsonl", "mlx"]})
    assert data_of(several) == [Input("data", "a.jsonl", True, 1), *mlx]


def test_a_run_that_grades_again_reads_no_benchmark(tmp_path: Path) -> None:
    settings = EvalSettings(tasks=ARC, regrade=str(tmp_path))
    assert [one.key for one in inputs_of("eval", settings)] == []
