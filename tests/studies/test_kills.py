"""kill -9 between any two file operations of commands that have no such test of their own.

Run: MLXSTACKS_SOAK=1 pytest tests/studies/test_kills.py
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.files.store import Store
from mlxstacks.study.result import Result
from tests.kills import kill_at_any_operation
from tests.studies.identity.cases import TRAIN, full_settings_for, write_places
from tests.studies.route.test_train import base, settings, store

__all__ = ["base", "store"]
pytestmark = pytest.mark.slow


def write_recipe(path: Path, command: str, **keys: Any) -> Path:
    path.write_text(json.dumps({"command": command, **keys}))
    return path


def figures(target: Path) -> Any:
    return Result.open(target).model_dump(mode="json", exclude={"environment", "seal", "notes"})


def test_identity_ends_with_the_bytes_of_one_that_was_not_killed(
    tmp_path: Path, campaign: Callable[..., range]
) -> None:
    target = tmp_path / "out" / "killed"
    target.parent.mkdir()
    keys = full_settings_for(write_places(tmp_path / "inputs"), target).model_dump(
        mode="json", exclude={"train", "persona_train", "force", "resume"}
    )
    recipe = write_recipe(
        tmp_path / "recipe.yaml", "identity", train=TRAIN, persona_train=TRAIN, **keys
    )

    def results() -> Any:
        answers = {p.name: p.read_bytes() for p in sorted((target / "answers").iterdir())}
        adapters = {str(p): p.read_bytes() for p in sorted(target.rglob("adapters.safetensors"))}
        assert len(answers) > 10
        assert adapters
        return answers, adapters, figures(target)

    kill_at_any_operation(recipe, target, len(campaign(100)), results)


def test_a_router_is_the_old_one_or_the_new_one(
    store: Store, base: Path, tmp_path: Path, campaign: Callable[..., range]
) -> None:
    """It lies in the store and in the target."""
    (tmp_path / "out").mkdir()
    shutil.move(store.path, tmp_path / "out" / "store")
    shutil.copytree(tmp_path / "out" / "store", tmp_path / "before")
    own = Store.open(tmp_path / "out" / "store")
    target = tmp_path / "out" / "killed"
    keys = settings(own, base).model_dump(mode="json", exclude_unset=True)
    keys |= {"save_path": str(target), "targets": str(tmp_path / "targets")}
    recipe = write_recipe(tmp_path / "recipe.yaml", "route train", **keys)

    def results() -> Any:
        manifest = Store.open(own.path).manifest
        assert manifest.router is not None
        file = (own.path / manifest.router.file).read_bytes()
        shutil.rmtree(own.path)
        shutil.copytree(tmp_path / "before", own.path)
        return file, figures(target)

    kill_at_any_operation(recipe, target, len(campaign(100)), results)
