"""kill -9 at random moments of `mlxstacks stack` on nano: what comes of it is what one run makes.

Run: MLXSTACKS_SOAK=1 pytest tests/studies/stack/test_kills.py (minutes; prints the counts).
test_stack_faults.py kills a smaller model in every `make test`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.files.store import Store
from mlxstacks.study.run_directory import work_path
from tests.studies.stack_cases import hashes, log_of

# The shipped recipe, shortened: two domains of two rounds, saved and logged often.
COMMAND = [
    "-m", "mlxstacks", "stack", "--domains", "letters", "--domains", "islands", "--iters", "6",
    "--steps-per-eval", "3", "--steps-per-report", "1", "--save-every", "2",
]  # fmt: skip
OF_THE_MOMENT = ("time", "seconds", "tokens_per_second", "peak_bytes")


def start(directory: Path) -> "subprocess.Popen[bytes]":
    """The command in a directory; the store is its mlxstacks-out/stack."""
    with (directory / "stderr.txt").open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, *COMMAND], cwd=directory, stdout=subprocess.DEVNULL, stderr=stderr,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip


def finish(directory: Path) -> Path:
    """Let the command end; returns the store, whole and without leftovers beside it."""
    assert start(directory).wait() == 0, (directory / "stderr.txt").read_text()
    store = directory / "mlxstacks-out" / "stack"
    assert [path.name for path in store.parent.iterdir()] == ["stack"]
    return store


def measured(value: Any) -> Any:
    """A JSON value without what another moment makes different."""
    if isinstance(value, dict):
        return {key: measured(one) for key, one in value.items() if key not in OF_THE_MOMENT}
    return [measured(one) for one in value] if isinstance(value, list) else value


def losses(store: Path) -> dict[str, Any]:
    """Every loss of every step, validation, round and mode, from log and result."""
    data = json.loads((store / "result.json").read_text())["data"]
    rounds = {name: domain["rounds"] for name, domain in data["domains"].items()}
    # killed while it is handed over, a line comes twice
    log = {
        json.dumps(measured(event), sort_keys=True)
        for event in log_of(store)
        if event["event"] != "resumed"
    }
    return {"matrix": data["matrix"], "rounds": measured(rounds), "log": log}


def moment(store: Path) -> str:
    """Where a run was when it was killed, by what lies on the disk."""
    done = len(Store.open(store).manifest.domains) if store.is_dir() else 0
    under_way = "under way" if work_path(store).is_dir() else "no work"
    return f"{done} domains in the store, {under_way}"


@pytest.mark.slow
def test_nano_killed_at_random_moments_ends_with_the_same_bytes_and_losses(
    tmp_path: Path,
    campaign: Callable[..., range],
    record_property: Callable[[str, object], None],
) -> None:
    """Each run is killed somewhere in the time that a whole one takes, its start included, and the
    next goes on. A run that ends before its moment is compared and begun anew.
    """
    (whole := tmp_path / "whole").mkdir()
    began = time.monotonic()
    known = finish(whole)
    duration = time.monotonic() - began
    (killed := tmp_path / "killed").mkdir()
    store, chance = killed / "mlxstacks-out" / "stack", random.Random(5)
    wanted, endings, moments = len(campaign(100, usual=3)), 0, Counter[str]()

    def same() -> bool:
        assert hashes(store) == hashes(known)
        assert losses(store) == losses(known)
        return True

    while moments.total() < wanted:
        process = start(killed)
        try:
            process.wait(timeout=chance.uniform(0, duration))
        except subprocess.TimeoutExpired:
            process.kill()
        if process.wait() == -signal.SIGKILL:
            moments[moment(store)] += 1
            continue
        assert process.returncode == 0, (killed / "stderr.txt").read_text()
        endings += same()
        shutil.rmtree(store)
    assert finish(killed) == store
    assert same()
    assert moments.total() == wanted
    record_property("campaign", f"{wanted} kills, {endings + 1} whole runs; {dict(moments)}")


@pytest.fixture(autouse=True)
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A failed assertion must not leave a training running."""
    made: list[subprocess.Popen[bytes]] = []
    plain = subprocess.Popen

    def kept(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
        made.append(plain(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(subprocess, "Popen", kept)
    yield
    for process in made:
        if process.poll() is None:
            process.kill()
            process.wait()
