"""A file that holds one JSON array of objects, read without holding all of it."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxstacks.data.json_lines import MAX_LINE_BYTES, check_halves
from mlxstacks.errors import InputError

CHUNK_BYTES = 1 << 20
# A longer element is taken for a broken one: nobody wants the rest of a large file in memory.
LONGEST_ELEMENT = MAX_LINE_BYTES
_SPACE = " \t\r\n"


def begins_array(path: Path) -> bool:
    """Whether the first character of a file is `[`."""
    with path.open("rb") as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def array_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line it begins on, object) for each element of the array in a file.

    Raises:
        InputError: not an array, an element that is no object, or broken JSON.
    """
    text = _Text(path)
    if text.next_character() != "[":
        raise InputError(f"{path}: not a JSON array")
    text.skip(1)
    found = 0
    while (character := text.next_character()) != "]":
        if found:
            if character != ",":
                raise text.error("need , or ] after an element")
            text.skip(1)
            text.next_character()
        line = text.line
        value = text.element()
        if not isinstance(value, dict):
            raise InputError(f"{path}, line {line}: got {type(value).__name__}, need an object")
        yield line, value
        found += 1
    text.skip(1)
    if text.next_character():
        raise text.error("text after the end of the array")
    if not found:
        raise InputError(f"{path}: no rows; the array is empty")


class _Text:
    """What is read of a file and not used yet, and the line it begins on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 1
        self._buffer = ""
        self._place = 0
        self._more = self._chunks()
        self._decoder = json.JSONDecoder()

    def _chunks(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        with self.path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True)

    def _read(self, least: int = 1) -> bool:
        """Read at least so many characters more; False at the end of the file."""
        parts: list[str] = []
        try:
            while sum(map(len, parts)) < least:
                parts.append(next(self._more))
        except StopIteration:
            pass
        except UnicodeDecodeError as error:
            raise self.error(f"not UTF-8 ({error.reason})") from error
        self._buffer = self._buffer[self._place :] + "".join(parts)
        self._place = 0
        return any(parts)

    def skip(self, count: int) -> None:
        used = self._buffer[self._place : self._place + count]
        self.line += used.count("\n")
        self._place += count

    def next_character(self) -> str:
        """The next character that is no blank, not used up; "" at the end."""
        while True:
            rest = self._buffer[self._place : self._place + CHUNK_BYTES]
            blanks = len(rest) - len(rest.lstrip(_SPACE))
            self.skip(blanks)
            if blanks < len(rest):
                return rest[blanks]
            if not rest and not self._read():
                return ""

    def element(self) -> Any:
        """The JSON value here, used up."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._place)
                source = self._buffer[self._place : end]
                # A number at the very end may go on in what is not read yet.
                if end < len(self._buffer) or not self._read():
                    break
            except RecursionError as error:
                raise self.error(str(error)) from error
            except ValueError as error:
                # Twice as much each time: a long element costs no more than a few passes.
                held = len(self._buffer) - self._place
                place = getattr(error, "pos", self._place)
                lines = self._buffer.count("\n", self._place, place)
                if held > LONGEST_ELEMENT or not self._read(held):
                    self.line += lines
                    raise self.error(getattr(error, "msg", str(error))) from error
        check_halves(source, value, f"{self.path}, line {self.line}")
        self.skip(len(source))
        return value

    def error(self, reason: str) -> InputError:
        return InputError(f"{self.path}, line {self.line}: not JSON ({reason})")
