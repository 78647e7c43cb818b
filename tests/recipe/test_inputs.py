"""What a command reads. Run: pytest tests/recipe/test_inputs.py"""

from pathlib import Path

import pytest

from mlxstacks.experiments.benchmarks.settings import EvalSettings
from mlxstacks.recipe import inputs
from mlxstacks.recipe.inputs import Input, inputs_of

ARC = ("arc_easy", "arc_challenge")


@pytest.mark.parametrize("here", ["", "ARC-Easy", "ARC-Challenge", "ARC-Easy ARC-Challenge"])
def test_a_data_set_of_two_tasks_is_here_where_both_their_parts_are(
    monkeypatch: pytest.MonkeyPatch, here: str
) -> None:
    monkeypatch.setattr(inputs, "_is_data_set_here", lambda dataset, name, split: name in here)
    for tasks in (ARC, ARC[::-1]):
        (found,) = inputs_of("eval", EvalSettings(tasks=tasks))
        assert found == Input("data", "allenai/ai2_arc", " " in here)


def test_a_run_that_grades_again_reads_no_benchmark(tmp_path: Path) -> None:
    settings = EvalSettings(tasks=ARC, regrade=str(tmp_path))
    assert [one.key for one in inputs_of("eval", settings)] == []
