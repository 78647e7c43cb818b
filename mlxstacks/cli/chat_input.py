"""What somebody types into a chat: with history, completion and several lines in a terminal."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlxstacks.cli.answers import MOST_CHARACTERS, bounded
from mlxstacks.cli.output import write

if TYPE_CHECKING:
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = "> "
MORE = ". "


class Lines(Protocol):
    """read: the next message. Raises: EOFError at the end; KeyboardInterrupt at Ctrl-C; InputError
    for a line without an end.
    """

    def read(self) -> str: ...


def open_lines(complete: Callable[[str], Iterable[str]], history_path: Path) -> Lines:
    """The best way to read here: prompt_toolkit in a terminal that can do it, else plain lines.

    complete: text before the cursor -> whole texts that it may become.
    """
    able = os.environ.get("TERM", "dumb") not in ("", "dumb")
    if able and sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalLines(complete, history_path)
    return PlainLines()


class PlainLines:
    """A line a message; a backslash at the end of a line continues it on the next."""

    def __init__(self) -> None:
        reconfigure = getattr(sys.stdin, "reconfigure", None)
        if reconfigure is not None:  # what is not UTF-8 is no reason to end
            reconfigure(errors="replace")

    def read(self) -> str:
        lines = [self._line(PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(MORE))
            except EOFError:
                break
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if sys.stdin.isatty():
            try:
                return input(prompt)
            except KeyboardInterrupt:
                write("")  # the terminal wrote ^C into the line
                raise
        line = bounded(sys.stdin.readline(MOST_CHARACTERS + 1))
        if not line:
            raise EOFError
        line = line.rstrip("\r\n")
        write(prompt + line)  # so that the output reads as a conversation
        return line


class TerminalLines:
    """prompt_toolkit: Enter sends; Esc Enter, or Enter after a backslash, begins a new line; what
    is pasted stays as it is, line breaks and all.
    """

    def __init__(self, complete: Callable[[str], Iterable[str]], history_path: Path) -> None:
        from prompt_toolkit import PromptSession

        self._session: PromptSession[str] = PromptSession(
            message=PROMPT,
            multiline=True,
            prompt_continuation=MORE,
            history=_history(history_path),
            completer=_completer(complete),
            complete_while_typing=True,
            key_bindings=_keys(),
            reserve_space_for_menu=6,
        )

    def read(self) -> str:
        # a byte that is not UTF-8 comes as half a character, which no model reads
        return self._session.prompt().encode(errors="replace").decode()


def _history(path: Path) -> "History":
    """The file, for its owner alone; in memory where it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk: it stays in memory
                super().store_string(string)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = (
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        )
        descriptor = os.open(path, flags, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError:
        return InMemoryHistory()
    return Kept(str(path))


def _completer(complete: Callable[[str], Iterable[str]]) -> Any:
    from prompt_toolkit.completion import Completer, Completion

    class Commands(Completer):
        def get_completions(self, document: "Document", event: Any) -> Iterator[Completion]:
            before = document.text_before_cursor
            for text in complete(before):
                word = text.rpartition(" ")[2]
                yield Completion(word, start_position=-len(before.rpartition(" ")[2]))

    return Commands()


def _keys() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys
