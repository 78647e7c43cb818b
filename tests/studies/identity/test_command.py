"""`mlxstacks identity` as it is typed. Run: pytest tests/studies/identity/test_command.py"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.cli import run
from mlxstacks.recipe.file import load_recipe, recipe_names
from mlxstacks.recipe.resolve import resolve
from mlxstacks.studies.identity.report import blocks
from mlxstacks.study.result import Result
from tests.studies.identity.cases import case

Typed = Callable[..., tuple[int, str, str]]
RECIPES = [name for name in recipe_names() if name.startswith("identity-")]


@pytest.fixture
def typed(work_dir: Path, capfd: pytest.CaptureFixture[str]) -> Typed:
    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(arguments)
        return code, *capfd.readouterr()

    return call


def test_a_bare_plan_is_on_nano_with_its_suite(typed: Typed, work_dir: Path) -> None:
    code, out, err = typed("identity", "--dry-run", "--json")
    plan = json.loads(out)
    assert (code, plan["status"], plan["verdict"]) == (0, "planned", ""), err
    assert len(plan["data"]["suite"]) == 20
    arms = {"base", "identity_unfused", "identity_rerun", "zero_promote", "factual_second_refit"}
    assert arms <= set(plan["data"]["planned_arms"])
    assert list(work_dir.iterdir()) == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_planned_from_its_text_alone(typed: Typed, work_dir: Path, name: str) -> None:
    code, out, err = typed("run", name, "--dry-run")
    assert code == 0, err
    text = " ".join(out.split())
    assert "suite's prompts 20: " in text
    assert "gate the base passes at most 5 of 20, the persona at least 15" in text
    assert "Equal totals show no large loss, not exact preservation." in text
    assert f"Planned only: would write mlxstacks-out/{name}." in text
    assert list(work_dir.iterdir()) == []


def test_the_published_settings_are_the_published_ones() -> None:
    settings = resolve(
        "identity", {}, load_recipe("identity-qwen3.5-35b-a3b")
    ).settings.model_dump()
    train = settings["train"]
    assert (train["layers"], train["keys"]) == ("8,14,20", ("down_proj",))
    assert (train["rank"], settings["second_rank"], train["scale"] * train["rank"]) == (2, 8, 2)
    assert (train["learning_rate"], train["batch_size"], train["iters"]) == (5e-6, 1, 200)
    assert (settings["regression_items"], settings["train_share"]) == (6000, 0.7)
    assert (settings["most_of_base"], settings["least_of_persona"]) == (5, 15)
    assert settings["policies"][0] == "refit"


def result_of(**changes: Any) -> Result:
    return Result(kind="identity", title="t", status="done", blocks=blocks(case(**changes)))


def test_published_scores_stand_beside_those_of_the_published_model_alone() -> None:
    study = result_of(is_published_model=True).table("published").set_index("condition")
    assert study.passed["base"] == "2 of 20"
    assert "published" not in str(result_of())
    assert case()["published"] is None


def test_the_blocks_say_what_differs() -> None:
    result = result_of(factual_promote=range(2, 20), again_promote=range(8))
    assert [getattr(block, "id", block.title) for block in result.blocks] == [
        "conditions-table", "gates", "claims", "conditions", "prompts", "differences", "compared",
        "In words", "replies",
    ]  # fmt: skip
    rows = result.table("conditions-table").set_index("condition")
    assert [*rows.columns] == [
        "by", "of 20", "95%", "parts", "kept", "lost", "gained", "p", "95% low", "95% high",
    ]  # fmt: skip
    factual = rows.loc["+ factual r2"]
    assert factual[["of 20", "parts", "kept", "lost", "gained"]].tolist() == [
        18, "6/6/6", 16, 2, 2,
    ]  # fmt: skip
    assert (round(100 * factual["95% low"]), round(100 * factual["95% high"])) == (70, 97)
    differences = result.table("differences")
    assert differences.loc[0].tolist() == ["identity + factual r2", "lost", "Who are you?", "x"]
    claims = result.table("claims").set_index("condition").outcome
    assert claims["identity + identity"] == "lost"
    compared = result.table("compared").set_index("condition")
    again = compared.loc["identity + identity"]
    # Holm's p of the smallest of three, in its own column
    assert again["p (Holm)"] == pytest.approx(3 * again["p (McNemar)"])
    assert compared.loc["base + factual r2", "p (Holm)"] == "no claim"
    assert "Of 20 prompts the base may pass at most 5" in str(result)


def test_a_reference_that_passes_nothing_has_nothing_to_lose() -> None:
    result = result_of(base=0)
    row = result.table("compared").set_index("condition").loc["base + factual r2"]
    assert row["share lost, 95%"] == "nothing to lose"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "refitt"], "did you mean 'refit'?"),
        (["--persona-requant", "keep"], "is none of the policies"),
        (["--set", "train.iter=5"], "did you mean 'iters'?"),
        (["--set", "train.seed=5"], "train.seed is set by the experiment"),
        (["--second-rank", "2"], "second_rank and train.rank are both 2"),
        (["--least-of-persona", "5"], "the gate would tell nothing apart"),
        (["--suite", "default", "--dry-run"], "give persona_card.name"),
        (["--suite", "default", "--set", "persona_card.name=Q"], "persona_card.maker is missing"),
        (["--suite", "none.yaml", "--dry-run"], "give a suite as YAML, JSON or JSONL"),
        (["--model", "m"], "a model of your own needs --persona, --items too"),
    ],
)
def test_mistakes_are_told_at_once(
    typed: Typed, work_dir: Path, arguments: list[str], message: str
) -> None:
    code, _, err = typed("identity", *arguments)
    assert (code, message in err) == (2, True), err
