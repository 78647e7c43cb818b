"""What all tests share: devices and the soak switch, hypothesis profiles, campaign sizes.

`make test` runs everything that a plain CPU can do in minutes. `make soak` sets MLXSTACKS_SOAK=1:
tests marked `slow` run too, hypothesis draws many more examples, and a campaign runs in full
instead of a seeded tenth. The sizes that ran are printed at the end.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from mlxstacks.files.disk import use_private_temporary_directory

SOAK = os.environ.get("MLXSTACKS_SOAK") == "1"
# No test may ask the network for a model; a cached hub id still resolves.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What MLX compiles for one test is there for all, those of the commands among them.
use_private_temporary_directory()
# Exports of the built-in model: one fresh cache a run, shared by its worker processes.
if "MLXSTACKS_CACHE" not in os.environ:
    os.environ["MLXSTACKS_CACHE"] = tempfile.mkdtemp(prefix="mlxstacks-test-cache-")
    atexit.register(shutil.rmtree, os.environ["MLXSTACKS_CACHE"], ignore_errors=True)

# A first call into MLX can take long on a busy two-core machine: no deadline per example.
_SLOW_OK = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "normal", max_examples=25, deadline=None, derandomize=True, suppress_health_check=_SLOW_OK
)
settings.register_profile(
    "soak", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=_SLOW_OK
)
settings.load_profile("soak" if SOAK else "normal")

# What is imported and collected stays: the garbage collector need not walk it, again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


DEVICES = ("metal", "cuda")


def _missing_device(item: pytest.Item) -> str | None:
    """Why a test marked `metal` or `cuda` cannot run here, or None."""
    wanted = {mark.name for mark in item.iter_markers()} & set(DEVICES)
    if not wanted:
        return None
    import mlx.core as mx

    present = {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available()}
    absent = sorted(name for name in wanted if not present[name])
    return f"no {' and '.join(absent)} device" if absent else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not SOAK:
        pytest.skip("part of make soak")
    reason = _missing_device(item)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def short_judgement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fuses are judged on a quarter of the rows that ship: for tests about something else."""
    from mlxstacks.studies.agreement import judge

    rows = judge.JUDGE.read_text(encoding="utf-8").splitlines()
    (tmp_path / ".judge.jsonl").write_text("\n".join([*rows[:4], *rows[-2:]]), encoding="utf-8")
    monkeypatch.setattr(judge, "JUDGE", tmp_path / ".judge.jsonl")


@pytest.fixture
def campaign(record_property: Callable[[str, object], None]) -> Callable[..., range]:
    """`campaign(2000)` is range(2000) in a soak and range(200) otherwise, or `usual` of them; the
    size is reported.
    """

    def sized(total: int, usual: int = 0) -> range:
        count = total if SOAK else usual or max(1, total // 10)
        record_property("campaign", f"{count} of {total}")
        return range(count)

    return sized


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, so that a bare run writes nowhere else."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def emulator() -> Iterator[None]:
    """Kernels of mlxstacks.ops run in the Metal emulator; skips where there is no compiler."""
    from tests import metal_emulator

    reason = metal_emulator.unavailable()
    if reason:
        pytest.skip(reason)
    with metal_emulator.emulated():
        yield


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in DEVICES])
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A GPU as MLX's default device, on which kernels of mlxstacks.ops run; skips without one."""
    import mlx.core as mx

    from mlxstacks.ops import kernels

    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.gpu))
    try:
        assert kernels.backend() == request.param
        yield
    finally:
        mx.set_default_device(before)


def pytest_sessionfinish() -> None:
    warm = sys.modules.get("tests.warm")
    if warm is not None:
        warm.stop_servers()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Campaign sizes: how many cases of each long test really ran; CPU time of all processes."""
    lines = [
        f"{report.nodeid}: {value} cases"
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
        if name == "campaign"
    ]
    if lines:
        terminalreporter.section(
            "campaigns" + (" (soak)" if SOAK else " (a tenth; all in make soak)")
        )
        for line in sorted(lines):
            terminalreporter.write_line(line)
    # worker processes and theirs count once they have ended, which they have by now
    times = os.times()
    user = times.user + times.children_user
    system = times.system + times.children_system
    terminalreporter.write_line(
        f"CPU time of all processes: {user + system:.0f} s ({user:.0f} user, {system:.0f} system)"
    )
