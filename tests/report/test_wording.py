"""What a reader takes from a page: outcomes beside their counts, nothing empty, nothing cut off.

Run: pytest tests/report/test_wording.py
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.report.confound import confound_content
from mlxstacks.report.content import Content, Table, Words
from mlxstacks.report.identity import identity_content
from mlxstacks.report.page import _is_number
from mlxstacks.report.values import Value
from mlxstacks.study.render.drawings import draw_heat_map, draw_intervals, percent_dot
from mlxstacks.study.render.words import beginning
from mlxstacks.study.result import Result
from tests.report.cases import confound_report, identity_report, profile_result


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


INTERVAL = {"low": 0.012, "high": 0.345}
FIGURES: list[tuple[Any, Any, str, dict[str, Any], dict[str, Any]]] = [
    (
        identity_content, identity_report, "compared.identity_rerun",
        {"kept": 11, "lost": ["l1", "l2"], "gained": ["g"], "loss": INTERVAL, "p_value": 0.02,
         "p_adjusted": 0.04, "other_texts": 5},
        {"kept": "11", "lost": 2, "gained": 1, "lost, 95%, in percent": "1 to 34",
         "p (McNemar)": "0.02", "p (Holm)": "0.04", "replies that differ": "5",
         "prompts lost": "l1, l2", "prompts gained": "g"},
    ),
    (
        identity_content, identity_report, "regression.a_b",
        {"reference": "r_s", "n": 90, "right": 50, "reference_right": 40, "fixed": 13, "broken": 3,
         "net": 10, "p_value": 0.00002, "chi_square": 6.25, "in_form": 80,
         "reference_in_form": 70},
        {"arm": "a b", "beside": "r s", "items": "90", "right": "50", "right before": "40",
         "fixed": "13", "broken": "3", "net": "10", "p (McNemar)": "below 0.0001",
         "chi square": "6.25", "in form": "80", "in form before": "70"},
    ),
    (
        confound_content, confound_report, "claims.refit",
        {"difference": 0.123, "bootstrap": INTERVAL, "p_value": 0.02, "p_adjusted": 0.04,
         "mcnemar": {"p_value": 0.06}},
        {"A1 less A0, points": "+12.30", "95%": "+1.2 to +34.5", "p (z)": "0.02",
         "p (z, Holm)": "0.04", "p (McNemar)": "0.06"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "report", "place", "figures", "shown"), FIGURES, ids=[f[2] for f in FIGURES]
)
def test_a_column_shows_the_figure_of_its_name(
    make: Any, report: Any, place: str, figures: dict[str, Any], shown: dict[str, Any]
) -> None:
    document = report()
    found = document
    for key in place.split("."):
        found = found[int(key)] if isinstance(found, list) else found.setdefault(key, {})
    found.update(figures)
    tables = [
        block
        for block in content_of(make, document).blocks
        if isinstance(block, Table) and shown.keys() <= {*block.columns}
    ]
    (row, *_) = tables[0].rows
    assert dict(zip(tables[0].columns, row, strict=True)).items() >= shown.items()


def test_a_judgement_of_content_says_of_how_much() -> None:
    found = content_of(confound_content, confound_report())
    (said,) = [one for one in words_of(found) if one.startswith("refit: ")]
    assert said.startswith("refit: A1 less A0 is +50.00 points. That is ")


def test_codes_and_positions_are_on_the_page() -> None:
    """spec/confound.md section 4 (codes that differ) and control 11 (guess bias)."""
    document = confound_report()
    document["fuses"] = {
        "refit": {"codes_that_differ": {"a1_and_a0": 0.25, "a0_and_unfused": 0.0383}},
        "promote": {"codes_that_differ": {"a1_and_a0": 0.5, "a0_and_unfused": None}},
        "keep": {},
    }
    found = content_of(confound_content, document)
    assert [one for one in words_of(found) if one.startswith("Fused by ")] == [
        f"Fused by {way}, A1 differs from A0: {a1} of the codes; A0 from the unfused model: {a0}."
        for way, a1, a0 in (
            ("refit", "25.00%", "3.83% of the codes"),
            ("promote", "50.00%", "at other bits"),
        )
    ]
    picked = table_of(found, "Which options are picked")
    assert picked.columns == ("arm", *"ABCDEFGHIJ", "by place")
    assert picked.rows[0][:2] == ("right option", "10%")
    assert {row[0] for row in picked.rows} >= {"persona", "a1 refit", "a0 unfused"}


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


def test_words_of_the_profile_are_explained_below_its_tables() -> None:
    result = Result.from_json(profile_result())
    notes = [block.caption for block in result.blocks if block.block == "table"]
    assert len(notes) == 4
    for word in ("KL: ", "By excess: ", "Jaccard: ", "JS: ", "adjusted p: ", "p: "):
        assert any(word in note for note in notes)


def test_a_beginning_ends_where_a_sentence_does() -> None:
    said = "Mean 0.490, random 0.365 (p = 0.0665). That is nothing; e.g. chance. As planned."
    assert beginning(said, 100) == said
    assert beginning(said, len(said) - 1).endswith("chance.")
    assert beginning(said, 40) == "Mean 0.490, random 0.365 (p = 0.0665)."
    assert beginning(said, 37) == "Mean 0.490, random 0.365 (p = \u2026"
    assert beginning("First of two; second of two.", 20) == "First of two; \u2026"
    assert beginning("x" * 50, 20) == "x" * 19 + "\u2026"


@given(st.text(alphabet="aB 1.;!\n", max_size=80), st.integers(5, 60))
def test_a_beginning_is_how_the_line_begins(said: str, longest: int) -> None:
    line = " ".join(said.split())
    found = beginning(said, longest)
    whole = found.removesuffix("\u2026").rstrip(" ")
    assert line.startswith(whole)
    assert len(found) <= longest + 2
    if len(line) <= longest:
        assert found == line
    elif " " in line[: longest + 1]:
        assert line[len(whole)] == " "
