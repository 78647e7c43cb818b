"""A file of answers, one JSON object a line, appended as they come: a killed run loses a batch.

The first line, the header, says what they are answers of. Every line ends with `digest`, the
SHA-256 of the digest before it and of its own text, so each stands for all that was written up to
it. A line that was changed, removed, added or moved, or a bit that flipped, is found when the file
is read; lines missing at the very end look like a run that was killed and are answered again. A
report keeps the last digest, which shows these too (integrity.py).

What a chain cannot show: that a line was ever answered by a model. Who computes all digests again,
and the report's, is stopped only by running the same command in an empty directory: answers are
greedy, so on the same machine and versions it ends with the same digests.
"""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from mlxstacks.errors import InputError
from mlxstacks.files.disk import sync_directory, target_errors
from mlxstacks.processes import dealing, gathered, size_and_rank
from mlxstacks.regular_files import check_regular

Asked = TypeVar("Asked")
Parsed = TypeVar("Parsed")
Progress = Callable[..., None]
# How a line ends before its digest is put between the last two quotes.
_KEY, _END = b'"digest": "', b'"}'
_DIGITS = 64
_LONGEST_LINE = 1 << 26


class AnswerLog:
    """digests: of the header and of each answer that was read or appended; [] before either.

    header: what the answers are of; a file with another one is refused.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.header = path, header
        self.digests: list[str] = []
        self._end = 0

    def read(self, parse: Callable[[dict[str, Any]], Parsed]) -> list[Parsed]:
        """The answers of all whole lines; [] where nothing is.

        parse: a row as an answer; raises ValueError, TypeError or KeyError for one that is none.
        Raises: InputError for a file of another header and for one that was changed.
        """
        self.digests, self._end = [], 0
        if not self.path.exists():
            return []
        check_regular(self.path)
        try:
            lines = whole_lines(self.path.read_bytes())
            digests = list(digests_of(lines))
        except ValueError as error:
            raise InputError(f"{self.path}, {error}; remove the file to answer again") from None
        if not lines:
            return []
        if self._parsed(1, lines[0], dict) != self.header:
            raise InputError(
                f"{self.path}: answers of another plan or arm; remove it to answer again"
            )
        answers = [self._parsed(number, line, parse) for number, line in enumerate(lines[1:], 2)]
        self.digests, self._end = digests, sum(len(line) + 1 for line in lines)
        return answers

    def _parsed(
        self, number: int, line: bytes, parse: Callable[[dict[str, Any]], Parsed]
    ) -> Parsed:
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("no JSON object")
            return parse({key: value for key, value in row.items() if key != "digest"})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(
                f"{self.path}, line {number}: damaged ({error}); remove the file to answer again"
            ) from None

    def begin(self) -> None:
        """After `read`: write the header, or cut off half a line of a run that was killed."""
        with target_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.digests:
                os.truncate(self.path, self._end)
            else:
                [(line, digest)] = chained([self.header])
                self.path.write_bytes(line)
                sync_directory(self.path.parent)
                self.digests = [digest]

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """After `begin`: all of them in one write, on the disk when this returns."""
        new = list(chained(rows, self.digests[-1]))
        with target_errors(self.path), self.path.open("ab") as file:
            file.write(b"".join(line for line, _ in new))
            file.flush()
            os.fsync(file.fileno())
        self.digests += [digest for _, digest in new]

    def provenance(self, count: int) -> dict[str, Any]:
        """For a report that uses the first `count` answers."""
        return {"answers": count, "digest": self.digests[count]}


class AnswersToItems(Generic[Asked, Parsed]):
    """Answers of one arm, dataclasses, to a fixed list of items, in their order.

    parse: as in `AnswerLog.read`. is_of: whether an answer is one to an item.
    Law: killed anywhere and resumed, the file holds what it would have held; answered by the
    processes of a group, what it would hold of one.
    """

    def __init__(
        self,
        path: Path,
        header: dict[str, Any],
        items: Sequence[Asked],
        parse: Callable[[dict[str, Any]], Parsed],
        is_of: Callable[[Parsed, Asked], bool],
    ) -> None:
        self.path, self.items, self._parse, self._is_of = path, items, parse, is_of
        self.log = AnswerLog(path, header)

    def answers(self) -> list[Parsed]:
        """Those written so far, whole lines only.

        Raises: InputError for answers of another arm or plan, to other items, or that were changed.
        """
        answers = self.log.read(self._parse)
        if len(answers) > len(self.items) or not all(map(self._is_of, answers, self.items)):
            raise InputError(
                f"{self.path}: answers to other items, as of another limit or sample; give that "
                "run's settings to resume it, another save path, or --no-resume to begin again"
            )
        return answers

    def complete(
        self,
        count: int,
        batch_size: int,
        answer: Callable[[Sequence[Asked]], Sequence[Parsed]],
        progress: Progress | None = None,
    ) -> list[Parsed]:
        """The answers to the first `count` items; only those that are missing are asked for, in the
        batches of a run that was never stopped. In a group each process asks for its batches.

        progress: (done, count, name of the file), before each batch.
        Raises: as `answers`; ValueError for more or fewer answers than there are items.
        """
        if count > len(self.items):
            raise ValueError(f"{count} answers are asked for, of {len(self.items)} items")
        answers = self.answers()
        self.log.begin()

        def given_to(start: int, done: int) -> Sequence[Parsed]:
            if progress:
                progress(done, count, self.path.stem)
            batch = self.items[start : start + batch_size]
            given = answer(batch)
            if len(given) != len(batch):
                raise ValueError(f"{len(given)} answers to {len(batch)} items")
            for item, one in zip(batch, given, strict=True):
                if not self._is_of(one, item):
                    raise ValueError(f"{str(one)[:200]} is no answer to {str(item)[:200]}")
            return given

        # Batches lie where they always do: what a batch holds may move a last bit.
        first = len(answers) // batch_size * batch_size
        dealt = self._dealt(range(first, count, batch_size), given_to)
        while len(answers) < count:
            start = len(answers) // batch_size * batch_size
            batch = dealt.get(start) or given_to(start, len(answers))
            new: Sequence[Any] = batch[len(answers) - start :]
            self.log.append(map(asdict, new))
            answers += new
        self._part.path.unlink(missing_ok=True)
        return answers[:count]

    def _dealt(
        self, starts: range, given_to: Callable[[int, int], Sequence[Parsed]]
    ) -> dict[int, list[Parsed]]:
        """Batches by their start, those that the processes of a group have answered, each in a log
        of its own beside the file; of one process what is in its log.
        """
        size, rank = size_and_rank(group := dealing())
        part = self._part
        own: dict[int, list[Any]] = dict(part.read(lambda row: (row["start"], row["answers"])))
        if group is not None:
            part.begin()
            done = {start for starts in gathered([*own], group) for start in starts}
            for start in starts:
                if start // starts.step % size == rank and start not in done:
                    own[start] = [asdict(a) for a in given_to(start, start)]  # type: ignore[call-overload]
                    part.append([{"start": start, "answers": own[start]}])
        every = {s: rows for held in gathered([*own.items()], group) for s, rows in held}
        return {
            start: answers
            for start, rows in every.items()
            if all(map(self._is_of, answers := [*map(self._parse, rows)], self.items[start:]))
        }

    @property
    def _part(self) -> AnswerLog:
        return AnswerLog(self.path.with_name(f".{self.path.stem}.part"), self.log.header)


def chained(rows: Iterable[dict[str, Any]], before: str = "") -> Iterator[tuple[bytes, str]]:
    """(line, its digest) of each row. before: the digest of the line above; of a header none."""
    for row in rows:
        text = json.dumps({**row, "digest": ""}, ensure_ascii=False, allow_nan=False).encode()
        before = _digest(before, text)
        yield text.removesuffix(_END) + before.encode() + _END + b"\n", before


def whole_lines(data: bytes) -> list[bytes]:
    """Without half a line at the end, which a kill leaves. Raises: as `lines_of`."""
    return list(lines_of(io.BytesIO(data)))


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Its whole lines, read one at a time: an untrusted file may hold millions. Not half a line at
    the end.

    Raises: ValueError for a line that is too long to be one of ours.
    """
    for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
        if line.endswith(b"\n"):
            yield line[:-1]
        elif len(line) == _LONGEST_LINE:
            raise ValueError(f"a line has more than {_LONGEST_LINE:,} bytes")


def digests_of(lines: Iterable[bytes]) -> Iterator[str]:
    """The digest of each line. Law: of a file with any byte changed, or with lines removed before
    its end, added or swapped, this raises, or the lines are the first ones as they were. No line
    behind the first bad one is asked for.

    Raises: ValueError naming the first line that does not follow from those above it.
    """
    before = ""
    for number, line in enumerate(lines, 1):
        text = line[: -_DIGITS - len(_END)] + _END
        if number == 1 and _KEY not in line:
            raise ValueError(
                "line 1: its lines carry no digests, so they were written by an older version or "
                "by hand"
            )
        end, before = line[-_DIGITS - len(_END) :], _digest(before, text)
        if not text.endswith(_KEY + _END) or end != before.encode() + _END:
            raise ValueError(
                f"line {number}: does not follow from the lines above it, so it was changed, or "
                "lines were removed, added or moved"
            )
        yield before


def _digest(before: str, text: bytes) -> str:
    return sha256(before.encode() + text).hexdigest()
