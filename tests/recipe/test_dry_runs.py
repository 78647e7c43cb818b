"""`run --dry-run` of every shipped recipe, on a machine that has none of their models and data.

The guard builds each step here and simulates none, which changes its numbers and none of the paths
to them; three verdicts are computed in full and compared with what the recipes say, and a soak
simulates all of them on rows of 16 tokens.
Run: pytest tests/recipe/test_dry_runs.py
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from mlxstacks import memory
from mlxstacks.data import arrow_sets
from mlxstacks.guard import run as guard_run
from mlxstacks.guard.build import training_step
from mlxstacks.guard.predict import Point, Prediction
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.memory import bytes_in_words
from mlxstacks.recipe.config_plan import PLAN_THEMSELVES, TRAIN
from mlxstacks.recipe.file import Recipe, load_recipe, recipe_names
from mlxstacks.recipe.table import COMMANDS
from tests.cli.conftest import Run
from tests.conftest import SOAK

BIG = "-qwen3.5-35b-a3b"
SHORT_ROWS = 16


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, work_dir: Path) -> Path:
    """An empty current directory, and no hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return work_dir


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    predict = guard_run.predict_training

    def shorter(config: Any, settings: GuardSettings, *rest: Any, step: Any = None) -> Prediction:
        if SOAK:
            cut = min(SHORT_ROWS, settings.max_seq_length)
            short = settings.model_copy(update={"max_seq_length": cut})
            return predict(config, short, *rest, step=step)  # type: ignore[misc]
        model = (step or training_step(config, settings, 1)).model
        held = [array.nbytes for _, array in tree_flatten(model.parameters())]
        point = Point(SHORT_ROWS, len(held), sum(held), {"layers": len(held)}, {})
        return Prediction(SHORT_ROWS, (point,))

    monkeypatch.setattr(guard_run, "predict_training", shorter)


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("name", recipe_names())
def test_it_plans_and_touches_nothing(name: str, offline: Path, command: Run) -> None:
    code, out, err = command("run", name, "--dry-run", "--json")
    assert code == 0, err
    plan, recipe = json.loads(out), load_recipe(name)
    assert plan["status"] == "planned" or (recipe.command, plan["status"]) == ("guard", "done")
    # what push would upload is there to be read
    written = ["mlxstacks-out"] if recipe.command == "push" else []
    assert [path.name for path in offline.iterdir()] == written
    if "model" in recipe.values and recipe.command not in (*PLAN_THEMSELVES, "guard"):
        check_plan(recipe, plan["data"])


def check_plan(recipe: Recipe, plan: dict[str, Any]) -> None:
    """A plan from the config alone: sizes, a verdict where something trains, what is not here."""
    model = str(recipe.values["model"])
    if model.startswith("mlxstacks-out"):  # made by another recipe, of nano
        assert model in plan["not_here"]
        return
    assert plan["source"].startswith("the shipped config ")
    assert plan["model"]["parameters"] > 100_000
    assert plan["model"]["weights_bytes"] > 0
    assert model in plan["not_here"]
    assert bool(plan["training"]) == (recipe.command in TRAIN)
    for training in plan["training"]:
        assert training["trained_parameters"] > 0
        if recipe.command.startswith("stack"):
            assert re.fullmatch(r"([\w-]+: )?(1 stack|\d+ stacks)", training["name"])
        assert training["adapter_bytes"] == 4 * training["trained_parameters"]
    if plan["training"]:
        assert plan["training"][0]["guard"]["verdict"]


def test_every_command_has_a_recipe() -> None:
    missing = set(COMMANDS) - {load_recipe(name).command for name in recipe_names()}
    assert not missing


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.endswith(BIG)])
def test_a_recipe_of_the_large_model_has_a_twin_on_nano(name: str) -> None:
    """`On nano:` in its head names it; without that line it is NAME-nano."""
    recipe = load_recipe(name)
    said = [line.split()[-1] for line in recipe.head if line.startswith("On nano:")]
    twin = load_recipe(said[0] if said else f"{name.removesuffix(BIG)}-nano")
    assert twin.command == recipe.command
    assert "model" not in twin.values


@pytest.mark.skipif(memory.device().kind != "cpu", reason="a compiled step has other counts")
@pytest.mark.parametrize(
    "name",
    ["train-qwen3.5-35b-a3b", pytest.param("stack-qwen3.5-35b-a3b", marks=pytest.mark.slow)],
)
def test_the_guards_word_in_the_head_is_the_guards(name: str, offline: Path, command: Run) -> None:
    code, out, _ = command("run", name, "--dry-run", "--json")
    verdict = json.loads(out)["data"]["training"][0]["guard"]["verdict"]
    said = next(line for line in load_recipe(name).head if line.startswith("Guard:"))
    assert verdict in re.sub(r"^Guard:\s+", "", said)
    assert code == 0


