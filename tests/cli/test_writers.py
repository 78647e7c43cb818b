"""Every command that has a target: two at once, without permission, while the clock runs backwards.

Run: MLXSTACKS_SOAK=1 pytest tests/cli/test_writers.py
"""

import ctypes
import importlib
import itertools
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from mlxstacks.nano.exports import nano_paths
from mlxstacks.recipe.table import COMMANDS, load
from mlxstacks.study.document import RESULT
from mlxstacks.study.result import CHANGED, Result
from tests.grow.test_grow import settings_for, write_places
from tests.kills import count_operations
from tests.report.cases import write_every
from tests.share.local_hub import serving
from tests.warm import ended, start_command_line

pytestmark = pytest.mark.slow


def _set(values: Iterable[str]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


# Of the others nano has the inputs.
ARGUMENTS = {
    "nano export": ["OUT"],
    "report": ["IN", "--save-path", "OUT"],
    "stacks export": ["STORE", "islands", "OUT", "--to", "store"],
    "pull": ["me/thing", "--save-path", "OUT"],
    "push": ["STORE", "me/thing", "--dry-run", "--save-path", "OUT"],
}
_DECODER = ["hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "vocab_size=270"]
_DOMAINS = ["--data", "DATA", "--domains", "islands", "--domains", "tolu", "--seeds", "0"]
LESS = {
    "stack compare": ["--set", "run.iters=2"], "train": ["--iters", "2"], "align": ["--iters", "2"],
    "confound": ["--limit", "4"], "identity": ["--max-prompts", "2"], "eval": ["--limit", "4"],
    "sweep buffers": ["--steps", "5", "--ranks", "2", "--ranks", "4"],
    "pretrain": ["--iters", "2", *_set(_DECODER)],
    "psn stacks": [
        *_DOMAINS, *_set(["pretrain.iters=2", "stack.iters=1", "stack.rounds=1"]),
        *_set(f"pretrain.{setting}" for setting in _DECODER),
    ],
    "psn blocks": [
        *_DOMAINS, "--iters", "2", "--validation-rows", "4", "--directions", "2", "--prompts", "2",
        *_set(["pretrain.iters=2", "block.num_layers=1"]),
        *_set(f"pretrain.{setting}" for setting in _DECODER),
    ],
}  # fmt: skip
WRITERS = [name for name, row in COMMANDS.items() if "save_path" in load(row.settings).model_fields]


def inputs_of_route_train(place: Path) -> list[str]:
    """A copy of nano's store, and outcomes of a few prompts."""
    store, targets = place / "store", place / "targets"
    shutil.copytree(nano_paths().store_path, store)
    few = ["--samples-per-domain", "3", "--single-cap", "20", "--save-path", str(targets)]
    found = run(["route", "discover", str(store), *few])
    assert found.returncode == 0, found.stderr
    return ["--store-path", str(store), "--targets", str(targets), "--epochs", "1"]


def inputs_of_grow(place: Path) -> list[str]:
    """A tiny store, and its log of gaps."""
    places = write_places(place)
    settings = settings_for(places, place / "out").model_dump(exclude_unset=True, exclude={"yes"})
    del settings["save_path"]
    given = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return [*given, "--yes", "all"]


def arguments(name: str, target: Path) -> list[str]:
    words = ARGUMENTS.get(name, ["--save-path", "OUT", *LESS.get(name, [])])
    made = target.parent.with_name(f"{target.parent.name}-in")
    if name == "report":
        write_every(made)
    elif name in INPUTS:
        words = [*words, *INPUTS[name](made)]
    places = {
        "OUT": str(target), "STORE": str(nano_paths().store_path), "IN": str(made),
        "DATA": str(nano_paths().curriculum_path),
    }  # fmt: skip
    return [*name.split(), *(places.get(word, word) for word in words)]


INPUTS = {"route train": inputs_of_route_train, "grow": inputs_of_grow}


@pytest.fixture(autouse=True)
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """For `pull`, a hub that has nano's sample adapter."""
    if "[pull]" not in request.node.name:
        yield
        return
    with serving() as hub:
        files = nano_paths().adapter_path.iterdir()
        hub.repositories["me/thing"] = {file.name: file.read_bytes() for file in files}
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        yield


def with_hub(environment: dict[str, str], change: Callable[[], object]) -> None:
    """`change`, in a process that imported huggingface_hub before this environment was set."""
    os.environ.update(environment)
    importlib.reload(constants)
    change()


def start(words: list[str], change: Callable[[], object]) -> ForkServerProcess:
    hub = {name: value for name, value in os.environ.items() if name.startswith("HF_")}
    return start_command_line(words, partial(with_hub, hub, change))


def run(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlxstacks", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


def stop_at(point: int, below: str) -> None:
    """This process halts before its `point`-th file operation there."""

    def heard(number: int) -> None:
        if number == point:
            os.kill(os.getpid(), signal.SIGSTOP)

    count_operations(below, heard)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def drop_capabilities() -> None:
    """Root that may write only where permissions say so; capset(2) of linux/capability.h."""
    header = struct.pack("Ii", 0x20080522, 0)
    assert ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.parametrize("name", WRITERS)
def test_where_nothing_may_be_written_nothing_is(name: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    words = arguments(name, tmp_path / "out" / "target")
    (tmp_path / "out").chmod(0o555)
    assert ended(start(words, drop_capabilities)) == 2
    assert [*(tmp_path / "out").iterdir()] == []


def turn_the_clock_back() -> None:
    """An hour at each look at it."""
    looks = itertools.count(1)
    began = time.time()
    time.time = lambda: began - 3600 * next(looks)
    time.time_ns = lambda: int(time.time() * 1e9)


@pytest.mark.parametrize(
    "name", ["align", "convert", "eval", "fuse", "route discover", "stack", "train"]
)
def test_a_clock_that_runs_backwards_changes_no_figure(name: str, tmp_path: Path) -> None:
    found: list[object] = []
    for change in (None, turn_the_clock_back):
        target = tmp_path / str(len(found)) / "target"
        target.parent.mkdir()
        assert ended(start_command_line(arguments(name, target), change)) in (0, 3)
        result = Result.open(target)
        assert CHANGED not in result.standing.reasons
        assert (result.environment.seconds or 0) >= 0
        found.append((result.outcome, result.plan_sha256, result.verdict))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", WRITERS)
def test_of_two_writers_one_is_refused(name: str, tmp_path: Path) -> None:
    """Whichever comes first to the place where only one may be."""
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "target"
    words = arguments(name, target)
    first = start(words, partial(stop_at, 4, str(tmp_path / "out")))
    while first.is_alive() and not is_stopped(first.pid or 0):
        time.sleep(0.05)
    assert first.is_alive()
    try:
        second = run(words, timeout=1500)
    finally:
        os.kill(first.pid or 0, signal.SIGCONT)
    refused = second.returncode == 2
    assert not refused or "another process" in second.stderr, second.stderr
    # a second `grow` that is through has changed the store, which the first is told
    late = 1 if name == "grow" else 2
    assert ended(first) in ((0, 3) if refused else (late,))
    assert refused or second.returncode in (0, 3), second.stderr
    # the work of one that found the target there when it was done is kept
    left = {path.name for path in target.parent.iterdir()}
    assert left <= {target.name, f".{target.name}.work"}, left
    if (target / RESULT).exists():
        assert CHANGED not in Result.open(target).standing.reasons
