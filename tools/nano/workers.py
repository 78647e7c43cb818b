"""Data parallelism on one machine: several processes joined by the ring backend of MLX."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


def run_in_processes(module: str, arguments: list[str], count: int) -> None:
    """Run `python -m module *arguments` in `count` processes that can join one group.

    What they print on stdout is dropped: that of the caller is its own.

    Raises:
        RuntimeError: a process failed; the others are ended first.
    """
    with tempfile.TemporaryDirectory() as directory:
        hosts = Path(directory) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(count)]))
        processes = []
        for rank in range(count):
            # One BLAS thread each: the processes share the cores, and sums are added in one order.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": _path()}
            if count > 1:
                environment |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
            command = [sys.executable, "-m", module, *arguments]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        _wait_for_all(processes)


def _wait_for_all(processes: list[subprocess.Popen[bytes]]) -> None:
    waiting = list(processes)
    try:
        while waiting:
            for process in list(waiting):
                try:
                    code = process.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    continue
                if code:
                    raise RuntimeError(f"a training process ended with exit code {code}")
                waiting.remove(process)
    finally:
        for process in waiting:
            process.kill()
            process.wait()


def _path() -> str:
    """This clone first: `tools` is no part of what is installed."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for opened in sockets:
        opened.bind(("127.0.0.1", 0))
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports
