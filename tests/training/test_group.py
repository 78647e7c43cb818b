"""Two processes that share every batch have the losses and gradients of one.

Run: pytest tests/training/test_group.py
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlxstacks.studies.train.run import run
from mlxstacks.training.group import current_group, gathered
from tests.studies.train_cases import settings_for, write_data, write_tiny_model

LAUNCHER = Path(sys.executable).with_name("mlx.launch")


def free_port() -> int:
    """The launcher's own port is the same for all who launch on this machine."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def can_listen() -> bool:
    try:
        with socket.socket() as opened:
            opened.bind(("127.0.0.1", 0))
            opened.listen()
    except OSError:
        return False
    return True


needs_sockets = pytest.mark.skipif(not can_listen(), reason="no sockets on this machine")


@needs_sockets
@pytest.mark.skipif(not LAUNCHER.exists(), reason="mlx.launch is not beside the interpreter")
def test_two_launched_processes_train_like_one(tmp_path: Path) -> None:
    """The last batch of an epoch has one row: one process then takes part without any."""
    model, data = write_tiny_model(tmp_path / "model"), write_data(tmp_path / "data", train=5)
    changes = {"iters": 4, "dropout": 0.0, "grad_accumulation_steps": 1}
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from mlxstacks.studies.train.run import run\n"
        "from mlxstacks.training.settings import TrainSettings\n"
        "from mlxstacks.training.group import current_group, gathered, size_and_rank\n"
        "size, rank = size_and_rank(current_group())\n"
        "assert gathered(rank + 5, current_group()) == list(range(5, 5 + size))\n"
        "run(TrainSettings.model_validate_json(sys.argv[1]))\n"
    )
    root = Path(__file__).resolve().parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1"}
    assert gathered(5, current_group()) == [5]
    run(settings_for(model, data, tmp_path / "one", **changes))
    settings = settings_for(model, data, tmp_path / "two", **changes)
    # The launcher hands the words to a shell of its own.
    words = [str(LAUNCHER), "-n", "2", "--backend", "ring", "--starting-port", str(free_port())]
    words += [sys.executable, str(program)]
    done = subprocess.run(
        [*words, settings.model_dump_json()],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (
        json.loads((tmp_path / name / "train_report.json").read_text()) for name in ("one", "two")
    )
    assert (one["processes"], two["processes"]) == (1, 2)
    for mine, theirs in zip(one["history"], two["history"], strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=2e-4)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=2e-3)
    for mine, theirs in zip(one["validation"], two["validation"], strict=True):
        assert theirs["validation_loss"] == pytest.approx(mine["validation_loss"], abs=2e-4)
