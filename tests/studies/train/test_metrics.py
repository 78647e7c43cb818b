"""`--log-to`: numbers of `train`, `align` and `stack` go to trackio or W&B, and always to
metrics.csv; what fails there stops nothing and changes no weight. Both packages are stand-ins with
their calls.

Run: pytest tests/studies/train/test_metrics.py
"""

import csv
import json
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlxstacks.errors import InputError
from mlxstacks.studies.stack import run as stack_run
from mlxstacks.studies.train import align
from mlxstacks.studies.train import run as train_run
from mlxstacks.studies.train.setup import set_up
from mlxstacks.study.result import Result
from tests.studies import stack_cases
from tests.studies.train.test_align import pairs, settings_of
from tests.studies.train_cases import settings_for, write_rows


class Package(ModuleType):
    """trackio, or wandb. fails_at: the call of `log` from which on it raises; 0: `init` does."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, Any], int | None]] = []
        self.fails_at, self.calls, self.finished = sys.maxsize, 0, 0
        monkeypatch.setitem(sys.modules, name, self)

    def init(self, **given: Any) -> "Package":
        if not self.fails_at:
            raise RuntimeError("no key")
        self.begun.append(given)
        return self

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.calls += 1
        if self.calls >= self.fails_at:
            raise OSError("the server\nis gone")
        self.logged.append((data, step))

    def finish(self) -> None:
        self.finished += 1


def events(target: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (target / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] in ("step", "validation")]


@dataclass(frozen=True)
class Training:
    """A command that trains an adapter. settings: of a run to a target; done: one without a
    logger.
    """

    run: Callable[..., Any]
    settings: Callable[..., Any]
    done: Path


@pytest.fixture(scope="module", params=["train", "align"])
def training(
    request: pytest.FixtureRequest,
    places: tuple[Path, Path],
    trained: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Training:
    if request.param == "train":
        return Training(train_run.run, partial(settings_for, *places), trained[1])
    directory = tmp_path_factory.mktemp("aligned")
    write_rows(directory / "data" / "train.jsonl", pairs(20))
    write_rows(directory / "data" / "valid.jsonl", pairs(8))
    settings = partial(settings_of, (places[0], directory / "data"))
    align.run(settings(directory / "adapter"))
    return Training(align.run, settings, directory / "adapter")


def test_every_number_of_the_log_is_sent_and_stands_in_the_table(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, target = Package("trackio", monkeypatch), tmp_path / "adapter"
    settings = training.settings(target, log_to="trackio", log_project="mine", log_name="one")
    training.run(settings)
    kinds = {"step": "train", "validation": "validation"}
    apart = {"step", "event"}
    wanted = [
        ({f"{kinds[line['event']]}/{key}": line[key] for key in line if key not in apart},
         line["step"])
        for line in events(target)
    ]  # fmt: skip
    assert package.logged == wanted
    steps = [step for _, step in package.logged]
    assert steps == sorted(s for s in steps if s is not None)  # W&B drops what comes out of order
    (begun,) = package.begun
    assert (begun["project"], begun["name"], package.finished) == ("mine", "one", 1)
    assert begun["config"]["rank"] == 2
    assert not any(isinstance(value, str) for value in begun["config"].values())  # no path, no text
    with (target / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    assert rows == [{k: str(v) for k, v in line.items()} for line in events(target)]
    weights = "adapters.safetensors"
    assert (target / weights).read_bytes() == (training.done / weights).read_bytes()
    # a run that was stopped goes on with another logger, or none
    quiet = settings.model_copy(update={"log_to": None, "log_project": "x", "log_name": None})
    setup = set_up(settings)
    assert setup.identity(settings) == setup.identity(quiet)


def test_trackio_itself_keeps_them(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is installed; it writes to a data base on this machine."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "kept"))
    pytest.importorskip("trackio")
    train_run.run(settings_for(*places, tmp_path / "adapter", log_to="trackio"))
    with sqlite3.connect(tmp_path / "kept" / "mlxstacks.db") as kept:
        rows = kept.execute("select step, metrics from metrics order by id").fetchall()
    assert [step for step, _ in rows] == [e["step"] for e in events(tmp_path / "adapter")]
    assert json.loads(rows[0][1])["validation/validation_loss"] > 0


def test_a_logger_that_fails_stops_nothing(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, target = Package("wandb", monkeypatch), tmp_path / "adapter"
    package.fails_at = 3
    training.run(training.settings(target, log_to="wandb"))
    assert (len(package.logged), package.calls, package.finished) == (2, 3, 0)
    note = "wandb failed and got no more metrics: OSError: the server is gone."
    assert note in Result.open(target).notes
    assert (target / "adapters.safetensors").read_bytes() == (
        training.done / "adapters.safetensors"
    ).read_bytes()
    assert len(events(target)) == len(events(training.done))


def test_before_training_it_is_an_error(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "adapter"
    settings = settings_for(*places, target, log_to="wandb")
    monkeypatch.setattr("mlxstacks.training.metrics.find_spec", lambda name: None)
    for dry_run in (True, False):
        with pytest.raises(
            InputError, match=r"wandb is not installed; `pip install 'mlxstacks\[wandb\]'`"
        ):
            train_run.run(settings, dry_run=dry_run)
    with pytest.raises(InputError, match=r"wandb is not installed"):
        stack_run.run(stack_cases.settings_for(*places, target, log_to="wandb"))
    monkeypatch.undo()
    Package("wandb", monkeypatch).fails_at = 0
    with pytest.raises(InputError, match=r"wandb does not begin a run \(RuntimeError: no key\)"):
        train_run.run(settings)
    assert not [*tmp_path.iterdir()]


def test_metrics_of_stacks_bear_the_names_of_domain_and_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Package("trackio", monkeypatch)
    places = stack_cases.write_places(tmp_path)
    store = stack_cases.train_store(places, tmp_path / "store", **stack_cases.TWO, log_to="trackio")
    lines = events(store.path)
    assert len(package.logged) == len(lines)
    for line, (data, step) in zip(lines, package.logged, strict=True):
        start = f"{line['domain']}-r{line['round']}/"
        kind = "train" if line["event"] == "step" else "validation"
        assert step is None  # those of the next round begin again
        assert data[f"{start}{kind}/step"] == line["step"]
        assert all(name.startswith(start) for name in data)
    with (store.path / "metrics.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [(r["domain"], r["step"], r["event"]) for r in rows] == [
        (line["domain"], str(line["step"]), line["event"]) for line in lines
    ]
    # it is the store's own: a store that is begun again takes its place
    stack_cases.train_store(places, store.path, **stack_cases.TWO, force=True)
