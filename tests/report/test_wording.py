"""What a reader takes from plots and texts: nothing cut off, no pattern made of rounding.

Run: pytest tests/report/test_wording.py
"""

from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.study.render.words import beginning
from mlxstacks.study.result import Result
from tests.report.cases import profile_result


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
