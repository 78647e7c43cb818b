"""Task files: which are run, which are refused, and where their data is looked for.
Run: pytest tests/studies/benchmarks/harness/test_tasks.py
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mlxstacks.errors import InputError
from mlxstacks.studies.benchmarks.harness import SHIPPED, TaskFile, find_tasks, task_files
from tests.studies.train_cases import write_rows

GOOD: dict[str, Any] = {
    "task": "mine", "dataset_path": "json", "output_type": "multiple_choice",
    "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}}, "test_split": "test",
    "doc_to_text": "{{My_question}}", "doc_to_choice": "options", "doc_to_target": "gold",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip


def read_task_file(name: str, directory: Path | None = None) -> TaskFile:
    (task,) = find_tasks([name], directory)
    assert isinstance(task, TaskFile)
    return task


def write_task(directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "mine.yaml").write_text(yaml.safe_dump(GOOD | changes))
    return directory


def test_every_shipped_file_may_be_run() -> None:
    names = task_files()
    assert {
        "hellaswag_local", "arc_easy_local", "arc_challenge_local", "truthfulqa_mc1_local",
        "gsm8k_local", "medqa_local", "medmcqa_local",
    } == set(names)  # fmt: skip
    for name, path in names.items():
        assert path.parent == SHIPPED
        assert path.stem == name
        assert read_task_file(name).files["test"]


def test_ones_own_file_is_read_with_its_data(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    directory = write_task(tmp_path / "tasks")
    write_rows(
        tmp_path / "rows.jsonl", [{"My question": "q", "options": ["a", "b"], "gold": 1}] * 2
    )
    file = read_task_file("mine", directory)
    task = file.build(tmp_path)
    assert task.doc_to_text(task.eval_docs[0]) == "q"
    assert task.doc_to_target(task.eval_docs[1]) == 1
    with pytest.raises(InputError, match=r"rows\.jsonl: no such file; mine\.yaml reads it"):
        file.read_rows(tmp_path / "tasks")
    wrong = write_task(tmp_path / "wrong", doc_to_text="{{nothing}}")
    file = read_task_file("mine", wrong)
    with pytest.raises(InputError, match="'nothing' is undefined"):
        file.build(tmp_path)
    odd = write_task(tmp_path / "odd", metric_list=[{"metric": "bleurt"}])
    file = read_task_file("mine", odd)
    with pytest.raises(InputError, match="metric 'bleurt' is none of lm_eval's"):
        file.build(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unsafe_code": True}, "unsafe_code: it runs code that a model wrote"),
        ({"class": "thing"}, "class: it is Python"),
        ({"process_docs": "utils.f"}, "process_docs: it runs Python"),
        ({"include": "other.yaml"}, "include: it includes"),
        ({"dataset_path": "Rowan/hellaswag"}, "only json, from local files"),
        (
            {"dataset_kwargs": {"data_files": {"test": "a"}, "trust_remote_code": True}},
            "trust_remote_code: only data_files",
        ),
        ({"dataset_kwargs": {}}, "data_files needs a file for each split"),
        ({"test_split": "dev"}, "data_files needs a file for each split in use"),
        ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "none of the hub"),
        ({"repeats": 4}, "repeats: answers are greedy"),
        ({"docs_to_text": "x"}, "docs_to_text: not a key"),
    ],
)
def test_what_runs_code_or_downloads_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    directory = write_task(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        read_task_file("mine", directory)


def test_python_functions_and_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: mine\nprocess_docs: !function utils.f\n")
    with pytest.raises(InputError, match="!function runs Python from a file next to it"):
        read_task_file("mine", tmp_path)
    (tmp_path / "mine.yaml").write_text("- a list\n")
    with pytest.raises(InputError, match="holds no keys"):
        read_task_file("mine", tmp_path)
    (tmp_path / "mine.yaml").write_text("group: many\n")
    with pytest.raises(InputError, match="task is None"):
        read_task_file("mine", tmp_path)
    with pytest.raises(InputError, match="no directory of task files"):
        read_task_file("mine", tmp_path / "none")
    with pytest.raises(InputError, match="did you mean 'arc_easy_local'"):
        read_task_file("arc_easy_loca")
