"""Where the metrics of a training go: a CSV file always, and trackio or W&B on request.

Both packages have the calls of `Run`. Numbers alone are sent, none of them a text of the data, and
of the settings no path.
"""

import csv
import importlib
import io
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mlxstacks.errors import InputError
from mlxstacks.files.outputs import write_file
from mlxstacks.training.settings import StackRunSettings, TrainSettings

_LOGGED = {"step": "train", "validation": "validation"}


class Run(Protocol):
    """A run of `trackio` or `wandb`."""

    def log(self, data: dict[str, Any], /, step: int | None = None) -> Any: ...
    def finish(self) -> Any: ...


Logged = TrainSettings | StackRunSettings


def check_logger(settings: Logged) -> None:
    """Before a training begins. Raises: InputError: the package is not installed."""
    if settings.log_to is not None and find_spec(settings.log_to) is None:
        package = settings.log_to
        raise InputError(
            f"--log-to: {package} is not installed; `pip install 'mlxstacks[{package}]'`, or leave "
            "it out"
        )


class Metrics:
    """Sends numbers of a training where `log_to` says, and nowhere without it or without settings.

    A failure while a run is begun is an error. Later ones end the sending and become a note in
    `notes`: the training is worth more than its curve.
    """

    def __init__(self, settings: Logged | None, notes: list[str]) -> None:
        self.to: str | None = None if settings is None else settings.log_to
        self._run: Run | None = None
        self.notes = notes
        if settings is None or self.to is None:
            return
        dumped = settings.model_dump().items()
        plain = {key: value for key, value in dumped if isinstance(value, bool | int | float)}
        try:
            self._run = importlib.import_module(self.to).init(
                project=settings.log_project, name=settings.log_name, config=plain
            )
        except Exception as error:  # of another's package, which may raise anything
            raise InputError(
                f"log_to: {self.to} does not begin a run ({_line(error)}); log in to it, or leave "
                "log_to out"
            ) from error

    def log(self, event: str, record: Mapping[str, Any], step: int | None, of: str = "") -> None:
        """The numbers of a line of the log. step: None where steps begin again, as of domains,
        whose name `of` begins the names of the metrics.
        """
        kind = _LOGGED.get(event)
        numbers = {
            f"{of}{kind}/{key}": value for key, value in record.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }  # fmt: skip
        if kind and numbers and (run := self._run) is not None:
            self._try(lambda: run.log(numbers, step=step))

    def finish(self) -> None:
        """Twice is once."""
        run, self._run = self._run, None
        if run is not None:
            self._try(run.finish)

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # as above
            self._run = None
            self.notes.append(f"{self.to} failed and got no more metrics: {_line(error)}.")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def write_csv(log: Path, path: Path) -> None:
    """The metrics in a log.jsonl as a table: a row an event, a column for each name that occurs."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    rows = []
    for line in lines:
        with suppress(ValueError, AttributeError):  # of a store's: half a line of a dead writer
            rows += [record] if (record := json.loads(line)).get("event") in _LOGGED else []
    text = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())
