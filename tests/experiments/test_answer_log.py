"""A file of answers: whole lines count, anything else is named.

Run: pytest tests/experiments/test_answer_log.py
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.experiments.answer_log import append_answers, begin_answers, read_answers

HEADER = {"plan_sha256": "a", "arm": "base"}


@given(rows=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=9))), cut=st.integers(0))
def test_whatever_a_kill_cuts_off_the_whole_lines_before_it_are_kept(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "answers.jsonl"
    begin_answers(path, HEADER, 0)
    append_answers(path, rows)
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % (len(whole) + 1)])
    kept, end = read_answers(path, HEADER, dict)
    assert kept == rows[: len(kept)]
    begin_answers(path, HEADER, end)
    append_answers(path, rows[len(kept) :])
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", [b"{", b"[" * 100_000, b"\xff", b"3"])
def test_a_damaged_line_is_an_error_that_says_what_to_do(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "answers.jsonl"
    begin_answers(path, HEADER, 0)
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(InputError, match=r"answers\.jsonl: damaged .* remove it"):
        read_answers(path, HEADER, dict)


def test_answers_of_another_plan_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    begin_answers(path, HEADER, 0)
    with pytest.raises(InputError, match="another plan or arm"):
        read_answers(path, HEADER | {"plan_sha256": "b"}, dict)
