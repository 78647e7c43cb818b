"""What makes a conclusion another one than the files bear out. Run: pytest tests/report"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.report import conclude_again
from mlxstacks.report.conclude_again import check_conclusion
from mlxstacks.study.document import Environment
from mlxstacks.study.result import Result

DATA = {"rows": [{"mean": 0.3, "n": 3}, {"mean": None, "n": 0}], "words": "as it is"}
HERE = Environment(versions={"mlxstacks": version("mlxstacks")})


def reasons(
    monkeypatch: pytest.MonkeyPatch, directory: Path, drawn: Any = None, **about: Any
) -> tuple[str, ...]:
    """Of a result whose files give `drawn`; an exception is raised."""

    def draw(result: Result, given: Path) -> Any:
        assert given == directory
        if isinstance(drawn, Exception):
            raise drawn
        return {"verdict": "It falls.", "data": drawn or {}}

    monkeypatch.setitem(conclude_again._DRAW, "coin", draw)
    (directory / "answers.json").write_text("[]")
    head = {
        "kind": "coin", "title": "Coin", "status": "done", "verdict": "It falls.", "data": DATA,
        "environment": HERE, "provenance": {"answers.json": {}},
    }  # fmt: skip
    return check_conclusion(Result(**{**head, **about}), directory).standing.reasons


@pytest.mark.parametrize(
    ("drawn", "named"),
    [
        (DATA, None),
        ({"rows": [{"mean": 0.3 + 1e-8}, {"n": 0}]}, None),  # the last digits of another machine
        ({"words": "as it is"}, None),  # nothing is said of the rest
        ({"rows": [{"mean": 0.31}, {}]}, "data.rows.0.mean"),
        ({"rows": [{"mean": 0.3 + 1e-6}, {}]}, "data.rows.0.mean"),
        ({"rows": [{"n": 4}, {"mean": 0.0}]}, "data.rows.0.n, data.rows.1.mean"),
        ({"rows": [{}]}, "data.rows"),
        ({"words": "other", "more": 1}, "data.words, data.more"),
        ({"rows": {"0": 1}}, "data.rows"),
    ],
)
def test_what_differs_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drawn: Any, named: str | None
) -> None:
    expected = (f"another {named} follows from the files next to it",) if named else ()
    assert reasons(monkeypatch, tmp_path, drawn) == expected


def test_a_verdict_is_named_before_what_was_found_earlier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = reasons(monkeypatch, tmp_path, DATA, verdict="All is well.")
    assert found == ("another verdict follows from the files next to it",)


def test_files_of_which_nothing_can_be_made_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    [reason] = reasons(monkeypatch, tmp_path, ZeroDivisionError("x" * 999))
    assert reason == f"nothing follows from the files next to it: {'x' * 200}"


@pytest.mark.parametrize(
    "about",
    [
        {"kind": "toss"}, {"status": "planned"}, {"provenance": {"absent.json": {}}},
        {"environment": Environment(versions={"mlxstacks": "0.0.1"})},
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, about: dict[str, Any]
) -> None:
    assert reasons(monkeypatch, tmp_path, {"words": "other"}, **about) == ()