@pytest.mark.slow
@pytest.mark.skipif(memory.device().kind != "cpu", reason="a compiled step has other counts")
def test_the_guards_word_on_what_the_studies_train(offline: Path, command: Run) -> None:
    """Their plan does not ask the guard: `train` on the large model with their settings does."""
    names = ("confound-qwen3.5-35b-a3b", "identity-qwen3.5-35b-a3b")
    recipes = [load_recipe(name) for name in names]
    assert recipes[0].values["train"] == recipes[1].values["train"]
    sets = [f"{key}={json.dumps(value)}" for key, value in recipes[0].values["train"].items()]
    pairs = [part for pair in sets for part in ("--set", pair)]
    text = Path("study.yaml")
    text.write_text(f"command: train\nmodel: {recipes[0].values['model']}\ndata: data\n")
    code, out, err = command("run", str(text), "--dry-run", "--json", *pairs)
    assert code == 0, err
    verdict = json.loads(out)["data"]["training"][0]["guard"]["verdict"]
    for recipe in recipes:
        said = next(line for line in recipe.head if line.startswith("Guard:"))
        assert verdict in said
        assert verdict.rpartition("; ")[2] in next(x for x in recipe.head if "Memory:" in x)


def test_every_training_recipe_of_a_model_that_is_not_shipped_has_the_guards_word() -> None:
    commands = ("train", "stack", "sweep", "sweep buffers", "confound", "identity")
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.command in commands and "model" in recipe.values:
            assert any(line.startswith("Guard:") for line in recipe.head), name


@pytest.mark.usefixtures("short_steps")
def test_stacks_on_all_layers_of_the_large_model_fit(offline: Path, command: Run) -> None:
    """A shared pair is one, not 256; and what the plan lists is what the verdict adds up."""
    arguments = ("run", "stack-qwen3.5-35b-a3b", "--dry-run", "--set", "layers=all")
    code, out, err = command(*arguments, "--json")
    assert code == 0, err
    (training,) = json.loads(out)["data"]["training"]
    guard, parts = training["guard"], training["guard"]["parts_bytes"]
    assert guard["outcome"] == "fits"
    assert sum(parts.values()) == guard["bytes"]
    assert guard["verdict"].endswith(f"; {bytes_in_words(guard['bytes'])}")
    # the stack and its best weights so far; nine more are frozen
    assert parts["adapter"] == 2 * training["adapter_bytes"]
    assert parts["optimizer"] == pytest.approx(training["optimizer_bytes"], abs=100)
    directions = parts["stacks"] - 9 * training["frozen_bytes"]
    assert 0 < directions < training["adapter_bytes"]
    assert guard["bytes"] < 1.6 * parts["weights"]


@pytest.mark.usefixtures("short_steps")
def test_the_plan_in_words(offline: Path, command: Run) -> None:
    code, out, _ = command("run", "train-qwen3.5-35b-a3b", "--dry-run")
    assert code == 0
    flat = " ".join(out.split())
    assert "Planned from the shipped config qwen3.5-35b-a3b, 3 bits in groups of 64" in flat
    assert "the model is not here" in flat
    assert "rows unknown: data/train.jsonl is not here" in flat
    assert "linear_attn.out_proj x3, mlp.switch_mlp.down_proj x3" in flat
    assert "The run itself needs what is not here: model, data." in flat


@pytest.mark.usefixtures("short_steps")
def test_rows_that_are_here_are_counted(offline: Path, command: Run) -> None:
    (offline / "data").mkdir()
    (offline / "data" / "train.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    code, out, _ = command("run", "train-qwen3.5-35b-a3b", "--dry-run", "--json")
    inputs = {one["path"]: one for one in json.loads(out)["data"]["inputs"]}
    assert code == 0
    assert inputs["data/train.jsonl"]["rows"] == 2
    assert inputs["data/valid.jsonl"] == {
        "key": "data", "path": "data/valid.jsonl", "here": False, "rows": None, "needed": False,
        "download": "",
    }  # fmt: skip


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["rnak=4"], "unknown key 'rnak'; did you mean 'rank'?"),
        (["layers=8,41"], "layer 41: the model has layers 0 to 39"),
        (["keys=[no_proj]"], "'no_proj' matches no projection"),
        (["rank=5000"], "5000"),
        (["model=my-own-model"], "my-own-model"),
    ],
)
def test_what_cannot_be_is_still_refused(
    sets: list[str], message: str, offline: Path, command: Run
) -> None:
    pairs = [part for pair in sets for part in ("--set", pair)]
    code, _, err = command("run", "train-qwen3.5-35b-a3b", "--dry-run", *pairs)
    assert code == 2
    assert message in err
    assert list(offline.iterdir()) == []


