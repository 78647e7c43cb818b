"""What a run of the tests prints at its end. Run: pytest tests/test_conftest.py"""

import multiprocessing
import re
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest

from tests import warm
from tests.conftest import pytest_sessionfinish, pytest_terminal_summary


def test_the_cpu_time_is_that_of_forked_processes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed() -> int:
        lines: list[str] = []
        reporter: Any = SimpleNamespace(stats={}, write_line=lines.append)
        pytest_terminal_summary(reporter)
        [line] = lines
        match = re.fullmatch(r"CPU time of all processes: (\d+) s \(\d+ user, \d+ system\)", line)
        assert match is not None
        return int(match[1])

    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    monkeypatch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
    monkeypatch.setattr(warm, "_OTHER_SERVERS", {})
    before = printed()
    burn = "import time\nwhile time.process_time() < 1.05: pass"
    process = multiprocessing.get_context("forkserver").Process(target=exec, args=(burn,))
    process.start()
    process.join()
    pytest_sessionfinish()
    assert printed() > before
