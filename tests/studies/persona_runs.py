"""Runs of `confound` and `identity` as they are typed, and such as are killed."""

import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from mlxstacks import cli
from mlxstacks.study.result import Result


@dataclass(frozen=True)
class Done:
    """A run as it is typed: its result, its target, what was printed."""

    result: Result
    target: Path
    text: str
    recipe: Path


def typed_run(target: Path, **recipe: Any) -> Done:
    path = target.with_suffix(".yaml")
    path.write_text(json.dumps(recipe))
    with redirect_stdout(StringIO()) as printed:
        assert cli.run(["run", str(path)]) == 0
    return Done(Result.open(target), target, " ".join(printed.getvalue().split()), path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Killed(BaseException):
    """See the fixture `killed_after`."""
