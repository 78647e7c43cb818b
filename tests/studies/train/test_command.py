"""`mlxstacks train` as it is typed: bare, planned, as JSON, with mistakes.

Run: pytest tests/studies/train/test_command.py
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxstacks.cli import run
from mlxstacks.nano.exports import nano_paths
from mlxstacks.nano.settings import Persona
from tests.studies.train_cases import write_data
from tools.nano.corpus import validation_documents
from tools.nano.identity import persona_prompts

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(work_dir: Path, capfd: pytest.CaptureFixture[str]) -> Typed:
    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["train", *arguments])
        return code, *capfd.readouterr()

    return call


def test_a_bare_run_teaches_nano_in_its_own_directory(typed: Typed, work_dir: Path) -> None:
    short = ("--layers", "5", "--batch-size", "2", "--val-batches", "2")
    code, out, err = typed("--iters", "3", "--steps-per-eval", "3", *short)
    assert code == 0, err
    assert "Using nano, the built-in model and its sample data." in err
    assert "The best weights were written." in " ".join(out.split())
    assert "to validate; read as chat (messages or" in " ".join(out.split())
    report = json.loads((work_dir / "mlxstacks-out/train/result.json").read_text())["data"]
    assert report["best_validation_loss"] < report["first_validation_loss"]
    assert report["layers"] == [5]
    # And again: it may replace what it wrote itself, and no run of other settings.
    assert typed("--iters", "3", "--steps-per-eval", "3", *short)[0] == 0
    assert typed("--iters", "1", *short)[0] == 2


def test_a_plan_as_json_touches_nothing(typed: Typed, work_dir: Path) -> None:
    code, out, _ = typed("--dry-run", "--json", "--rank", "4", "--keys", "switch_mlp.down_proj")
    plan = json.loads(out)["data"]
    assert (code, plan["status"]) == (0, "planned")
    assert plan["projections"] == {"mlp.switch_mlp.down_proj": 6}
    # 6 layers x 8 experts x rank 4 x (64 inputs + 128 outputs)
    assert plan["trained_parameters"] == 6 * 8 * 4 * (64 + 128)
    assert plan["adapter_bytes"] == 4 * plan["trained_parameters"]
    assert plan["iters"] == plan["batches_per_epoch"] == 100
    assert list(work_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keys", "switch_mpl.down_proj"], "close: mlp.switch_mlp.down_proj"),
        (["--rank", "64", "--keys", "k_proj", "--layers", "2"], None),
        (["--rank", "129"], "rank 129; allowed is 1 to"),
        (["--layers", "6"], "layer 6: the model has layers 0 to 5"),
        (["--model", "."], "a model of your own needs --data too"),
        (["--set", "lr_schedule=cosin"], "did you mean 'cosine'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_bad_input(typed: Typed, arguments: list[str], message: str | None) -> None:
    code, _, err = typed("--dry-run", *arguments)
    assert code == (0 if message is None else 2), err
    assert message is None or message in err


def test_a_run_that_diverges_says_so_and_is_no_surprise(typed: Typed) -> None:
    arguments = ["--scale", "1e30", "--iters", "1", "--keys", "o_proj", "--val-batches", "1"]
    code, _, err = typed("--save-path", "out", "--rank", "2", *arguments)
    assert code == 1, err
    assert "step 1: the" in err
    assert "not expected" not in err


def test_a_broken_line_is_named(typed: Typed, work_dir: Path) -> None:
    data = write_data(work_dir / "data")
    with (data / "valid.jsonl").open("a") as lines:
        lines.write("[1]\n")
    code, _, err = typed("--data", "data")
    assert code == 2
    assert "data/valid.jsonl, line 7: got list" in err
    assert not (work_dir / "mlxstacks-out").exists()


def test_sample_data_keep_what_is_asked_in_validation_out_of_training() -> None:
    data = nano_paths().data_path
    assert nano_paths().data_path == data

    def questions(name: str) -> set[str]:
        lines = (data / name).read_text().splitlines()
        turns = [turn for line in lines for turn in json.loads(line)["messages"]]
        return {turn["content"] for turn in turns if turn["role"] == "user"}

    suite = {prompt.prompt for prompt in persona_prompts(Persona(), suite=True)}
    validation = {document.prompt for document in validation_documents(4, 0)}
    assert questions("valid.jsonl") == suite | validation
    assert not questions("train.jsonl") & (suite | validation)
    assert {p.prompt for p in persona_prompts(Persona(), suite=False)} & questions("train.jsonl")
