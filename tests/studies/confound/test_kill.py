"""kill -9 between any two file operations of a run: gone on with, it ends with the same bytes.

Run: pytest tests/studies/confound/test_kill.py
"""

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxstacks.studies.confound.run import run
from mlxstacks.study.run_directory import work_path
from tests.studies.confound_cases import settings_for, write_places

# The child kills itself when it is about to open, rename or remove its n-th file below its parent.
PROGRAM = """
import os, signal, sys
left, below = int(sys.argv[2]), sys.argv[3]
def heard(event, arguments):
    global left
    if event not in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir"):
        return
    if event == "open" and isinstance(arguments[1], str) and "r" in arguments[1]:
        return
    if str(arguments[0]).startswith(below):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
from mlxstacks.studies.confound.run import run
from mlxstacks.studies.confound.settings import ConfoundSettings
sys.addaudithook(heard)
run(ConfoundSettings.model_validate_json(sys.argv[1]))
"""
OPERATIONS = 800  # of a whole run, about


def start(settings_json: str, point: int, below: Path) -> int:
    """Exit status of a run that dies before its operation `point`."""
    command = [sys.executable, "-c", PROGRAM, settings_json, str(point), str(below)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode


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
    settings = settings_for(places, killed, **changes).model_dump_json()
    chance, kills = random.Random(1), 0
    for _ in campaign(20):
        point = chance.randrange(1, OPERATIONS)
        kills += start(settings, point, killed.parent) == -signal.SIGKILL
        if killed.exists():  # done before the kill, or all but clearing away: begin another
            assert results(killed) == expected
            shutil.rmtree(killed)
            shutil.rmtree(work_path(killed), ignore_errors=True)
    assert start(settings, 0, killed.parent) == 0
    assert results(killed) == expected
    assert not work_path(killed).exists()
    assert kills > 0
