"""Two processes that share a training have the losses and gradients of one; where each takes whole
batches, its bytes.

Run: pytest tests/training/test_group.py
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlxstacks.errors import InputError
from mlxstacks.processes import (
    current_group,
    dealing,
    dealing_over,
    gathered,
    sent_from,
    size_and_rank,
)
from mlxstacks.studies.stack import align
from mlxstacks.studies.train.run import run
from mlxstacks.training.settings import AlignSettings, TrainSettings
from tests.groups import in_group, needs_group
from tests.studies.train.test_align import pairs
from tests.studies.train_cases import settings_for, write_data, write_rows, write_tiny_model

VALUES = [1, 0.1, None, "tolu"]


def main() -> None:
    """One process of a group."""
    group = current_group()
    assert group is not None
    size, rank = size_and_rank(group)
    assert gathered(VALUES[rank], group) == VALUES[:size]
    assert sent_from(1, b"tolu" if rank else b"", 4, group) == b"tolu"
    with dealing_over(group):
        assert (current_group(), dealing()) == (None, group)
    if len(sys.argv) > 1:
        settings = json.loads(sys.argv[1])
        if "method" in settings:
            align.run(AlignSettings.model_validate(settings))
        else:
            run(TrainSettings.model_validate(settings))


if __name__ == "__main__":
    main()


def run_in_group(directory: Path, settings: TrainSettings) -> list[int]:
    text = json.dumps(settings.model_dump(mode="json", exclude_unset=True))
    return in_group(directory, text, module=__name__)


def weights(directory: Path) -> bytes:
    return (directory / "adapters.safetensors").read_bytes()


@needs_group
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """The last batch of an epoch has one row: one process then takes part without any."""
    model, data = write_tiny_model(tmp_path / "model"), write_data(tmp_path / "data", train=5)
    changes = {"iters": 4, "dropout": 0.0, "grad_accumulation_steps": 1}
    assert gathered(5, current_group()) == [5]
    run(settings_for(model, data, tmp_path / "one", **changes))
    settings = settings_for(model, data, tmp_path / "two", **changes)
    assert run_in_group(tmp_path, settings) == [0, 0], (tmp_path / "0").read_text()
    one, two = (
        json.loads((tmp_path / name / "result.json").read_text())["data"] for name in ("one", "two")
    )
    assert (one["processes"], two["processes"]) == (1, 2)
    for mine, theirs in zip(one["history"], two["history"], strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=2e-4)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=2e-3)
    for mine, theirs in zip(one["validation"], two["validation"], strict=True):
        assert theirs["validation_loss"] == pytest.approx(mine["validation_loss"], abs=2e-4)


@needs_group
@pytest.mark.parametrize("method", [None, "dpo", "orpo"])
def test_whole_batches_give_the_bytes_of_one_process(tmp_path: Path, method: str | None) -> None:
    model, data = write_tiny_model(tmp_path / "model"), write_data(tmp_path / "data")
    values = settings_for(model, data, tmp_path / "one", grad_accumulation_steps=4)
    one = values.model_dump(exclude_unset=True)
    kind: type[TrainSettings] = TrainSettings
    if method is not None:
        kind = AlignSettings
        one |= {"method": method, "data": str(tmp_path / "pairs"), "learning_rate": 3e-3}
        write_rows(tmp_path / "pairs" / "train.jsonl", pairs(20))
        write_rows(tmp_path / "pairs" / "valid.jsonl", pairs(8))
    settings = kind(**one)
    align.run(settings) if isinstance(settings, AlignSettings) else run(settings)
    two = kind(**one | {"save_path": str(tmp_path / "two")})
    assert run_in_group(tmp_path, two) == [0, 0], (tmp_path / "0").read_text()
    assert weights(tmp_path / "two") == weights(tmp_path / "one")


@needs_group
def test_batches_that_cannot_be_shared_evenly_are_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    write_rows(tmp_path / "data" / "train.jsonl", pairs(8))
    write_rows(tmp_path / "data" / "valid.jsonl", pairs(4))
    values = settings_for(model, tmp_path / "data", tmp_path / "out", grad_accumulation_steps=1)
    settings = AlignSettings(**values.model_dump(exclude_unset=True) | {"method": "orpo"})
    assert run_in_group(tmp_path, settings) != [0, 0]
    assert "has to be a multiple of 2; it is 1" in (tmp_path / "0").read_text()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no MPI")
def test_mpirun_joins_processes(tmp_path: Path) -> None:
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    command = ["mpirun", "--oversubscribe", "-n", "2", sys.executable, "-m", __name__]
    env = {**os.environ, **dict.fromkeys(names, "1")}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_processes_of_mpi_without_its_library_do_not_work_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(mx.distributed, "init", _not_there)
    with pytest.raises(InputError, match=r"cannot be joined: .*library of MPI in MLX_MPI_LIBNAME"):
        current_group()


def _not_there(*, strict: bool) -> None:
    assert strict
    raise RuntimeError("[distributed] Couldn't initialize any backend")


def test_hosts_that_cannot_be_joined_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "none.json"))
    with pytest.raises(InputError, match=r"cannot be joined: .*none\.json.*start them with mlx"):
        current_group()
    (tmp_path / "none.json").write_text("")
    assert current_group() is None  # of `mlx.launch -n 1`
