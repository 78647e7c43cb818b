"""Recipes that repeat a result: of nano on any machine, of anything else with what it read.

Run: pytest tests/report/test_repeat.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlxstacks.cli import run as command
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.store import Store
from mlxstacks.nano.exports import cache_directory, nano_paths
from mlxstacks.nano.settings import HELD_OUT, HELD_OUT_DIRECTORY
from mlxstacks.recipe.config_plan import KEYS
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import resolve
from mlxstacks.recipe.table import COMMANDS
from mlxstacks.report.settings import ReportSettings
from mlxstacks.report.write import write_report
from mlxstacks.study.document import RESULT
from mlxstacks.study.repeat import NANO_PARTS, READ, Recipe, recipe_of
from tests.report.cases import plots_cut, profile_result, write_run

NAMES = sorted(NANO_PARTS)
PLACES = ("save_path", "force", "resume")


def recipe_for(name: str, settings: dict[str, Any]) -> Recipe:
    found = recipe_of(name, settings)
    assert found is not None
    return found


def shown(name: str, path: Path | None = None) -> dict[str, Any]:
    """Settings of a bare command, or of a recipe's, as its result says them."""
    resolved = resolve(name, {}, load_recipe(str(path)) if path else None)
    found: dict[str, Any] = resolved.settings.model_dump(mode="json")
    return {key: value for key, value in found.items() if key not in PLACES}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another machine's."""
    return str(tmp_path_factory.mktemp("elsewhere") / "cache")


def test_every_part_of_nano_that_a_command_fills_in_is_known() -> None:
    for name in NAMES:
        assert {*COMMANDS[name].nano} <= {*NANO_PARTS[name]}


