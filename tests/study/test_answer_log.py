"""A file of answers: whole lines count, what was changed is refused and named.

Run: pytest tests/study/test_answer_log.py
"""

import io
import itertools
import json
import os
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.study import answer_log
from mlxstacks.study.answer_log import (
    AnswerLog,
    AnswersToItems,
    chained,
    digests_of,
    lines_of,
    whole_lines,
)
from tests.studies.answer_files import forge

HEADER = {"plan_sha256": "a", "arm": "base"}
ROWS = [
    {"item_id": str(place), "pick": place % 3, "text": text, "scores": [-1.5, place / 7]}
    for place, text in enumerate(("Bär", 'a "digest": "x"}', "line\nbreak", ""))
]
NEWLINE = 10


def write(path: Path, rows: list[dict[str, Any]], header: dict[str, Any] = HEADER) -> AnswerLog:
    log = AnswerLog(path, header)
    assert log.read(dict) == []
    log.begin()
    log.append(rows)
    return log


def read(path: Path, data: bytes) -> list[dict[str, Any]]:
    path.write_bytes(data)
    return AnswerLog(path, HEADER).read(dict)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("log") / "answers.jsonl"
    write(path, ROWS)
    return path.with_name("changed.jsonl"), path.read_bytes()


@given(rows=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=9))), cut=st.integers(0))
def test_whatever_a_kill_cuts_off_the_whole_lines_before_it_are_kept(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "answers.jsonl"
    digests = write(path, rows).digests
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % (len(whole) + 1)])
    log = AnswerLog(path, HEADER)
    kept = log.read(dict)
    assert kept == rows[: len(kept)]
    log.begin()
    log.append(rows[len(kept) :])
    assert path.read_bytes() == whole
    assert log.digests == digests
    assert log.provenance(len(rows)) == {"answers": len(rows), "digest": digests[-1]}


def test_a_digest_is_of_the_one_before_and_of_the_line(finished: tuple[Path, bytes]) -> None:
    before = ""
    for line in finished[1].decode().splitlines():
        digest = json.loads(line)["digest"]
        text = line.removesuffix(f'{digest}"}}') + '"}'
        assert digest == sha256((before + text).encode()).hexdigest()
        before = digest


# --- what was changed -----------------------------------------------------------------------------


def test_no_byte_can_be_changed_unseen(finished: tuple[Path, bytes]) -> None:
    """Every byte, each of its bits and a line end in its place. Only where the last line end itself
    is changed is its line cut off, as that of a killed run; everything else is refused.
    """
    _, whole = finished
    lines = whole_lines(whole)
    for place, byte in enumerate(whole):
        for other in {*(byte ^ 1 << bit for bit in range(8)), NEWLINE} - {byte}:
            changed = whole_lines(whole[:place] + bytes([other]) + whole[place + 1 :])
            if place == len(whole) - 1:
                assert changed == lines[:-1]
                list(digests_of(changed))
            else:
                with pytest.raises(ValueError, match=r"^line \d: "):
                    list(digests_of(changed))


def test_no_line_behind_the_first_bad_one_is_read(finished: tuple[Path, bytes]) -> None:
    """A stranger's file can hold millions."""
    endless = itertools.chain(whole_lines(finished[1])[:2], itertools.repeat(b"ab"))
    with pytest.raises(ValueError, match=r"^line 3: does not follow"):
        list(digests_of(endless))


def test_a_line_without_an_end_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_log, "_LONGEST_LINE", 8)
    assert list(lines_of(io.BytesIO(b"1234567\n\nhalf"))) == [b"1234567", b""]
    with pytest.raises(ValueError, match="a line has more than 8 bytes"):
        list(lines_of(io.BytesIO(b"a\n" + b"b" * 100)))


