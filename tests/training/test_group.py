"""Two processes that share every batch have the losses and gradients of one.

Run: pytest tests/training/test_group.py
"""

import json
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from mlxstacks.studies.train.run import run
from mlxstacks.training.settings import TrainSettings
from mlxstacks.training.step import current_group, gathered, size_and_rank
from tests.studies.train_cases import settings_for, write_data, write_tiny_model
from tests.warm import Child


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in opened:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in opened]


def main() -> None:
    """One process of a group."""
    size, rank = size_and_rank(current_group())
    assert gathered(rank + 5, current_group()) == list(range(5, 5 + size))
    run(TrainSettings.model_validate_json(sys.argv[1]))


def can_listen() -> bool:
    try:
        with socket.socket() as opened:
            opened.bind(("127.0.0.1", 0))
            opened.listen()
    except OSError:
        return False
    return True


needs_sockets = pytest.mark.skipif(not can_listen(), reason="no sockets on this machine")


@pytest.mark.skipif(sys.platform != "linux", reason="starts processes by forking, as tests/warm.py")
@needs_sockets
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """The last batch of an epoch has one row: one process then takes part without any."""
    model, data = write_tiny_model(tmp_path / "model"), write_data(tmp_path / "data", train=5)
    changes = {"iters": 4, "dropout": 0.0, "grad_accumulation_steps": 1}
    assert gathered(5, current_group()) == [5]
    run(settings_for(model, data, tmp_path / "one", **changes))
    settings = settings_for(model, data, tmp_path / "two", **changes)
    # What `mlx.launch --backend ring` tells its processes.
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    command = [sys.executable, "-m", __name__, settings.model_dump_json()]
    children = [
        Child(command, env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [child.wait(60) for child in children] == [0, 0]
    one, two = (
        json.loads((tmp_path / name / "result.json").read_text())["data"] for name in ("one", "two")
    )
    assert (one["processes"], two["processes"]) == (1, 2)
    for mine, theirs in zip(one["history"], two["history"], strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=2e-4)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=2e-3)
    for mine, theirs in zip(one["validation"], two["validation"], strict=True):
        assert theirs["validation_loss"] == pytest.approx(mine["validation_loss"], abs=2e-4)