def test_a_recipe_of_nano_is_the_same_run_on_a_machine_with_another_cache(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here, own_cache = {name: shown(name) for name in NAMES}, str(cache_directory())
    monkeypatch.setenv("MLXSTACKS_CACHE", cache)
    for name, settings in here.items():
        recipe = recipe_for(name, settings)
        assert {*COMMANDS[name].nano} <= {*recipe.of_nano} or name.startswith(("route", "stacks"))
        assert own_cache not in recipe.text
        assert "/assets/nano" not in yaml.safe_dump(yaml.safe_load(recipe.text))
        assert recipe.paths == ()
        path = tmp_path / "again.yaml"
        path.write_text(recipe.text)
        there = shown(name, path)
        assert there == shown(name)
        if "model" in COMMANDS[name].nano:
            assert there["model"].startswith(cache)
            assert there["model"] != settings["model"]


@pytest.mark.parametrize("name", ["confound", "identity"])
def test_a_training_in_a_recipe_repeats_nothing_that_the_study_sets(name: str) -> None:
    settings = resolve(name, {"seed": 3}).settings.model_dump(mode="json")
    found = yaml.safe_load(recipe_for(name, settings).text)
    assert found["seed"] == 3
    assert found["train"]["rank"] == settings["train"]["rank"]
    assert not {"seed", "model", "save_path", "thinking"} & found["train"].keys()


def test_the_recipe_of_a_report_is_planned_elsewhere(
    tmp_path: Path,
    cache: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, document = RESULT, plots_cut(profile_result())
    document["settings"] = shown("profile")
    run = write_run(tmp_path / "profile", file, document)
    target = tmp_path / "page"
    write_report(ReportSettings(runs=(str(run),), save_path=str(target), formats=("svg",)))
    page = (target / "index.html").read_text("utf-8")
    assert "mlxstacks run PAGE/recipes/profile.yaml" in page
    assert "From anywhere; for PAGE, type" in page
    assert "Other paths in it" not in page
    assert "found again on each machine: model, data." in page
    monkeypatch.setenv("MLXSTACKS_CACHE", cache)
    monkeypatch.chdir(target)
    assert command(["run", "recipes/profile.yaml", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["status"] == "planned"
    assert planned["settings"]["model"].startswith(cache)
    assert planned["plan"]["prompts"]


def test_what_commands_of_routing_find_by_their_store_is_left_out() -> None:
    paths = nano_paths()
    # so long as nano's store is of nano, its commands find the model themselves
    store = Store.open(str(paths.store_path))
    base = store.manifest.base_fingerprint
    assert fingerprint(open_checkpoint(paths.model_path), like=base) == base
    file = paths.curriculum_path / HELD_OUT_DIRECTORY / f"{HELD_OUT}.jsonl"
    unseen = {"path": str(file), "dataset": None, "split": "train", "format": "auto", "cap": None}
    settings = {
        "store_path": str(paths.store_path), "model": str(paths.model_path),
        "data": str(paths.routing_path), "unseen": [unseen], "sources": [], "seed": 3,
    }  # fmt: skip
    found = recipe_for("route evaluate", settings)
    assert {*found.of_nano} == {"store_path", "model", "data", "unseen"}
    assert yaml.safe_load(found.text) == {"command": "route evaluate", "sources": [], "seed": 3}
    drawn = recipe_for("route evaluate", {**settings, "unseen": [{**unseen, "cap": 5}]})
    assert {*found.of_nano} - {*drawn.of_nano} == {"unseen"}
    other = recipe_for("route evaluate", {**settings, "data": "mine"})
    assert {*other.of_nano} == {"store_path", "model"}
    analysed = {**settings, "data": str(paths.curriculum_path)}
    assert "data" in recipe_for("stacks analyse", analysed).of_nano
    assert "data" not in recipe_for("route discover", analysed).of_nano


def test_what_is_not_filled_in_again_stays() -> None:
    paths = nano_paths()
    model, data = str(paths.model_path), str(paths.domains_path)
    # a model of somebody's own, beside which nothing is filled in
    own = recipe_for("profile", {"model": "/models/mine", "data": data})
    assert own.of_nano == ()
    assert own.paths == ("model", "data")
    assert yaml.safe_load(own.text)["data"] == data
    # nano at other bits, nano beside data that are another command's, nano with an adapter more
    for settings, left in (
        ({"model": model.replace("3bit", "8bit"), "data": data}, ()),
        ({"model": model, "data": str(paths.items_path)}, ("model",)),
        ({"model": model, "data": "mine"}, ("model",)),
        ({"model": model + ".old", "data": data}, ()),
        ({"model": model + "\n", "data": data}, ()),
    ):
        assert recipe_for("profile", settings).of_nano == left
    adapter = str(paths.adapter_path)
    assert recipe_for("fuse", {"model": model, "adapter_path": [adapter]}).of_nano
    two = recipe_for("fuse", {"model": model, "adapter_path": [adapter, "other"]})
    assert two.of_nano == ("model",)
    # without its model the command would add the store that this run went without
    bare = {"model": model, "adapter_path": adapter, "store_path": None, "data": None}
    assert recipe_for("eval", bare).of_nano == ()
    # paths inside other settings; what is said to a model is none
    for name, nested in (
        ("unseen", [{"path": "/home/me/x.jsonl"}]),
        ("sources", [{"label": "a", "data": {"sources": [{"path": "~/x.jsonl"}]}}]),
        ("domains", [{"name": "a", "data": None}, {"name": "b", "data": {"path": "/x.jsonl"}}]),
    ):
        assert recipe_for("stack", {"model": "mine", name: nested}).paths == (name,)
    said = {"prompts": [{"prompt": "/no_think Who?", "expect": ["~"]}], "system_prompt": "/think"}
    assert recipe_for("route check", said).paths == ()


def test_relative_paths_are_told_from_others() -> None:
    assert {*KEYS} <= READ
    model, data = str(nano_paths().model_path), str(nano_paths().domains_path)
    source = [{"path": "x.jsonl", "dataset": None}]
    for settings, relative in (
        ({"model": "qwen3.5-35b-a3b-3bit", "seed": 1, "layers": "all"}, ("model",)),
        ({"model": "/m", "adapter_path": ["/a", "mlxstacks-out/train-1"]}, ("adapter_path",)),
        ({"model": "~/m", "targets": None, "data": "/data"}, ()),
        # files of sources lie in the data
        ({"model": "/m", "data": "/data", "unseen": source}, ()),
        ({"model": "/m", "data": None, "unseen": source}, ("unseen",)),
        ({"model": "/m", "domains": [{"data": {"sources": source}}]}, ("domains",)),
        ({"model": "/m", "suite": "default"}, ()),
        ({"model": "/m", "suite": "mine.json", "persona": "p"}, ("suite", "persona")),
        ({"model": model, "data": data}, ()),
    ):
        assert recipe_for("profile", settings).relative == relative


def test_a_result_with_relative_inputs_is_repeated_where_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its inputs are found there, and not from the directory of the page."""
    made, target = tmp_path / "made", tmp_path / "page"
    made.mkdir()
    (made / "model").symlink_to(nano_paths().model_path)
    (made / "rows").symlink_to(nano_paths().domains_path)
    file, document = RESULT, plots_cut(profile_result())
    document["settings"] = shown("profile") | {"model": "model", "data": "rows"}
    run = write_run(tmp_path / "profile", file, document)
    write_report(ReportSettings(runs=(str(run),), save_path=str(target), formats=("svg",)))
    page = " ".join((target / "index.html").read_text("utf-8").split())
    assert "From anywhere" not in page
    assert "From the directory where this result was made; for PAGE, type" in page
    assert "relative to the directory where it is run: model, data." in page
    again = ["run", str(target / "recipes" / "profile.yaml"), "--dry-run", "--json"]
    monkeypatch.chdir(made)
    assert command(again) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["prompts"]
    monkeypatch.chdir(target)
    assert command(again) == 0
    assert json.loads(capsys.readouterr().out)["plan"] is None
