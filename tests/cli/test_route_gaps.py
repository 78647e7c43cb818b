"""`mlxstacks route gaps` on the command line. Run: pytest tests/cli/test_route_gaps.py"""

import json
from pathlib import Path

import numpy as np

from mlxstacks.routing.gaps import GapLog
from tests.cli.conftest import Run


def test_groups_as_a_table_or_json(work_dir: Path, command: Run) -> None:
    code, out, _ = command("route", "gaps")  # nothing was logged yet
    assert (code, "Verdict: no gap events" in out) == (0, True)
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
