"""`mlxstacks compare` on nano: against itself, with and without its adapter; gate, bad input.

Run: pytest tests/studies/agreement/test_run.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxstacks.agreement import TOP_K, Agreement
from mlxstacks.data import read_records
from mlxstacks.nano.exports import nano_paths
from mlxstacks.studies.agreement.run import (
    BASE,
    JUDGE,
    blocks,
    figures_of,
    in_words,
    outcome,
    verdict,
)
from mlxstacks.study.result import Result
from tests.cli.conftest import Run, command
from tests.studies.conclusions import assert_its_files_give_edits_away

__all__ = ["command"]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows.jsonl"
    lines = [{"prompt": "Who are you?"}, {"text": "A red boat."}, {"text": "1 + 1 = 2"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_the_shipped_rows_are_16_texts_and_8_prompts() -> None:
    records = read_records(JUDGE)
    assert [list(record) for record in records] == [["text"]] * 16 + [["prompt"]] * 8
    assert len({json.dumps(record) for record in records}) == 24


def test_an_adapter_shows_and_the_same_model_does_not(rows: Path, command: Run) -> None:
    model, adapter = str(nano_paths().model_path), str(nano_paths().adapter_path)
    given = ("compare", model, model, "--data", str(rows), "--answer-tokens", "4", "--no-plots")
    code, out, err = command(*given, "--save-path", "same", "--json")
    assert code == 0, err
    document = json.loads(out)
    name = Path(model).name
    assert document["outcome"] == "100.0% agree"
    figures = document["data"]["models"][name]["all"]
    assert (figures["kl_nats"], figures["agreement"], figures["loss_change_nats"]) == (0, 1, 0)

    gate = ("--fail-under-agreement", "1")
    code, out, err = command(*given, "--adapter-path", adapter, "--save-path", "two", *gate)
    assert code == 3, err
    assert f"agreement is below --fail-under-agreement 1.0: {name} " in err
    assert f"1.0: {BASE}" not in err  # the control, which is no candidate
    assert Result.open("two").shown_outcome.startswith("gate not met: ")
    assert "**Gate not met.** agreement is below" in Path("two/result.md").read_text()
    document = json.loads(Path("two/result.json").read_text())
    base, again = (document["data"]["models"][key]["all"] for key in (BASE, name))
    assert base == again  # without its adapter the reference is its base
    assert base["kl_nats"] > 0.001
    assert base["kl_nats_interval"] is None  # of three passages
    assert {row[0] for row in document["blocks"][0]["rows"]} == {BASE, name}
    assert document["data"]["top_k"] == TOP_K
    assert_its_files_give_edits_away(Path("two"), f"models.{BASE}.all.positions")


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((0.9,), "90.0% agree"),
        ((0.9, 0.8), "80.0% and 90.0% agree"),
        ((0.9, 0.8, 0.85), "80.0% (lowest of 3 models) to 90.0% agree"),
        ((0.8213, 0.8209), "82.1% agree"),
    ],
)
def test_a_range_has_two_ends_that_differ(shares: tuple[float, ...], words: str) -> None:
    figures = {str(share): {"all": {"agreement": share}} for share in shares}
    assert outcome(figures) == words


def test_what_cannot_be_compared_is_refused(rows: Path, command: Run) -> None:
    model = str(nano_paths().model_path)
    code, _, err = command("compare", model, "--save-path", "a")
    assert code == 2
    assert "mlxstacks compare MODEL OTHER" in err
    rows.write_text('{"question": "Who?"}')
    code, _, err = command("compare", model, model, "--data", str(rows), "--save-path", "a")
    assert code == 2
    assert "row 1 has 'question'" in err
    assert '{"prompt": "..."}' in err
    assert not Path("a").exists()


def test_a_missing_model_is_named_before_a_target_that_exists(command: Run, work_dir: Path) -> None:
    (work_dir / "mlxstacks-out" / "compare").mkdir(parents=True)
    (work_dir / "mlxstacks-out" / "compare" / "mine").touch()
    code, _, err = command("compare", str(nano_paths().model_path))
    assert (code, "needs a second model" in err) == (2, True)


def test_models_of_two_tokenizers_are_refused_before_anything_runs(
    rows: Path, command: Run, tmp_path: Path
) -> None:
    model = nano_paths().model_path
    other = tmp_path / "other"
    shutil.copytree(model, other)
    text = (other / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:100]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, _, err = command("compare", str(model), str(other), "--data", str(rows))
    assert (code, "compare models of one tokenizer" in err) == (2, True), err
    (other / "tokenizer.json").write_text(json.dumps(json.loads(text), indent=1))
    code, _, err = command("compare", str(model), str(other), "--data", str(rows), "--dry-run")
    assert code == 0, err


def test_no_answer_in_common_is_no_certainty() -> None:
    """Of every passage the same share: resampling them says nothing, so Wilson's interval does."""
    n = 30
    zeros = np.zeros(n, np.float32)
    passages = np.array([[6, 0], [6, 1], [6, 1], [6, 1], [6, 1]], np.int32)
    figures = figures_of(Agreement(zeros, np.zeros(n, bool), zeros, passages))["all"]
    low, high = figures["agreement_interval"]
    assert (figures["agreement"], low) == (0, 0)
    assert high == pytest.approx(0.1135, abs=1e-3)
    few = figures_of(Agreement(zeros, np.zeros(n, bool), zeros, np.array([[30, 1]], np.int32)))
    assert few["all"]["agreement_interval"] is few["all"]["kl_nats_interval"] is None
    assert in_words(few["all"]) == "the same next token in 0.0% of 30, KL 0.0000 nats per token"
    assert blocks({"other": few})


def figures_with(kl: float, low: float, high: float) -> dict[str, Any]:
    interval = {"kl_nats_interval": [low, high], "agreement_interval": [0.5, 0.6]}
    return {"all": {"kl_nats": kl, "agreement": 0.55, "positions": 100, **interval}}


def test_models_that_cannot_be_told_apart_are_not_ranked() -> None:
    """As of three fuses of one adapter: KL 1.7224 (1.59 to 1.87) twice, 1.7281 (1.60 to 1.87)."""
    same, other = figures_with(1.7224, 1.5918, 1.8700), figures_with(1.7281, 1.5968, 1.8707)
    far = figures_with(7.5, 7.0, 8.0)
    words = verdict({"b": same, "a": other, "c": same, "far": far}, "base")
    assert words.startswith("The reference is base. Closest to it by KL is b:")
    assert words.endswith("2 lie between. By KL, c, a cannot be told from b.")
    assert "cannot be told" not in verdict({"b": same, "far": far}, "base")
    assert "cannot be told" not in verdict({"b": same}, "base")
