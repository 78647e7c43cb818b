"""`mlxstacks confound` as it is typed. Run: pytest tests/studies/confound/test_command.py"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxstacks.cli import run
from mlxstacks.recipe.file import load_recipe, recipe_names
from mlxstacks.recipe.resolve import resolve

Typed = Callable[..., tuple[int, str, str]]
RECIPES = [name for name in recipe_names() if name.startswith("confound-")]


@pytest.fixture
def typed(work_dir: Path, capfd: pytest.CaptureFixture[str]) -> Typed:
    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(arguments)
        return code, *capfd.readouterr()

    return call


def test_a_bare_plan_is_on_nano(typed: Typed, work_dir: Path) -> None:
    code, out, err = typed("confound", "--dry-run", "--json")
    plan = json.loads(out)
    assert (code, plan["status"], plan["verdict"]) == (0, "planned", ""), err
    assert plan["settings"]["scoring"] == "likelihood"
    assert {"persona", "persona_again", "a0_refit", "a1_promote"} <= set(
        plan["data"]["planned_arms"]
    )
    assert list(work_dir.iterdir()) == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_planned_from_its_text_alone(typed: Typed, work_dir: Path, name: str) -> None:
    code, out, err = typed("run", name, "--dry-run")
    assert code == 0, err
    text = " ".join(out.split())
    assert "criterion A1 - A0 of at least 5 points and p < 0.05" in text
    assert f"Planned only: would write mlxstacks-out/{name}." in text
    assert list(work_dir.iterdir()) == []


def test_the_published_settings_are_the_published_ones() -> None:
    settings = resolve(
        "confound", {}, load_recipe("confound-qwen3.5-35b-a3b")
    ).settings.model_dump()
    train = settings["train"]
    assert (train["layers"], train["keys"]) == ("8,14,20", ("down_proj",))
    assert (train["rank"], train["scale"] * train["rank"]) == (2, 2)  # alpha
    assert (train["learning_rate"], train["batch_size"], train["iters"]) == (5e-6, 1, 200)
    assert train["max_seq_length"] == 2048
    assert (settings["sample"], settings["train_share"]) == (6000, 0.7)
    assert (settings["least_gain"], settings["alpha"], settings["policies"][0]) == (
        0.05, 0.05, "refit",
    )  # fmt: skip
    assert settings["scoring"] == "generate"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "refitt"], "did you mean 'refit'?"),
        (["--set", "train.iter=5"], "did you mean 'iters'?"),
        (["--set", "train.seed=5"], "train.seed is set by the experiment"),
        (["--model", "m"], "a model of your own needs --persona, --items too"),
        (["--subjects", "physiks"], "no item of physiks; there are chat, "),
    ],
)
def test_mistakes_are_told_at_once(
    typed: Typed, work_dir: Path, arguments: list[str], message: str
) -> None:
    code, _, err = typed("confound", *arguments)
    assert (code, message in err) == (2, True), err