def test_without_dry_run_what_is_missing_is_an_error(offline: Path, command: Run) -> None:
    code, _, err = command("run", "train-qwen3.5-35b-a3b")
    assert code == 2
    assert "qwen3.5-35b-a3b-3bit: no such directory" in err


def test_without_a_recipe_a_typed_path_that_is_missing_is_an_error(
    offline: Path, command: Run
) -> None:
    code, _, err = command("train", "--data", "no-such-data", "--model", "me/mine", "--dry-run")
    assert code == 2
    assert "me/mine" in err
    # The second has no plan of its own, so nothing but this looks at the path.
    for words in (["disable", "no-such-store", "x"], ["list", "no-such-store"]):
        code, _, err = command("stacks", *words, "--dry-run")
        assert code == 2
        assert "no-such-store" in err


@pytest.mark.parametrize(
    ("name", "missing", "writes"),
    [
        ("stacks-analyse", ["model", "store_path", "data"], ["mlxstacks-out/stacks-analyse"]),
        ("route-check", ["model", "store_path"], ["mlxstacks-out/route-check"]),
        ("route-train", ["model", "store_path", "targets"],
         ["mlxstacks-out/route-train", "mlxstacks-out/stack"]),
        ("generate", ["model", "store_path", "prompts"], ["./mlxstacks-out/gaps.jsonl"]),
    ],
)  # fmt: skip
def test_a_plan_names_what_is_read_and_written(
    name: str, missing: list[str], writes: list[str], offline: Path, command: Run
) -> None:
    """`prompts` is a number in the first, a list of prompts in the second, a file in the last."""
    _, out, _ = command("run", name + BIG, "--dry-run", "--json")
    plan = json.loads(out)["data"]
    here = [one["key"] for one in plan["inputs"] if not one["here"] and one["needed"]]
    assert here == missing
    assert plan["writes"] == [path if path.endswith("l") else path + BIG for path in writes]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("confound", "model, persona, items"),
        ("identity", "model, persona, persona_data, items"),
        ("eval", "model, adapter_path, store_path, data"),
    ],
)
def test_a_command_that_plans_by_itself_says_what_is_not_here(
    name: str, keys: str, offline: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_sets, "hub_snapshot", lambda dataset: None)
    _, out, _ = command("run", name + BIG, "--dry-run")
    assert f"The run itself needs what is not here: {keys}." in " ".join(out.split())
    _, out, _ = command("run", name + BIG, "--dry-run", "--json")
    plan = json.loads(out)
    assert plan["status"] == "planned"
    assert plan["data"]["not_here"][0] == "qwen3.5-35b-a3b-3bit"
    assert len(plan["data"]["not_here"]) >= len(keys.split(", "))


def test_a_store_that_is_changed_is_written(offline: Path, command: Run) -> None:
    for name in ("stacks-gc", "stacks-remove", "stacks-disable", "stacks-enable"):
        _, out, _ = command("run", name, "--dry-run", "--json")
        assert json.loads(out)["data"]["writes"] == ["mlxstacks-out/stack"], name


def test_lists_of_mappings_are_shown_by_their_names(offline: Path, command: Run) -> None:
    _, out, _ = command("run", "route-check" + BIG, "--dry-run")
    assert "neural network, reverse a string, diabetes, train, dose" in " ".join(out.split())
    assert "'expect'" not in out


def test_recipes_are_listed_by_command(command: Run) -> None:
    code, out, _ = command("recipes")
    assert code == 0
    lines = out.splitlines()
    assert [line for line in lines if line in COMMANDS] == list(COMMANDS)
    assert max(len(line.rstrip()) for line in lines[:-1]) <= 80
    code, out, _ = command("recipes", "stack", "compare", "--json")
    names = [one["name"] for one in json.loads(out)["recipes"]]
    assert names == [name for name in recipe_names() if name.startswith("compare-")]


def test_a_typed_file_that_is_not_here_ends_a_plan(offline: Path, command: Run) -> None:
    code, _, err = command("route", "evaluate", "--unseen", "nope.jsonl", "--dry-run")
    assert code == 2
    assert "not here: data nope.jsonl" in " ".join(err.split())
