"""kill -9 between any two file operations of a run: gone on with, it ends with the same bytes.

Run: pytest tests/studies/confound/test_kill.py
"""

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.studies.confound.run import run
from mlxstacks.study.run_directory import work_path
from tests.studies.confound_cases import TRAIN, settings_for, write_places
from tests.warm import ended, start_command_line

OPERATIONS = 4_000  # of a whole run, about


def die_at(point: int, below: str) -> None:
    """This process kills itself when it is about to open, rename or remove its `point`-th file
    below a directory."""
    left = point

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir"):
            return
        if event == "open" and isinstance(arguments[1], str) and "r" in arguments[1]:
            return
        if str(arguments[0]).startswith(below):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(heard)


def start(recipe: Path, point: int, below: Path) -> int:
    """Exit status of a run that dies before its operation `point`."""
    status = ended(start_command_line(["run", str(recipe)], partial(die_at, point, str(below))))
    assert status in (0, -signal.SIGKILL)
    return status


def results(target: Path) -> dict[str, Any]:
    """Bytes of answers, adapters and plans, and of the report what does not tell time or place.

    The training's log and last state hold seconds; its adapter does not.
    """
    found: dict[str, Any] = {
        str(path.relative_to(target)): path.read_bytes()
        for path in sorted(target.rglob("*"))
        if path.suffix in (".jsonl", ".safetensors")
        and path.name not in ("log.jsonl", "checkpoint.safetensors")
    }
    for name in ("plan.json", "protocol.json", "split.json"):
        found[name] = (target / name).read_bytes()
    adapters = {f"{kind}/adapters.safetensors" for kind in ("adapter", "zero", "random")}
    assert {*adapters, "answers/test_persona.jsonl", "answers/test_a1_promote.jsonl"} <= {*found}
    result = json.loads((target / "result.json").read_text())
    return found | {key: result[key] for key in result if key not in ("environment", "seal")}


def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(
    tmp_path: Path, campaign: Callable[[int], range]
) -> None:
    places = write_places(tmp_path / "inputs", items=24)
    whole, killed = tmp_path / "a" / "whole", tmp_path / "b" / "killed"
    for target in (whole, killed):
        target.parent.mkdir()
    changes: dict[str, Any] = {"policies": ("promote",), "batch_size": 8, "train": {"iters": 4}}
    run(settings_for(places, whole, **changes))
    expected = results(whole)
    settings = settings_for(places, killed, **changes)
    keys = settings.model_dump(mode="json", exclude={"train", "force", "resume"})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps({"command": "confound", "train": TRAIN | changes["train"], **keys})
    )
    chance, kills = random.Random(1), 0
    for _ in campaign(20):
        point = chance.randrange(1, OPERATIONS)
        kills += start(recipe, point, killed.parent) == -signal.SIGKILL
        if killed.exists():  # done before the kill, or all but clearing away: begin another
            assert results(killed) == expected
            shutil.rmtree(killed)
            shutil.rmtree(work_path(killed), ignore_errors=True)
    assert start(recipe, 0, killed.parent) == 0
    assert results(killed) == expected
    assert not work_path(killed).exists()
    assert kills > 0
