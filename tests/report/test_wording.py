"""What a reader takes from a page: outcomes beside their counts, nothing empty, nothing cut off.

Run: pytest tests/report/test_wording.py
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlxstacks.report.benchmarks import eval_content
from mlxstacks.report.confound import confound_content
from mlxstacks.report.content import Content, Table, Words
from mlxstacks.report.identity import identity_content
from mlxstacks.report.page import _is_number
from mlxstacks.report.values import Value

from mlxstacks.study.render.drawings import draw_heat_map, draw_intervals, percent_dot
from mlxstacks.study.render.words import beginning
from mlxstacks.study.result import Result
from tests.report.cases import confound_report, eval_report, identity_report, profile_result


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


def test_worse_counts_as_a_difference_and_holms_p_has_its_own_column() -> None:
    document = eval_report()
    better, worse = (task["comparisons"][0] for task in document["tasks"].values())
    assert (better["label"], worse["label"]) == ("better", "worse")
    assert content_of(eval_content, document).outcome == "2 of 2 differences shown"
    document["settings"]["alpha"] = 0.05
    better["label"] = "not distinguishable"
    better["mcnemar"]["p_value"], better["p_adjusted"] = 0.03, 0.06
    found = content_of(eval_content, document)
    assert found.outcome == "1 of 2 differences shown"
    tests = table_of(found, "Paired tests")
    row = dict(zip(tests.columns, tests.rows[0], strict=True))
    assert (row["p (McNemar)"], row["p (Holm)"]) == ("0.03", "0.06")
    assert row["outcome"] == "not told apart*"


INTERVAL = {"low": 0.012, "high": 0.345}
FIGURES: list[tuple[Any, Any, str, dict[str, Any], dict[str, Any]]] = [
    (
        eval_content, eval_report, "tasks.arc_easy.comparisons.0",
        {"difference": 0.123, "interval": INTERVAL, "mcnemar": {"p_value": 0.02},
         "p_adjusted": 0.04},
        {"points": "+12.30", "95%": "+1.2 to +34.5", "p (McNemar)": "0.02", "p (Holm)": "0.04"},
    ),
    (
        eval_content, eval_report, "mean_differences.0",
        {"mean": -0.05, "interval": INTERVAL, "tasks": 7, "better": ["b1", "b2"], "worse": ["w"]},
        {"points": "-5.00", "95%": "+1.2 to +34.5", "tasks": "7", "better on": "b1, b2",
         "worse on": "w"},
    ),
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


def one_task(labels: list[tuple[str, float]]) -> dict[str, Any]:
    """An eval of one task; of each comparison its label and p."""
    document = eval_report()
    document["tasks"] = {"medqa": document["tasks"]["medqa"]}
    (one,) = document["tasks"]["medqa"]["comparisons"]
    document["tasks"]["medqa"]["comparisons"] = [
        {**one, "label": label, "mcnemar": {**one["mcnemar"], "p_value": p}} for label, p in labels
    ]
    document["settings"]["alpha"] = 0.05
    return document


def test_of_one_task_an_arm_is_a_row() -> None:
    found = content_of(eval_content, one_task([("worse", 0.001)]))
    scores = table_of(found, "Scores, MedQA, 200 items")
    assert scores.columns == ("arm", "right", "share", "95% interval")
    assert [row[:3] for row in scores.rows] == [("base", "100", "50.0%"), ("routed", "60", "30.0%")]
    assert scores.note == "Guessing gives 25.0%."
    assert not any(b.title.startswith("Differences, mean") for b in found.blocks
                   if isinstance(b, Table))  # fmt: skip
    several = table_of(content_of(eval_content, eval_report()), "Scores, with 95% intervals")
    assert several.columns == ("task", "items", "guessing", "base", "routed")


def test_outcomes_of_tests_are_short_and_a_star_is_what_a_test_alone_says() -> None:
    labels = [("worse", 0.001), ("not distinguishable", 0.04), ("not distinguishable", 0.06)]
    tests = table_of(content_of(eval_content, one_task(labels)), "Paired tests")
    assert [row[1] for row in tests.rows] == ["worse", "not told apart*", "not told apart"]
    assert tests.note.endswith(" *: its own p, without Holm's rule, is below 0.05.")
    plain = table_of(content_of(eval_content, one_task(labels[:1])), "Paired tests")
    assert "*" not in plain.note
    several = table_of(content_of(eval_content, eval_report()), "Paired tests")
    assert several.columns[:3] == ("task", "pair", "outcome")


def test_a_mean_that_alone_is_clear_of_zero_has_a_star() -> None:
    document = eval_report()
    (one,) = document["mean_differences"]
    assert one["label"] == "not distinguishable"
    title = "Differences, mean over tasks"
    found = table_of(content_of(eval_content, document), title)
    assert (found.rows[0][1], found.note) == ("not told apart", "")
    one["interval"] |= {"low": -0.05, "high": -0.001}
    found = table_of(content_of(eval_content, document), title)
    assert found.rows[0][1] == "not told apart*"
    assert found.note.startswith("*: its 95% interval is clear of 0")


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
