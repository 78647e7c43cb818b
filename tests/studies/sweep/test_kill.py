"""kill -9 at any moment of a sweep: the same command goes on and ends with the same cells.

Run: pytest tests/studies/sweep/test_kill.py
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.studies.sweep.cells import read_results
from mlxstacks.study.child_process import how_it_ended, run_child
from mlxstacks.study.run_directory import work_path
from tests.studies.sweep_cases import adapters, sweep_settings
from tests.studies.train_cases import write_data, write_tiny_model
from tests.warm import ended, start, wait_for

SLEEPER = "tests.studies.sleeper"


def kill(process: ForkServerProcess) -> bool:
    """kill -9; whether the process was still running."""
    process.kill()
    return ended(process) == -signal.SIGKILL


def test_a_killed_sweep_ends_with_the_cells_of_one_that_was_not(
    tmp_path: Path, campaign: Callable[..., range]
) -> None:
    """The first kill comes inside the second cell, the others at random. The sweep and its cells
    are forked from a process with its imports done (see warm.py).
    """
    model, data = write_tiny_model(tmp_path / "model"), write_data(tmp_path / "data")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run = {"iters": 6, "save_every": 1, "steps_per_eval": 3}
    changes: Any = {"train": run, "policies": ("keep",)}
    began = time.monotonic()
    assert (
        ended(start("sweep", sweep_settings(model, data, whole, **changes).model_dump_json())) == 0
    )
    duration = time.monotonic() - began
    settings = sweep_settings(model, data, killed, **changes)
    cells = work_path(killed) / "cells"
    second = sorted(adapters(whole))[1]
    first_result = cells / f"{sorted(adapters(whole))[0]}.json"

    process = start("sweep", settings.model_dump_json())
    wait_for(work_path(cells / second) / "checkpoint.safetensors", process)
    assert kill(process)
    first = first_result.read_bytes()
    assert {r.status for r in read_results(cells).values()} == {"trained", "started"}

    chance, kills, wanted = random.Random(0), 0, len(campaign(100, usual=1))
    is_first = True
    while kills < wanted:
        process = start("sweep", settings.model_dump_json())
        process.join(chance.uniform(0, duration))
        kills += kill(process)
        if killed.exists():
            assert adapters(killed) == adapters(whole)
            shutil.rmtree(killed)
            shutil.rmtree(work_path(killed), ignore_errors=True)
        elif is_first:
            # A finished cell is the same file, its figures with it.
            assert first_result.read_bytes() == first
        is_first = False
    assert ended(start("sweep", settings.model_dump_json())) == 0
    assert adapters(killed) == adapters(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "killed", "model", "whole"]


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """Else it would go on training, and hold the cell that the next sweep wants."""
    specification = {"pid_file": str(tmp_path / "pid")}
    code = (
        "from pathlib import Path\n"
        "from mlxstacks.study.child_process import run_child\n"
        f"run_child({SLEEPER!r}, {specification!r}, Path({str(tmp_path / 'log')!r}), print)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    while not (tmp_path / "pid").exists() and parent.poll() is None:
        time.sleep(0.005)
    child = int((tmp_path / "pid").read_text())
    os.kill(child, 0)
    parent.kill()
    assert parent.wait() == -signal.SIGKILL
    for _ in range(6000):
        # An orphan that has ended may stay a zombie where nobody waits for it.
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("the child outlived its parent by a minute")


def test_an_exception_in_the_parent_ends_the_child(tmp_path: Path) -> None:
    def interrupt(message: dict[str, object]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(SLEEPER, {"pid_file": str(tmp_path / "pid")}, tmp_path / "log", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert "what is printed goes to the log" in (tmp_path / "log").read_text()


def test_how_a_child_ended_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = run_child("tests.studies.no_such_module", {}, log, lambda message: None)
    assert code == 1
    assert "No module named tests.studies.no_such_module" in how_it_ended(code, log)
    assert how_it_ended(-9, log).startswith("killed by SIGKILL; often the system")
