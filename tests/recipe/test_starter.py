"""`init` writes a recipe that says what every setting means, and that runs as it is.

Run: pytest tests/recipe/test_starter.py
"""

import re
import shutil
from pathlib import Path

import pytest

from mlxstacks.errors import InputError
from mlxstacks.nano.exports import nano_paths
from mlxstacks.recipe.config_plan import TRAIN
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import OUT, resolve
from mlxstacks.recipe.starter import _ranges, starter
from mlxstacks.recipe.table import COMMANDS, load
from tests.cli.conftest import Run, command

__all__ = ["command"]


@pytest.fixture
def config_only(work_dir: Path) -> Path:
    """A directory with the config of a model and nothing of its weights."""
    directory = work_dir / "my-model"
    directory.mkdir()
    shutil.copy(nano_paths().model_path / "config.json", directory)
    return directory


def test_a_training_is_planned_from_the_config_alone(config_only: Path, command: Run) -> None:
    code, out, err = command("init", "my-model")
    assert (code, err) == (0, "")
    assert "mlxstacks run train-my-model.yaml --dry-run" in out
    text = Path("train-my-model.yaml").read_text()
    assert "# Guard:    fits: " in text
    assert "self_attn.q_proj: layers 2,5\n" in text
    assert "#rank: 8\n" in text
    assert 'model: "my-model"' in text or "model: my-model" in text
    for key in load(COMMANDS["train"].settings).model_fields:
        assert key == "force" or re.search(rf"^# .+\n#?{key}: ", text, re.M), key
    code, out, err = command("run", "train-my-model.yaml", "--dry-run")
    assert code == 0, err
    assert "The run itself needs what is not here: data." in out
    code, _, err = command("init", "my-model", "--command", "stack compare")
    assert code == 0, err
    assert 'arms: [{"name": "lora"' in Path("stack-compare-my-model.yaml").read_text()
    code, _, err = command("init", "--model", "my-model")
    assert code == 2
    assert "give --force, or another --save-path" in err


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {*TRAIN}))
@pytest.mark.parametrize("model", [None, "my-model"])
def test_every_recipe_of_it_resolves(name: str, model: str | None, work_dir: Path) -> None:
    if model and "model" not in load(COMMANDS[name].settings).model_fields:
        with pytest.raises(InputError, match="takes no model: mlxstacks init --command"):
            starter(name, model, "a.yaml")
        return
    path = work_dir / "a.yaml"
    path.write_text(starter(name, model, str(path)))
    recipe = load_recipe(str(path))
    assert recipe.command == name
    settings = resolve(name, {}, recipe).settings
    assert model is None or vars(settings)["model"] == model
    # a line that is taken out of its comment holds the default
    whole = work_dir / "whole.yaml"
    whole.write_text(re.sub(r"^#(\w+): ", r"\1: ", path.read_text(), flags=re.M))
    assert resolve(name, {}, load_recipe(str(whole))).settings == settings


def test_no_name_that_it_proposes_has_a_space(work_dir: Path, command: Run) -> None:
    code, out, err = command("init", "--command", "route check", "--save-path", "-")
    assert (code, err) == (0, "")
    assert "mlxstacks run route-check.yaml --dry-run" in out
    assert f"{OUT / 'route-check'}" in out


def test_what_it_cannot_write_is_refused(work_dir: Path, command: Run) -> None:
    for words, message in (
        (["no-such-model"], "no such directory or file"),
        (["--command", "rute train"], "did you mean 'route train'?"),
        (["x", "-m", "y"], "model is given twice"),
        (["x", "y"], "got 2 models: x, y"),
        (["stack", "compare"], '`mlxstacks init --command "stack compare"`'),
    ):
        code, _, err = command("init", *words)
        assert (code, message in err) == (2, True), err
    assert list(work_dir.iterdir()) == []


def test_ranges_are_as_layers_are_given() -> None:
    assert _ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