@given(place=st.integers(0), byte=st.integers(0, 255), length=st.integers(0, 40))
@example(place=0, byte=NEWLINE, length=0)
def test_no_stretch_of_bytes_can_be_changed_unseen(
    finished: tuple[Path, bytes], place: int, byte: int, length: int
) -> None:
    path, whole = finished
    start = place % len(whole)
    data = whole[:start] + bytes([byte]) * min(length, 3) + whole[start + length :]
    try:
        found = read(path, data)
    except InputError as error:
        assert "to answer again" in str(error)  # noqa: PT017
        return
    assert found == ROWS[: len(found)]
    assert whole.startswith(data[: data.rfind(b"\n") + 1])


def test_no_line_can_be_removed_doubled_or_swapped_unseen(finished: tuple[Path, bytes]) -> None:
    path, whole = finished
    lines = whole.splitlines(keepends=True)
    for place in range(len(lines)):
        without = b"".join(lines[:place] + lines[place + 1 :])
        if place == len(lines) - 1:  # nothing tells it from a run that was killed before it
            assert read(path, without) == ROWS[:-1]
        else:
            with pytest.raises(InputError, match=f"line {place + 1}: does not follow"):
                read(path, without)
        with pytest.raises(InputError, match=f"line {place + 2}: does not follow"):
            read(path, b"".join(lines[: place + 1] + lines[place:]))
        for other in range(place + 1, len(lines)):
            swapped = [*lines]
            swapped[place], swapped[other] = lines[other], lines[place]
            with pytest.raises(InputError, match=f"line {place + 1}: does not follow"):
                read(path, b"".join(swapped))


def test_answers_of_another_file_do_not_fit_in(finished: tuple[Path, bytes]) -> None:
    """The same row of another arm: its digest is of that arm's header."""
    path, whole = finished
    other = b"".join(line for line, _ in chained([{**HEADER, "arm": "routed"}, *ROWS]))
    lines, others = (data.splitlines(keepends=True) for data in (whole, other))
    for place in range(1, len(lines)):
        mixed = [*lines[:place], others[place], *lines[place + 1 :]]
        with pytest.raises(InputError, match=f"line {place + 1}: does not follow"):
            read(path, b"".join(mixed))
    assert all(one != two for one, two in pairwise(line[-70:] for line in lines))


def test_only_who_computes_all_digests_anew_is_believed_and_the_last_one_differs(
    finished: tuple[Path, bytes],
) -> None:
    path, whole = finished
    forge(path, [HEADER, *ROWS[:2], ROWS[2] | {"pick": 0}, ROWS[3]])
    log = AnswerLog(path, HEADER)
    assert log.read(dict)[2]["pick"] == 0
    last = json.loads(whole.splitlines()[-1])["digest"]
    assert log.provenance(4)["digest"] != last


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"{", b"[" * 100_000, b"\xff", b"3", b'{"item_id": "9"}', b""])
def test_a_line_by_hand_is_an_error_that_says_what_to_do(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, [])
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(InputError, match=r"answers\.jsonl, line 2: does not follow .* remove the"):
        AnswerLog(path, HEADER).read(dict)


def test_a_file_of_an_older_version_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [HEADER, *ROWS]))
    with pytest.raises(InputError, match=r"no digests, so they were written by an older version"):
        AnswerLog(path, HEADER).read(dict)


def test_a_pipe_in_place_of_the_log_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(InputError, match="not a regular file"):
        AnswerLog(tmp_path / "log.jsonl", HEADER).read(dict)


@pytest.mark.parametrize(
    ("count", "text", "message"),
    [(3, "b", "3 answers are asked for, of 2 items"), (2, "c", "Said.* is no answer to a")],
)
def test_answers_to_nothing_are_not_kept(
    count: int, text: str, message: str, tmp_path: Path
) -> None:
    answers = AnswersToItems(
        tmp_path / "log.jsonl", {}, ("a", "b"), lambda row: Said(**row),
        is_of=lambda said, item: said.text in (item, "b"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        answers.complete(count, 1, lambda batch: [Said(text)])
    assert answers.answers() == []


@dataclass
class Said:
    text: str
