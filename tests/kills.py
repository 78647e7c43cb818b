"""kill -9 between any two file operations of a run that is given as a recipe."""

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.study.run_directory import work_path
from tests.warm import ended, start_command_line

EVENTS = ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir")


def count_operations(below: str, heard: Callable[[int], object]) -> None:
    """`heard` is told before each file below a directory is written, renamed or removed."""
    number = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal number
        if event not in EVENTS or not str(arguments[0]).startswith(below):
            return
        if event == "open" and isinstance(arguments[1], str) and "r" in arguments[1]:
            return
        number += 1
        heard(number)

    sys.addaudithook(hook)


def die_at(point: int, below: str) -> None:
    """This process kills itself before its `point`-th operation."""

    def heard(number: int) -> None:
        if number == point:
            os.kill(os.getpid(), signal.SIGKILL)

    count_operations(below, heard)


def note(counter: str, below: str) -> None:
    """This process writes to a file how many operations it has done."""
    file = os.open(counter, os.O_CREAT | os.O_WRONLY)
    count_operations(below, lambda number: os.pwrite(file, b"%d" % number, 0))


def start(recipe: Path, point: int, below: Path) -> int:
    """Exit status of a run that dies before its operation `point`; 0: of none."""
    status = ended(start_command_line(["run", str(recipe)], partial(die_at, point, str(below))))
    assert status in (0, -signal.SIGKILL)
    return status


def forget(target: Path) -> None:
    for path in (target, work_path(target)):
        shutil.rmtree(path, ignore_errors=True)


def kill_at_any_operation(
    recipe: Path, target: Path, kills: int, results: Callable[[], object]
) -> None:
    """Each run dies before some operation, and the next goes on, until so many were killed; what is
    whole has the results of a run that was not.
    """
    counter = target.parent.with_name("operations")
    hook = partial(note, str(counter), str(target.parent))
    assert ended(start_command_line(["run", str(recipe)], hook)) == 0
    expected, most = results(), int(counter.read_bytes())
    forget(target)
    chance = random.Random(1)
    while kills > 0:
        kills -= start(recipe, chance.randint(1, most), target.parent) == -signal.SIGKILL
        if target.exists():  # done before the kill, or all but clearing away: begin another
            assert results() == expected
            forget(target)
    assert start(recipe, 0, target.parent) == 0
    assert results() == expected
    assert not work_path(target).exists()
