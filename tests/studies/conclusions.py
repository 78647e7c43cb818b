"""A finished run whose result is edited and sealed again: its own files give the edit away."""

import json
from pathlib import Path

from mlxstacks.report.conclude_again import check_conclusion
from mlxstacks.study.result import Result


def assert_its_files_give_edits_away(target: Path, figure: str) -> None:
    """figure: path in `data` of a number that follows from the files."""
    result = Result.open(target)
    assert check_conclusion(result, target) == result
    data = json.loads(json.dumps(result.as_json()["data"]))
    *path, last = figure.split(".")
    place = data
    for name in path:
        place = place[int(name) if isinstance(place, list) else name]
    place[last] += 1
    edits = {"verdict": "All is well.", "outcome": "It works.", "data": data}
    for field, value in edits.items():
        forged = result.model_copy(update={field: value}).sealed()
        [reason] = {*check_conclusion(forged, target).standing.reasons} - {*result.standing.reasons}
        assert reason.startswith(f"another {'data.' + figure if field == 'data' else field} ")
    versions = {"mlxstacks": "0.0.1"}  # whose words may differ for that alone
    assert result.environment
    older = result.environment.model_copy(update={"versions": versions})
    forged = result.model_copy(update={"environment": older, "verdict": "All is well."})
    assert check_conclusion(forged, target) == forged
