"""The command line under `mlx.launch`: answers of a model on two processes, and what is refused.

Run: pytest tests/cli/test_group.py
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import Run
from tests.groups import free_ports, in_group, needs_group

GENERATE = (
    "generate", "-p", "How many islands has Tolu?", "--compare", "--temp", "0", "--max-tokens", "8",
    "--json",
)  # fmt: skip


def answers(text: str) -> list[tuple[str, str]]:
    return [(answer["mode"], answer["text"]) for answer in json.loads(text)["answers"]]


@needs_group
def test_two_processes_answer_as_one(tmp_path: Path, command: Run) -> None:
    _, document, _ = command(*GENERATE)
    one = answers(document)
    assert in_group(tmp_path, *GENERATE) == [0, 0], (tmp_path / "1").read_text()
    printed = (tmp_path / "0").read_text()
    assert answers(printed[printed.index("{\n") :]) == one
    assert (tmp_path / "1").read_text() == ""


@needs_group
def test_what_runs_in_one_process_is_refused_by_launch(tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("mlx.launch")), "-n", "2", "--starting-port",
        str(free_ports(1)[0]), "--", sys.executable, "-m", "mlxstacks", "convert", "--dry-run",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "`mlxstacks convert` runs in one process; start it without mlx.launch" in ended.stderr
