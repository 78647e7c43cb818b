"""A finished run whose result is edited and sealed again: its own files give the edit away."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxstacks.keywords import said_in_python
from mlxstacks.report.conclude_again import check_conclusion
from mlxstacks.report.find import find_sources
from mlxstacks.study.result import Result


def assert_its_files_give_edits_away(target: Path, figure: str) -> None:
    """figure: path in `data` of a number that follows from the files."""
    result = Result.open(target)
    again = check_conclusion(result, target)
    opened = said_in_python(again)
    assert opened == result.model_copy(update={"notes": opened.notes})
    assert again.notes[-1] == "Conclusion drawn again from its files: the same figures."
    edits = {"verdict": "All is well.", "outcome": "It works.", "blocks": (), "failed_gate": "no"}
    assert check_conclusion(result.model_copy(update=edits), target) == again
    # Not sealed again: marked, and its own words are not shown either.
    document = json.loads((target / "result.json").read_text())
    with TemporaryDirectory() as directory:
        copy = Path(directory) / "run"
        shutil.copytree(target, copy)
        (copy / "result.json").write_text(json.dumps(document | {"verdict": "All is well."}))
        [source], _ = find_sources([str(copy)])
    assert source.result.standing.reasons[-1] == "result.json was changed after the run"
    assert source.result.verdict != "All is well."
    data = json.loads(json.dumps(result.as_json()["data"]))
    *path, last = figure.split(".")
    place = data
    for name in path:
        place = place[int(name) if isinstance(place, list) else name]
    place[last] += 1
    for forged, named in ((data, figure), ({**result.data, "score": 0.987}, "score")):
        found = check_conclusion(result.model_copy(update={"data": forged}), target)
        reason = f"other figures follow from its files: {named}"
        assert found.standing.reasons == (*result.standing.reasons, reason)
