"""Files of JSON objects, one a line or all in one array, read without holding the file."""

import codecs
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError

MAX_ROW_BYTES = 64 << 20  # a book is some MB; what is longer is no row, and not held to its end
CHUNK_BYTES = 1 << 20
_BLANKS = re.compile(r"[ \t\r\n]*")
# How JSON writes half of a character outside of Unicode's first 65,536; the other half follows it.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, blank lines skipped.

    Raises: InputError: a line is not a JSON object, or the file holds none.
    """
    return [record for _, record in numbered_records(path)]


def numbered_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line of a JSONL file. Raises: as `read_records`."""
    is_empty = True
    try:
        lines = path.open("rb")
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; give a file with a JSON object a line"
        ) from None
    with lines:
        for number, line in enumerate(iter(partial(lines.readline, MAX_ROW_BYTES), b""), start=1):
            where = f"{path}, line {number}"
            if len(line) == MAX_ROW_BYTES:
                raise InputError(
                    f"{where}: {MAX_ROW_BYTES:,} bytes or more; each line must be one object"
                )
            if not line.strip():
                continue
            is_empty = False
            try:
                # some editors begin a file with a mark of UTF-8
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                record = json.loads(text, parse_constant=_no_json)
            except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError too
                reason = getattr(error, "msg", str(error))
                raise InputError(
                    f"{where}: not JSON ({reason}); each line must be one object"
                ) from error
            yield number, _checked(record, text, where)
    if is_empty:
        raise InputError(f"{path}: no rows; each line must be one JSON object")


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no value; write null, or leave the row out")


def count_rows(path: Path) -> int:
    """Lines of a file that are not blank; no more than a block of one is held."""
    rows = 0
    is_blank = True
    with path.open("rb") as file:
        for part in iter(partial(file.readline, CHUNK_BYTES), b""):
            rows += is_blank and bool(part.strip())
            is_blank = part.endswith(b"\n") or (is_blank and not part.strip())
    return rows


def _checked(value: Any, text: str, where: str) -> dict[str, Any]:
    """The value that `text` stands for. Raises: InputError: it is no object, or a text in it holds
    half a character, which no tokenizer, file or screen takes.
    """
    if not isinstance(value, dict):
        raise InputError(f"{where}: got {type(value).__name__}, need an object")
    if _HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise InputError(
                f"{where}: \\u{half:04x} is half a character; write its other half, or take it out"
            ) from None
    return value


def begins_array(path: Path) -> bool:
    """Whether the first character of a file is `[`."""
    with path.open("rb") as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def array_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line it begins on, object) for each element of the array in a file.

    Raises: InputError: not an array, an element that is no object, or broken JSON.
    """
    text = _Text(path)
    if (delimiter := text.peek()) != "[":
        raise InputError(f"{path}: not a JSON array")
    while delimiter != "]":
        text.use(1)  # the [ or the comma before an element
        if text.peek() == "]" and delimiter == "[":
            raise InputError(f"{path}: no rows; the array is empty")
        line = text.line
        value, source = text.element()
        yield line, _checked(value, source, f"{path}, line {line}")
        delimiter = text.peek()
        if delimiter not in (",", "]"):
            raise text.error("need , or ] after an element")
    text.use(1)
    if text.peek():
        raise text.error("text after the end of the array")


class _Text:
    """What is read of a file and not used yet, and the line it begins on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 1
        self._buffer, self._start = "", 0
        self._chunks = self._decoded()

    def _decoded(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        with self.path.open("rb") as file:
            try:
                while chunk := file.read(CHUNK_BYTES):
                    yield decoder.decode(chunk)
                yield decoder.decode(b"", final=True)
            except UnicodeDecodeError as error:
                raise self.error(f"not UTF-8 ({error.reason})") from error

    def _read(self, least: int = 1) -> bool:
        """Read at least so many characters more; False at the end of the file."""
        parts = [self._buffer[self._start :]]
        end = len(parts[0]) + least
        while sum(map(len, parts)) < end and (part := next(self._chunks, None)) is not None:
            parts.append(part)
        self._buffer, self._start = "".join(parts), 0
        return any(parts[1:])

    def use(self, count: int) -> str:
        used = self._buffer[self._start : self._start + count]
        self.line += used.count("\n")
        self._start += count
        return used

    def peek(self) -> str:
        """The next character that is no blank, not used up; "" at the end."""
        while True:
            self.use(len(_BLANKS.match(self._buffer, self._start)[0]))  # type: ignore[index]
            if self._start < len(self._buffer):
                return self._buffer[self._start]
            if not self._read():
                return ""

    def element(self) -> tuple[Any, str]:
        """The JSON value here, used up, and its source."""
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._buffer, self._start)
                # A number at the very end may go on in what is not read yet.
                if end < len(self._buffer) or not self._read():
                    return value, self.use(end - self._start)
            except RecursionError as error:
                raise self.error(str(error)) from error
            except ValueError as error:
                # Twice as much each time: a long element costs no more than a few passes.
                held = len(self._buffer) - self._start
                place = getattr(error, "pos", self._start)
                lines = self._buffer.count("\n", self._start, place)
                if held > MAX_ROW_BYTES or not self._read(held):
                    self.line += lines
                    raise self.error(getattr(error, "msg", str(error))) from error

    def error(self, reason: str) -> InputError:
        return InputError(f"{self.path}, line {self.line}: not JSON ({reason})")
