"""What a reader takes from a page: outcomes beside their counts, nothing empty, nothing cut off.

Run: pytest tests/report/test_wording.py
"""

from typing import Any

import pytest

from mlxstacks.report.benchmarks import eval_content
from mlxstacks.report.confound import confound_content
from mlxstacks.report.content import Content, Table, Words
from mlxstacks.report.identity import identity_content
from mlxstacks.report.page import _is_number
from mlxstacks.report.plots import draw_heat_map, draw_intervals, percent_dot
from mlxstacks.report.values import Value
from tests.report.cases import confound_report, eval_report, identity_report


def content_of(make: Any, document: dict[str, Any]) -> Content:
    found: Content = make(Value(document, "file"), str)
    return found


def words_of(found: Content) -> list[str]:
    return [said for b in found.blocks if isinstance(b, Words) for said in b.paragraphs]


def table_of(found: Content, title: str) -> Table:
    return next(b for b in found.blocks if isinstance(b, Table) and b.title == title)


def test_a_judgement_of_the_persona_is_said_with_its_outcome() -> None:
    document = identity_report()
    outcomes = {
        "kept": "keeps the persona", "lost": "loses it", "not shown": "leaves it open",
    }  # fmt: skip
    document["judgements"] = [
        {"arm": outcome, "policy": "promote", "outcome": outcome, "words": f"keeps {n} of 19"}
        for n, outcome in enumerate(outcomes)
    ]
    said = words_of(content_of(identity_content, document))
    for n, (outcome, head) in enumerate(outcomes.items()):
        assert f"{outcome}: {head}: keeps {n} of 19" in said
    assert "left open" in content_of(identity_content, document).outcome


def test_what_is_said_of_several_conditions_is_said_once() -> None:
    document = identity_report()
    document["judgements"] = [
        {"arm": arm, "policy": "promote", "outcome": "no claim", "words": "scorer invalid"}
        for arm in ("first", "second")
    ]
    said = words_of(content_of(identity_content, document))
    assert "first; second: no claim: scorer invalid" in said
    assert sum("scorer invalid" in one for one in said) == 1


def test_a_reference_that_passes_nothing_has_nothing_to_lose() -> None:
    document = identity_report()
    name = next(iter(document["compared"]))
    document["compared"][name]["loss"] = None
    rows = table_of(content_of(identity_content, document), "Prompt by prompt").rows
    assert rows[0][5] == "nothing to lose"


def test_no_difference_between_modes_is_said_so() -> None:
    document = eval_report()
    assert content_of(eval_content, document).outcome.endswith(" differences shown")
    for task in document["tasks"].values():
        for one in task["comparisons"]:
            one["label"] = "not distinguishable"
    assert content_of(eval_content, document).outcome == "no difference shown, of 2 tested"


def test_published_scores_have_a_table_only_where_there_are_some() -> None:
    document = eval_report()
    titles = [b.title for b in content_of(eval_content, document).blocks if isinstance(b, Table)]
    assert any(title.startswith("Published") for title in titles)
    for task in document["tasks"].values():
        task["published"] = None
    titles = [b.title for b in content_of(eval_content, document).blocks if isinstance(b, Table)]
    assert not any(title.startswith("Published") for title in titles)


def test_a_judgement_of_content_says_of_how_much() -> None:
    found = content_of(confound_content, confound_report())
    (said,) = [one for one in words_of(found) if one.startswith("refit: ")]
    assert said.startswith("refit: A1 less A0 is +50.00 points. That is ")


@pytest.mark.parametrize("cell", ["below 0.0001", "4 of 20", "no claim", "not fused", None])
def test_a_column_of_numbers_may_hold(cell: str | None) -> None:
    assert _is_number(cell)


def test_long_names_are_whole_and_take_no_room_from_their_plot() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    name = "identity + factual r2, promote"
    short, long = Figure(), Figure()
    draw_intervals(short, [percent_dot("base", 0.5, 0.1, 0.9)], "x", title="t")
    draw_intervals(long, [percent_dot(name, 0.5, 0.1, 0.9)], "x", title="t")
    assert long.get_size_inches()[0] > short.get_size_inches()[0]
    assert [label.get_text() for label in long.axes[0].get_yticklabels()] == [name]


def test_rounding_makes_no_pattern() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure()
    draw_heat_map(
        figure, ["a"], ["x", "y"], [[1e-16, 3e-13]], title="t", xlabel="", ylabel="", unit="nats"
    )
    faces = {patch.get_facecolor() for patch in figure.axes[0].patches}
    assert len(faces) == 1


def test_a_map_of_yes_and_no_has_two_colours_and_no_scale() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure()
    draw_heat_map(
        figure, ["a"], ["x", "y"], [[0.0, 1.0]], title="t", xlabel="", ylabel="", unit="",
        limits=(0.0, 1.0), words=("failed", "passed"),
    )  # fmt: skip
    assert len(figure.axes) == 1
    (legend,) = figure.legends
    assert [one.get_text() for one in legend.get_texts()] == ["failed", "passed"]
    cells = [patch.get_facecolor() for patch in figure.axes[0].patches]
    assert [patch.get_facecolor() for patch in legend.get_patches()] == cells
