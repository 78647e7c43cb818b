"""What `chat` and `generate` share: the model where none is named, how answers are shown."""

import contextlib
import itertools
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from mlxstacks.cli import output
from mlxstacks.errors import InputError
from mlxstacks.memory import bytes_in_words
from mlxstacks.study.document import counted
from mlxstacks.study.render.progress import ProgressBar

if TYPE_CHECKING:
    from mlxstacks.routing.conversation import Turn
    from mlxstacks.routing.engine import Answer
    from mlxstacks.routing.settings import BaseSettings

Answering = TypeVar("Answering", bound="BaseSettings")

# More than a context of a million tokens holds. What is longer has no end, as /dev/zero.
MOST_CHARACTERS = 8_000_000


def completed(settings: "Answering") -> "Answering":
    """`with_nano`, said on stderr where nothing was named."""
    from mlxstacks.nano.exports import with_nano

    if settings.model is None and settings.store_path is None:
        output.note("Using nano, the built-in model.")
    return with_nano(settings)


def bounded(text: str) -> str:
    """The text. Raises: InputError: it has more than MOST_CHARACTERS."""
    if len(text) > MOST_CHARACTERS:
        raise InputError(
            f"standard input: got more than {MOST_CHARACTERS:,} characters for one prompt; no "
            "model's context holds them"
        )
    return text


def write_answer(pieces: Iterable[str]) -> None:
    """Stream an answer to stdout as it comes, on a terminal word by word; a line break ends it."""
    last = "\n"
    width = output.console().width if sys.stdout.isatty() else None
    for piece in pieces if width is None else wrapped(pieces, width):
        output.write(piece, end="")
        last = piece[-1:] or last
    if last != "\n":
        output.write("")


def wrapped(pieces: Iterable[str], width: int) -> Iterator[str]:
    """Pieces with a line break instead of the blanks before a word that a line of `width` columns
    has no room for. A word is held until it ends, or fills a line.

    Law: without the breaks that were put in, and the blanks that they stand for, the same text.
    """
    from rich.cells import cell_len

    column, blanks, word = 0, "", ""
    for character in itertools.chain(itertools.chain.from_iterable(pieces), [""]):
        if character.strip() and cell_len(word) < width:
            word += character
            continue
        if word:
            if column and column + cell_len(blanks + word) > width:
                column, blanks = 0, "\n"
            yield blanks + word
            column += cell_len(blanks.lstrip("\n") + word)
            blanks = word = ""
        if character == "\n":
            yield blanks + character
            column, blanks = 0, ""
        elif character.strip():
            word = character
        else:
            blanks += character
    if blanks:
        yield blanks


def status_line(turn: "Turn", alone: bool = False) -> str:
    """One line about an answer: weights, loads, tokens and speed, the cache, marks. alone: there is
    a model and nothing beside it, so nothing to say of what answered.
    """
    answer = turn.answer
    speed = answer.tokens_per_second
    said = counted(answer.tokens, "token") + ("" if speed is None else f", {speed:.3g}/s")
    kept = f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens cached"
    who = "" if alone else weights_in_words(answer)
    return " | ".join(filter(None, [who, _loads(answer), said, kept, *answer.marks]))


def weights_in_words(answer: "Answer") -> str:
    """`routed: islands 0.93, tolu 0.41`; without weights where all of them are 1. With those of the
    prompt alone where the conversation keeps others.
    """
    mode, weights = answer.route.mode, answer.weights
    if mode == "base":
        return " with ".join(filter(None, ["base", ", ".join(answer.adapters)]))
    if not weights:
        return f"{mode}: no domain, base alone"
    ones = all(weight == 1 for weight in weights.values())
    words, alone = (
        ", ".join(name if ones else f"{name} {weight:.2f}" for name, weight in of.items())
        for of in (weights, answer.route.alone)
    )
    kept = f" (kept from before; this prompt alone: {alone})" if alone and alone != words else ""
    return f"{mode}: {words}{kept}"


def _loads(answer: "Answer") -> str:
    read = f"{bytes_in_words(answer.bytes_read)} in {duration(answer.load_seconds)}"
    loaded = f"loaded {', '.join(answer.loaded)} ({read})" if answer.loaded else ""
    there = f"resident {', '.join(answer.resident)}" if answer.resident else ""
    return ", ".join(filter(None, [loaded, there]))


def duration(seconds: float) -> str:
    """`1.6 s`, `38 ms`, `0.4 ms`."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Inside the block Ctrl-C asks for a stop, which the function that is yielded tells; so no step
    of the model is broken off in the middle. A second Ctrl-C interrupts as ever.
    """
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():  # only it gets signals
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        with _no_marks():
            yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _no_marks() -> Iterator[None]:
    """Inside the block the terminal writes nothing into the answer: no ^C, and nothing of what is
    typed, which the next prompt then has.
    """
    try:
        terminal = sys.stdin.fileno()
        attributes = termios.tcgetattr(terminal)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    quiet = [*attributes]
    quiet[3] &= ~(termios.ECHOCTL | termios.ECHO)
    try:
        termios.tcsetattr(terminal, termios.TCSANOW, quiet)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, attributes)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP, which elsewhere are a Ctrl-C, end the process at once:
    nobody who sends them means an answer alone.
    """

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(130)

    with contextlib.ExitStack() as before:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.default_int_handler:  # else it is ignored
                    signal.signal(number, leave)
                    before.callback(signal.signal, number, signal.default_int_handler)
        yield


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Says on a terminal that a model is being loaded; gone when it is."""
    from rich.console import Console

    with Console(stderr=True).status("loading the model"):
        yield


@contextlib.contextmanager
def reading() -> Iterator[Callable[[int, int], None]]:
    """A bar for prompts that take seconds to read; gone when the answer begins."""
    with ProgressBar("reading the prompt", logs=not output.is_silent()) as progress:

        def told(done: int, total: int) -> None:
            if done < total:
                progress(done, total)
            else:
                progress.__exit__(None, None, None)

        yield told
