"""What a run of the tests prints at its end. Run: pytest tests/test_conftest.py"""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from tests.conftest import pytest_terminal_summary


def test_the_cpu_time_is_that_of_child_processes_too() -> None:
    def printed() -> int:
        lines: list[str] = []
        reporter: Any = SimpleNamespace(stats={}, write_line=lines.append)
        pytest_terminal_summary(reporter)
        [line] = lines
        match = re.fullmatch(r"CPU time of all processes: (\d+) s \(\d+ user, \d+ system\)", line)
        assert match is not None
        return int(match[1])

    before = printed()
    burn = "import time\nwhile time.process_time() < 1.05: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert printed() > before
