"""Processes of a group on this machine, joined as `mlx.launch --backend ring` joins them.

pytestmark = needs_group
assert in_group(tmp_path, "train", "--model", ...) == [0, 0]
"""

import json
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.warm import Child


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in opened:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in opened]


def can_listen() -> bool:
    try:
        with socket.socket() as opened:
            opened.bind(("127.0.0.1", 0))
            opened.listen()
    except OSError:
        return False
    return True


needs_group = pytest.mark.skipif(
    sys.platform != "linux" or not can_listen(),
    reason="forks processes, as tests/warm.py, that talk over sockets",
)


def start_group(
    directory: Path, *arguments: str, module: str = "mlxstacks.cli", count: int = 2
) -> list[Child]:
    """`python -m module arguments` in so many processes; what they print is in `directory`/RANK."""
    hosts = directory / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(count)]))
    children = []
    for rank in range(count):
        env = {**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
        with (directory / str(rank)).open("wb") as printed:
            command = [sys.executable, "-m", module, *arguments]
            children.append(Child(command, env=env, stdout=printed, stderr=printed))
    return children


def in_group(directory: Path, *arguments: str, **more: Any) -> list[int]:
    """The exit codes of such processes."""
    return [child.wait(120) for child in start_group(directory, *arguments, **more)]
