"""`confound` and `identity` as they are typed: plans, published settings, mistakes.

Run: pytest tests/studies/test_persona_commands.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.cli import run
from mlxstacks.recipe.file import load_recipe, recipe_names
from mlxstacks.recipe.resolve import resolve

Typed = Callable[..., tuple[int, str, str]]
PLANNED = {
    "confound": ("criterion A1 - A0 of at least 5 points and p < 0.05",),
    "identity": (
        "suite's prompts 20: ", "Equal totals show no large loss, not exact preservation.",
        "gate the base passes at most 5 of 20, the persona at least 15",
    ),
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "confound": {
        "sample": 6000, "train_share": 0.7, "least_gain": 0.05, "alpha": 0.05,
        "scoring": "generate", "policies": ("refit", "nearest", "promote"),
    },
    "identity": {
        "regression_items": 6000, "train_share": 0.7, "second_rank": 8, "most_of_base": 5,
        "least_of_persona": 15, "policies": ("refit",),
    },
}  # fmt: skip


@pytest.fixture
def typed(work_dir: Path, capfd: pytest.CaptureFixture[str]) -> Typed:
    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(arguments)
        return code, *capfd.readouterr()

    return call


@pytest.mark.parametrize(
    ("command", "arms"),
    [
        ("confound", {"persona", "persona_again", "a0_refit", "a1_promote"}),
        ("identity", {"base", "identity_unfused", "identity_rerun", "zero_promote",
                      "factual_second_refit"}),
    ],
)  # fmt: skip
def test_a_bare_plan_is_on_nano(typed: Typed, work_dir: Path, command: str, arms: set[str]) -> None:
    code, out, err = typed(command, "--dry-run", "--json")
    plan = json.loads(out)
    assert (code, plan["status"], plan["verdict"]) == (0, "planned", ""), err
    assert plan["settings"]["scoring"] == "likelihood"
    assert arms <= set(plan["data"]["planned_arms"])
    assert len(plan["data"].get("suite", range(20))) == 20
    assert list(work_dir.iterdir()) == []


@pytest.mark.parametrize("command", PLANNED)
def test_a_plan_refuses_directories_that_the_run_would(
    typed: Typed, work_dir: Path, command: str
) -> None:
    (work_dir / "code").mkdir()
    (work_dir / "code" / "train.py").touch()
    card = ("--set", "persona_card.name=Q", "--set", "persona_card.maker=M")
    for model, persona, message in (
        ("code", "elsewhere", "no model (config.json)"),
        ("elsewhere", "code", "neither an adapter (adapter_config.json) nor a model (config.json)"),
        ("code/train.py", "elsewhere", "give the model's directory"),
    ):
        given = ("--model", model, "--persona", persona, "--items", "elsewhere.jsonl", *card)
        code, _, err = typed(command, *given, "--dry-run")
        assert (code, message in " ".join(err.split())) == (2, True), err
    (work_dir / "items.jsonl").write_text('{"question": "x", "options": ["a"], "answer": "A"}')
    given = ("--model", "elsewhere", "--persona", "elsewhere", "--items", "items.jsonl", *card)
    code, _, err = typed(command, *given, "--dry-run")
    assert (code, "items.jsonl, line 1: no category" in err) == (2, True), err


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.partition("-")[0] in PLANNED])
def test_a_recipe_is_planned_from_its_text_alone(typed: Typed, work_dir: Path, name: str) -> None:
    code, out, err = typed("run", name, "--dry-run")
    assert code == 0, err
    text = " ".join(out.split())
    assert all(words in text for words in PLANNED[name.partition("-")[0]])
    assert f"Planned only: would write mlxstacks-out/{name}." in text
    assert list(work_dir.iterdir()) == []


@pytest.mark.parametrize("command", PUBLISHED)
def test_the_published_settings_are_the_published_ones(command: str) -> None:
    recipe = load_recipe(f"{command}-qwen3.5-35b-a3b")
    settings = resolve(command, {}, recipe).settings.model_dump()
    train = settings["train"]
    assert (train["layers"], train["keys"]) == ("8,14,20", ("down_proj",))
    assert (train["rank"], train["scale"] * train["rank"]) == (2, 2)  # alpha
    assert (train["learning_rate"], train["batch_size"], train["iters"]) == (5e-6, 1, 200)
    assert train["max_seq_length"] == 2048
    assert {key: settings[key] for key in PUBLISHED[command]} == PUBLISHED[command]


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("confound", ["--policies", "refitt"], "did you mean 'refit'?"),
        ("confound", ["--set", "train.iter=5"], "did you mean 'train.iters'?"),
        ("confound", ["--set", "train.seed=5"], "train.seed is set by the experiment"),
        ("confound", ["--model", "m"], "a model of your own needs --persona, --items too"),
        ("confound", ["--subjects", "physiks"], "no item of physiks; there are chat, "),
        ("identity", ["--set", "train.seed=5"], "train.seed is set by the experiment"),
        ("identity", ["--persona-requant", "keep"], "is none of the policies"),
        ("identity", ["--second-rank", "2"], "--second-rank and train.rank are both 2"),
        ("identity", ["--set", "stress_iters=null"], "--stress-rank and --stress-iters go"),
        ("identity", ["--least-of-persona", "5"], "the gate would tell nothing apart"),
        ("identity", ["--suite", "default", "--dry-run"], "give persona_card.name"),
        ("identity", ["--suite", "default", "--set", "persona_card.name=Q"],
         "persona_card.maker is missing"),
        ("identity", ["--suite", "none.yaml", "--dry-run"], "give a suite as YAML, JSON or JSONL"),
    ],
)  # fmt: skip
def test_mistakes_are_told_at_once(
    typed: Typed, command: str, arguments: list[str], message: str
) -> None:
    code, _, err = typed(command, *arguments)
    assert (code, message in err) == (2, True), err
