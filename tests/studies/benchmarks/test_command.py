"""`mlxstacks eval` from the command line, on a tiny model with a real adapter; recipes; tables.

Run: pytest tests/studies/benchmarks/test_command.py
"""

import json
from pathlib import Path

import pytest

from mlxstacks.recipe.file import load_recipe, recipe_names
from mlxstacks.recipe.resolve import validate
from mlxstacks.studies.benchmarks.run import run
from mlxstacks.studies.benchmarks.settings import EvalSettings
from mlxstacks.studies.benchmarks.tasks import TASKS, TWELVE
from mlxstacks.study.render.console import result_text
from tests.studies.eval_cases import FakeArms, item_row, settings_for, use, write_places
from tests.studies.train_cases import WORDS, write_rows, write_tiny_model
from tests.tiny_models import random_adapter

RECIPES = [name for name in recipe_names() if name.startswith("eval-")]


def test_a_tiny_model_end_to_end(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    adapter = random_adapter(model, keys=["mlp.switch_mlp.down_proj"], std=0.1)
    rows = [
        item_row(index) | {"question": f"{index} {WORDS[index % 8]}?", "options": list(WORDS[:4])}
        for index in range(24)
    ]
    data = write_rows(tmp_path / "items.jsonl", rows)
    settings = EvalSettings(
        model=str(model), adapter_path=str(adapter), data=str(data), tasks=("items",),
        items_per_task=18,
        reference_offset=True, chat="none", save_path=str(tmp_path / "out"), save_every=7,
        requant="nearest", plots=False,
    )  # fmt: skip
    report = run(settings)
    found = report.data["tasks"]["items"]
    assert list(found["arms"]) == ["base", "adapter", "fused"]
    for one in found["arms"].values():
        assert one["n"] == 18
        assert one["mean_active_domains"] == 0
        assert 0 < one["seconds"] < (report.environment.seconds or 0)
        assert one["reference_offset"]["n"] == 18
    pairs = [(c["arm"], c["control"]) for c in found["comparisons"]]
    assert pairs == [("adapter", "base"), ("fused", "base"), ("fused", "adapter")]
    base = [
        json.loads(line)["answer"]["sums"]
        for line in (tmp_path / "out/answers/items/base.texts.jsonl").read_text().splitlines()[1:]
    ]
    other = (tmp_path / "out/answers/items/adapter.texts.jsonl").read_text().splitlines()[1:]
    assert all(value < 0 for sums in base for value in sums)
    assert base != [json.loads(line)["answer"]["sums"] for line in other]
    assert "Items, 18 of 24 items, by token" in str(report)
    assert "Verdict: " in str(report)


def test_no_table_is_wider_than_80_columns_and_the_verdict_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_places(tmp_path / "data")
    use(monkeypatch, FakeArms()).is_published_model = True
    settings = settings_for(
        data, tmp_path / "out", tasks=("items", "mmlu_pro", "gsm8k"), letters=True,
        reference_offset=True,
    )  # fmt: skip
    text = result_text(run(settings), width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    flat = " ".join(text.split())
    for words in (
        "Scores, with 95% intervals, by token", "MMLU-Pro", "old rule", "letters", "ties",
        "oracle - base", "difference shown", "Mean over tasks, each the same weight", "66.5%",
        "Published, not measured here", "replies cut at max_tokens", "shared by the run",
        "As planned",
    ):  # fmt: skip
        assert words in flat
    assert flat.rfind("Verdict: Routed - base") > flat.rfind("Published")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_settings_of_tasks_that_there_are(name: str) -> None:
    recipe = load_recipe(name)
    settings = validate(EvalSettings, recipe.values)
    assert isinstance(settings, EvalSettings)
    assert set(settings.own_tasks) <= set(TASKS)
    head = " ".join(recipe.head)
    assert all(word in head for word in ("Command:", "Memory:", "Time:", "Writes:"))
    # It plans without a model, a store or data, and says what it could not read.
    change = {"save_path": "x", "data": "nowhere"}
    if settings.model is None:  # nano's parts are filled in by the command
        change |= dict.fromkeys(("model", "adapter_path", "store_path"), "nano")
    planned = run(settings.model_copy(update=change), dry_run=True)
    assert planned.status == "planned"
    assert all(name in " ".join(planned.notes) for name in settings.own_tasks)


def test_the_published_recipe_holds_the_published_settings() -> None:
    settings = validate(EvalSettings, load_recipe("eval-published-gemma-3-12b").values)
    assert isinstance(settings, EvalSettings)
    # Of the store's base, under the name that its training expects.
    assert settings.model == load_recipe("stack-gemma-3-12b").values["model"]
    assert (settings.items_per_task, settings.sample, settings.normalisation) == (
        200,
        "first",
        "token",
    )
    assert (settings.repetition_penalty, settings.max_context_tokens) == (1.2, 512)
    assert settings.reference_offset
    assert {name for name, task in TASKS.items() if task.published} == set(settings.tasks)
    wide = validate(EvalSettings, load_recipe("eval-qwen3.5-35b-a3b").values)
    assert isinstance(wide, EvalSettings)
    assert wide.tasks == TWELVE
