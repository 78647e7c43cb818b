"""Plans cannot move, and results say when they are not what was planned.

Run: pytest tests/studies/test_prereg.py
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.study.plan import (
    PLAN,
    Evidence,
    Plan,
    fix_plan,
    ids_sha256,
    keep_plan,
    plan_from,
    read_plan,
    rows_sha256,
    standing,
)

IDS = [f"q{number}" for number in range(12)]
DATA = {"mmlu-pro": rows_sha256([{"id": name} for name in IDS])}


def plan(**changes: Any) -> Plan:
    given: dict[str, Any] = {
        "hypothesis": "A1 beats A0 by 5 points or more.",
        "arms": ("A0", "A1"),
        "metric": "accuracy on Set-G",
        "n": len(IDS),
        "items_sha256": ids_sha256(IDS),
        "test": "two-proportion z-test, exact McNemar beside it",
        "thresholds": {"alpha": 0.05, "least_gain": 0.05},
        "seeds": (0, 1),
        "data": DATA,
        "expected_rate": 0.18,
        "expected_discordant": 0.1,
        "claims": (("A1", "A0"),),
        "details": {"policy": "refit", "layers": [8, 14, 20]},
    }
    return Plan(**given | changes)


def evidence(**changes: Any) -> Evidence:
    given: dict[str, Any] = {
        "plan_sha256": plan().sha256,
        "items": {"A0": IDS, "A1": IDS[::-1]},
        "data": DATA,
        "seeds": (1, 0),
    }
    return Evidence(**given | changes)


def test_a_plan_is_written_once_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / PLAN
    digest = fix_plan(path, plan(), results=[tmp_path / "results.json"])
    assert digest == plan().sha256 == json_sha256(json.loads(path.read_text()))
    before = path.stat()
    (tmp_path / "results.json").write_text("{}")
    assert fix_plan(path, plan(), results=[tmp_path / "results.json"]) == digest
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert read_plan(path) == plan()
    assert sorted(p.name for p in tmp_path.iterdir()) == [PLAN, "results.json"]


def test_a_plan_does_not_move(tmp_path: Path) -> None:
    path = tmp_path / PLAN
    fix_plan(path, plan())
    with pytest.raises(InputError, match="another plan") as error:
        fix_plan(path, plan(n=13, thresholds={"alpha": 0.1, "least_gain": 0.05}))
    assert "n: was 12, now 13" in str(error.value)
    assert "thresholds.alpha: was 0.05, now 0.1" in str(error.value)
    assert read_plan(path) == plan()


def test_results_that_are_older_than_the_plan_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(InputError, match="a plan must be older"):
        fix_plan(tmp_path / PLAN, plan(), results=[tmp_path / "results.json"])
    assert not (tmp_path / PLAN).exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"hypothesis": 3}', '{"n": 1, "n": 2}', "\0"])
def test_a_damaged_plan_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / PLAN
    path.write_text(text)
    with pytest.raises(InputError, match=str(path)):
        read_plan(path)
    with pytest.raises(InputError, match=str(tmp_path)):
        keep_plan(path, plan().as_json(), "results")


CHANGES: list[dict[str, Any]] = [
    {"hypothesis": "other"}, {"arms": ("A1", "A0")}, {"metric": "other"}, {"n": 13},
    {"items_sha256": ids_sha256(IDS[1:])}, {"test": "other"}, {"seeds": (0,)}, {"data": {}},
    {"thresholds": {"alpha": 0.01, "least_gain": 0.05}}, {"expected_rate": 0.2},
    {"expected_discordant": 0.2}, {"claims": ()}, {"details": {"policy": "keep"}},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_field_is_in_the_hash(change: dict[str, Any]) -> None:
    assert plan(**change).sha256 != plan().sha256
    assert {next(iter(change)) for change in CHANGES} == set(plan().as_json())
    assert plan_from(json.loads(json.dumps(plan(**change).as_json()))) == plan(**change)


def test_what_is_as_planned_is_confirmatory() -> None:
    found = standing(plan(), evidence())
    assert (found.status, found.reasons, found.mark("Table")) == ("confirmatory", (), "Table")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"plan_sha256": "0" * 64}, "results of another plan"),
        ({"plan_sha256": ""}, "results of another plan (none"),
        ({"data": {"mmlu-pro": "0" * 64}}, "data mmlu-pro: changed (000000000000"),
        ({"data": {}}, "data mmlu-pro: not said"),
        ({"data": DATA | {"more": "0" * 64}}, "data more: not planned"),
        ({"seeds": (0,)}, "seeds [0], planned [0, 1]"),
        ({"items": {"A0": IDS}}, "missing arm: A1"),
        ({"items": {"A0": IDS, "A1": IDS, "A2": IDS}}, "arm that was not planned: A2"),
        ({"items": {"A0": IDS[:5], "A1": IDS[:5]}}, "every arm: a subset, 5 of 12 planned items"),
        ({"items": {"A0": [*IDS[:11], "x"], "A1": IDS}}, "A0: other items than planned"),
        ({"items": {"A0": [*IDS, "q3"], "A1": IDS}}, "A0: items answered twice: q3"),
        ({"items": {"A0": IDS, "A1": IDS[2:]}}, "arms answered different items (A0 12, A1 10)"),
        ({"items": {"A0": IDS[:5], "A1": IDS[:4]}}, "A0: a subset, 5 of 12 planned items"),
        ({"items": {"A0": IDS, "A1": []}}, "A1: a subset, 0 of 12 planned items"),
    ],
)
def test_what_is_not_as_planned_is_exploratory(change: dict[str, Any], reason: str) -> None:
    found = standing(plan(), evidence(**change))
    assert found.status == "exploratory"
    assert any(one.startswith(reason) for one in found.reasons), found.reasons
    assert found.mark("Accuracy") == "Accuracy (EXPLORATORY)"
    assert reason in found.in_words()


@given(st.permutations(IDS), st.sets(st.sampled_from(IDS), max_size=11))
def test_only_the_planned_set_of_items_will_do(order: list[str], subset: set[str]) -> None:
    assert standing(plan(), evidence(items={"A0": order, "A1": IDS})).status == "confirmatory"
    part = [name for name in order if name in subset]
    assert standing(plan(), evidence(items={"A0": part, "A1": part})).status == "exploratory"


def test_ids_and_rows_are_hashed_as_they_should() -> None:
    assert ids_sha256(["b", "a"]) == ids_sha256(["a", "b"]) != ids_sha256(["ab"])
    with pytest.raises(InputError, match="same id: a, b"):
        ids_sha256(["a", "b", "b", "a", "c"])
    assert rows_sha256([1, 2]) != rows_sha256([2, 1])
    assert rows_sha256([{"a": 1, "b": 2}]) == rows_sha256([{"b": 2, "a": 1}])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"arms": ("A0", "A0")}, "a name twice"),
        ({"claims": (("A1", "A9"),)}, r"claims name \['A9'\]"),
        ({"claims": (("A1", "A1"),)}, "with itself"),
        ({"thresholds": {}}, "needs alpha.*needs least_gain"),
        ({"thresholds": {"alpha": 5.0, "least_gain": 0.0}}, "needs alpha"),
    ],
)
def test_plans_that_make_no_sense_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        plan(**change)
    good = plan().as_json()
    with pytest.raises(InputError, match=problem):
        plan_from(good | json.loads(json.dumps(change)))


@pytest.mark.parametrize(
    "change",
    [{"n": 0}, {"n": "12"}, {"items_sha256": "abc"}, {"seeds": [-1]}, {"unknown": 1}, {"arms": []},
     {"expected_rate": 1.5}, {"hypothesis": ""}],
)  # fmt: skip
def test_fields_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"not a plan: {next(iter(change))}"):
        plan_from(plan().as_json() | change)


def test_power_is_told_of_the_published_plan() -> None:
    """692 items an arm, a floor of 123, five points, as published."""
    published = plan(n=692, expected_rate=123 / 692)
    known, effects, items, intervals, chances = published.power_lines()
    assert known == "692 items; taken as known: the control's rate 17.8%, pairs that differ 10.0%"
    assert effects == (
        "smallest effect at 80% power, alpha 0.05: 6.1 points (two proportions), 3.4 points "
        "(McNemar)"
    )
    assert items == (
        "items for 5.0 points at 80% power, alpha 0.05: 1,014 an arm (two proportions), 312 "
        "(McNemar)"
    )
    assert intervals == (
        "95% intervals reach 2.8 points to each side of one rate, 4.0 of a difference"
    )
    assert "5: 50%, 6: 68%, 7: 82%, 8: 91%, 10: 99%" in chances
    # two claims share the error: each needs a larger effect
    both = replace(published, arms=("A0", "A1", "A2"), claims=(("A1", "A0"), ("A2", "A0")))
    assert "alpha 0.025: 6.8 points (two proportions), 3.7 points" in both.power_lines()[1]
    small = plan(n=12, thresholds={"alpha": 0.05, "least_gain": 0.0}).power_lines()
    assert "none is large enough (McNemar)" in small[1]
