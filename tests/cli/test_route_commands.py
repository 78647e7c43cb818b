"""`mlxstacks route explain`, `evaluate`, `check` and `gaps` on the command line, on a tiny store.

Run: pytest tests/cli/test_route_commands.py
"""

import json
from pathlib import Path

import numpy as np
import pytest

from mlxstacks.routing.gaps import GapLog
from tests.cli.conftest import Run
from tests.studies.route_evaluate_cases import Places, write_places


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return write_places(tmp_path_factory.mktemp("routed"))


def test_explain(places: Places, work_dir: Path, command: Run) -> None:
    own = ("--store-path", str(places.store), "--model", str(places.model))
    code, out, err = command("route", "explain", "red blue", *own, "--answer", "blue")
    assert code == 0, err
    assert "Verdict: Would be answered with" in out
    assert "oracle" in out
    code, out, _ = command("route", "explain", str(places.store), "red blue", *own[2:], "--json")
    assert (code, set(json.loads(out)["data"]["scores"])) == (0, {"alpha", "beta"})
    code, _, err = command("route", "explain", " ", *own)
    assert (code, "not blank" in err) == (2, True)


def test_evaluate(places: Places, work_dir: Path, command: Run) -> None:
    options = [
        str(places.store), "--model", str(places.model), "--data", str(places.data),
        "--unseen", str(places.unseen), "--rows-per-group", "2", "--gap-rows", "1",
        "--sample-prompts", "0",
    ]  # fmt: skip
    code, out, err = command("route", "evaluate", *options, "--dry-run")
    assert (code, "Planned only" in out) == (0, True), err
    code, out, err = command("route", "evaluate", *options)
    assert code == 0, err
    for words in (
        "Loss, nats per token",
        "Difference to ungated",
        "unseen gamma",
        "Verdict: Against the base routing",
    ):
        assert words in out
    assert (work_dir / "mlxstacks-out" / "route-evaluate" / "result.md").is_file()


def test_check(places: Places, work_dir: Path, command: Run) -> None:
    recipe = work_dir / "mine.yaml"
    recipe.write_text(
        f"command: route check\nstore_path: {places.store}\nmodel: {places.model}\n"
        "max_tokens: 2\nmodes: [base]\n"
        "prompts:\n  - {name: one, prompt: red, expect: [nothing like it]}\n"
    )
    code, out, err = command("run", "mine.yaml")
    assert code == 0, err
    assert "has none of nothing like it" in out
    code, _, err = command("run", "mine.yaml", "--set", "prompts=[{name: x, prompt: y}]")
    assert (code, "no rule; give expect" in err) == (2, True)


def test_gaps_are_groups_as_a_table_or_json(work_dir: Path, command: Run) -> None:
    code, out, _ = command("route", "gaps")  # nothing was logged yet
    assert (code, "Verdict: No gap events" in out) == (0, True)
    code, _, err = command("route", "gaps", "mine.jsonl")
    assert (code, "no log of gaps" in err) == (2, True)
    log = GapLog("mine.jsonl")
    for number in range(4):
        log.add(f"Sing [song] {number}", {"code": 0.1}, np.array([1.0, 0.01 * number]))
    code, out, _ = command("route", "gaps", "mine.jsonl", "--minimum-events", "3")
    assert (code, "Sing [song]" in out, "Verdict: 1 group" in out) == (0, True, True)
    code, out, _ = command("route", "gaps", "mine.jsonl", "--json")
    document = json.loads(out)
    assert (code, document["data"]["clusters"][0]["events"]) == (0, 4)
    assert "no domain is proposed" in document["verdict"]
