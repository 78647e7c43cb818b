"""Two processes that share a study come to what one comes to, and lose nothing where one dies.

Run: pytest tests/studies/test_group.py
"""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.nano.exports import nano_paths
from mlxstacks.recipe.table import COMMANDS, load
from mlxstacks.study import answer_log, child_process
from tests.groups import in_group, needs_group
from tests.studies import compare_cases, confound_cases, sweep_cases
from tests.studies.stack_cases import write_domains
from tests.studies.train_cases import write_data, write_tiny_model

pytestmark = needs_group
# Of time and of the machine; where a run lies; and the blocks, which tell of both.
UNLIKE = (
    "seconds", "peak", "environment", "seal", "provenance", "digest", "path", "blocks",
    "settings_sha256", "resources",
)  # fmt: skip
# Cells in the process of the rank that runs them.
CELLS: dict[str, Any] = {"sweep": sweep_cases.Cells(), "stack compare": compare_cases.Cells()}


def main() -> None:
    """COMMAND SETTINGS [RANK COUNT]: RANK dies before it has done that many batches or cells. Each
    that is done is printed.
    """
    command, settings, *fatal = sys.argv[1:]
    left = int(fatal[1]) if fatal and os.environ["MLX_RANK"] == fatal[0] else -1
    append = answer_log.AnswerLog.append

    def done(what: str) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        print("did", what, flush=True)

    def appending(log: Any, rows: Any) -> None:
        if "start" in (rows := [*rows])[0]:  # a batch of this process
            done(f"{log.path.name} {rows[0]['start']}")
        append(log, rows)

    def cell(module: str, specification: Any, log: Path, on_message: Callable[[Any], None]) -> int:
        code: int = CELLS[command](module, specification, log, on_message)
        done(f"{log.parent.name} {log.name}")
        return code

    answer_log.AnswerLog.append = appending  # type: ignore[assignment, method-assign]
    run(command, json.loads(settings), cell)


if __name__ == "__main__":
    main()


def run(command: str, settings: dict[str, Any], cell: Any = None) -> None:
    if command in CELLS:
        child_process.run_child = cell or CELLS[command]
    row = COMMANDS[command]
    load(row.function)(load(row.settings).model_validate(settings))


def alike(value: Any, without: tuple[str, ...]) -> Any:
    """A document without what differs between any two runs."""
    if isinstance(value, dict):
        kept = {key: v for key, v in value.items() if not any(word in key for word in without)}
        return {key: alike(v, without) for key, v in kept.items()}
    return [alike(v, without) for v in value] if isinstance(value, list) else value


def contents(target: Path, *without: str) -> dict[str, Any]:
    """Of every file that holds figures, answers or weights."""
    found: dict[str, Any] = {}
    for path in sorted(target.rglob("*")):
        name = str(path.relative_to(target))
        if path.suffix == ".json" and path.name[0] != ".":
            places = rf"{target.parent}/\.?{target.name}(\.rank-1)?(\.work)?"
            found[name] = json.loads(re.sub(places, "TARGET", path.read_text()))
        elif path.suffix == ".jsonl" and path.name != "log.jsonl":
            found[name] = [json.loads(line) for line in path.read_text().splitlines()]
        elif path.suffix == ".safetensors" and path.name != "checkpoint.safetensors":
            found[name] = path.read_bytes()
    return dict(alike(found, (*UNLIKE, *without)))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Command -> settings of a short run, but for where it goes."""
    place, nano = tmp_path_factory.mktemp("group"), nano_paths()
    model = write_tiny_model(place / "model")
    data = write_data(place / "data")
    target = Path("TARGET")
    return {
        "sweep": sweep_cases.sweep_settings(model, data, target).model_dump(mode="json"),
        "stack compare": compare_cases.compare_settings(
            (model, write_domains(place / "domains")), target, seeds=(0,)
        ).model_dump(mode="json"),
        "confound": confound_cases.settings_for(
            confound_cases.write_places(place / "confound", items=24), target, batch_size=4,
            policies=("refit",), probe_items=4, train={"iters": 2},
        ).model_dump(mode="json"),
        "compare": {
            "model": str(nano.model_path), "adapter_path": [str(nano.adapter_path)], "plots": False,
                "other": [str(nano.model_path)],
        },
        "eval": {
            "model": str(nano.model_path), "store_path": str(nano.store_path),
            "data": str(nano.items_path), "plots": False, "tasks": ["items"], "limit": 20,
            "arms": ["base", "routed"], "save_every": 4, "chat": "all",
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def one_process(
    settings: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Command -> what a process of its own wrote."""
    place = tmp_path_factory.mktemp("one")

    def target_of(command: str) -> Path:
        target = place / command.replace(" ", "-")
        if not target.exists():
            run(command, settings[command] | {"save_path": str(target)})
        return target

    return target_of


@pytest.mark.parametrize(
    "command",
    ["sweep", "stack compare", "compare", "eval", pytest.param("confound", marks=pytest.mark.slow)],
)
def test_two_processes_come_to_what_one_comes_to(
    settings: dict[str, dict[str, Any]],
    one_process: Callable[[str], Path],
    tmp_path: Path,
    command: str,
) -> None:
    one, two = one_process(command), tmp_path / "two"
    given = json.dumps(settings[command] | {"save_path": str(two)})
    assert in_group(tmp_path, command, given, module=__name__) == [0, 0], (
        tmp_path / "0"
    ).read_text() + (tmp_path / "1").read_text()
    assert contents(two) == contents(one)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".work")]


@pytest.mark.parametrize(
    ("command", "dies", "count"),
    [("eval", "1", "0"), ("eval", "0", "2"), ("sweep", "1", "0"),
     pytest.param("stack compare", "1", "0", marks=pytest.mark.slow),
     pytest.param("confound", "1", "1", marks=pytest.mark.slow)],
)  # fmt: skip
def test_where_one_dies_the_work_of_the_other_stays(
    settings: dict[str, dict[str, Any]],
    one_process: Callable[[str], Path],
    tmp_path: Path,
    command: str,
    dies: str,
    count: str,
) -> None:
    def done() -> list[str]:
        printed = (tmp_path / "0").read_text() + (tmp_path / "1").read_text()
        return [line for line in printed.splitlines() if line.startswith("did ")]

    one, two = one_process(command), tmp_path / "two"
    given = json.dumps(settings[command] | {"save_path": str(two)})
    first, second = in_group(tmp_path, command, given, dies, count, module=__name__)
    assert (first if dies == "0" else second) == -signal.SIGKILL
    assert "another process of the group has ended" in (tmp_path / str(1 - int(dies))).read_text()
    assert not two.exists()
    before = done()
    assert in_group(tmp_path, command, given, module=__name__) == [0, 0]
    assert before
    assert not {*before} & {*done()}

    def figures(target: Path) -> dict[str, Any]:
        """Without what tells that a process, or a stack in its cell, was resumed."""
        found = contents(target, "notes", "details", "arms")
        cells = command == "stack compare"
        return {
            name: v for name, v in found.items() if not (cells and name.endswith("/result.json"))
        }

    assert figures(two) == figures(one)
