"""The census counts what its docstring says.

Run: pytest tests/test_census.py
"""

from benchmarks.census import census

ONE = """
import scipy.stats

def _helper():
    found = 1
    return found

def _shared():
    made: int = 2

def public():
    _helper()
    _shared()
    return _shared
"""


def test_a_small_house_is_counted() -> None:
    sources = {
        "mlxstacks/studies/confound/run.py": ONE,
        "mlxstacks/recipe/table.py": 'ROWS = {"confound": 1, "identity": 2}\n',
        "mlxstacks/report/identity.py": "from safetensors import safe_open\n",
        "tests/test_it.py": "x = 1\ny = 2\n",
        "README.md": "a\nb\nc\n",
    }
    counts = census(sources)
    assert counts["lines of the package"] == str(ONE.count("\n") + 2)
    assert counts["lines of tests"] == "2"
    assert counts["files of the package"] == "3"
    assert counts["helpers called once"] == "50%"
    assert counts["vague names"] == "2"
    assert counts["files naming a study"] == "1.0"  # confound 1, identity 2, profile 0
    assert counts["lines of the README"] == "3"
    assert (counts["files importing scipy"], counts["files importing datasets"]) == ("1", "0")
    assert counts["files importing safetensors"] == "1"
