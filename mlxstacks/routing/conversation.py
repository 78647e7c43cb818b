"""A conversation: what was said, the route it is held under, and the cache that goes with it.

The cache is kept while the active domains and their weights stay the same. While a router chooses
the same **set** of domains, a conversation keeps the weights it was begun with (`reroute="set"`),
so that what was said need not be read again for a score that moved a little; `reroute="always"`
takes the new weights and reads everything again. When the set changes, everything is read again
under the new route, in either case: an answer is what the model says to the whole conversation
under one route, never a mix of two.

The router sees the last message alone.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mlxstacks.data.examples import as_messages
from mlxstacks.data.json_rows import read_records
from mlxstacks.data.text_settings import ThinkingMode
from mlxstacks.errors import InputError, TargetError
from mlxstacks.files.disk import sync_directory, target_errors, user_path, write_new
from mlxstacks.routing.engine import Answer, AnswerStream, Mode, Progress, RoutedModel
from mlxstacks.routing.generation import Prompt, Sampling
from mlxstacks.routing.router import Route

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One question and its answer. route_seconds: of the decision, loading not included."""

    question: str
    answer: Answer
    route_seconds: float

    def as_json(self) -> dict[str, Any]:
        about = {"question": self.question, "route_seconds": self.route_seconds}
        return {**about, **self.answer.as_json()}


class Conversation:
    """messages: as the next prompt will begin. mode, pins: how the next question is answered, by
    default as the engine was opened to answer; may be changed between turns.
    """

    def __init__(
        self,
        engine: RoutedModel,
        sampling: Sampling,
        *,
        system_prompt: str | None = None,
        thinking: ThinkingMode = "auto",
        mode: Mode | None = None,
        pins: Sequence[str] | None = None,
        reroute: Literal["set", "always"] = "set",
        messages: Sequence[Message] = (),
    ) -> None:
        self.engine, self.sampling, self.thinking = engine, sampling, thinking
        self.mode, self.reroute = mode or engine.mode, reroute
        if pins is None:
            pins = () if mode else engine.pins
        self.pins = tuple(pins)
        self.cache = engine.new_cache()
        self.begin(system_prompt, messages)

    def begin(self, system_prompt: str | None, messages: Sequence[Message] = ()) -> None:
        """Begin a conversation with a system prompt, or without one; mode and pins stay."""
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._opening: list[Message] = [*system, *messages]
        self.restart()

    def restart(self) -> None:
        """Forget what was said; system prompt, mode and pins stay."""
        self.messages = list(self._opening)
        self.turns: list[Turn] = []
        self.cache.clear()
        self._held: Route | None = None

    def ask(
        self,
        text: str,
        prompt: Prompt | None = None,
        *,
        stop: Callable[[], bool] = lambda: False,
        progress: Progress = lambda done, total: None,
    ) -> "Asked":
        """Route a question and begin its answer; iterate over what comes back.

        prompt: what the model reads, in place of the question in the chat template.
        A question whose answer fails, or is stopped before its first token, leaves no trace.
        Raises: InputError: an empty question; one that is longer than the context; no stacks.
        """
        prompt = prompt or self.prompt(text)
        began = time.perf_counter()
        route = self._settled(self.engine.route(text, self.mode, self.pins))
        seconds = time.perf_counter() - began
        sampling = self._sampling(len(self.turns))
        stream = self.engine.stream(
            prompt, route, sampling, self.cache, stop=stop, progress=progress
        )
        return Asked(text, stream, seconds, self)

    def prompt(self, text: str, before: int | None = None) -> Prompt:
        """What the model reads when this is asked; nothing is computed.

        before: how many messages stand before it; default: all.
        Raises: InputError: a question that cannot be answered.
        """
        if not text.strip():
            raise InputError("the prompt is empty")
        messages = [*self.messages[:before], {"role": "user", "content": text}]
        return self.engine.prompt(messages, self.thinking)

    def compared(
        self,
        text: str,
        mode: Mode,
        *,
        again: bool = False,
        stop: Callable[[], bool] = lambda: False,
        progress: Progress = lambda done, total: None,
    ) -> "Asked":
        """The same question in a mode, on a cache of its own: the conversation does not change.

        again: it is the last question once more, as it stood: what was answered to it is left out,
        and the same seed draws.
        """
        prompt = self.prompt(text, before=-2 if again else None)
        began = time.perf_counter()
        route = self.engine.route(text, mode)
        seconds = time.perf_counter() - began
        sampling = self._sampling(len(self.turns) - again)
        stream = self.engine.stream(
            prompt, route, sampling, self.engine.new_cache(), stop=stop, progress=progress
        )
        return Asked(text, stream, seconds)

    def _settled(self, route: Route) -> Route:
        """The weights in use, where the new route has the same domains."""
        held = self._held
        if held is None or self.reroute != "set" or not (held.mode == route.mode == "routed"):
            return route
        if held.weights.keys() != route.weights.keys() or held.weights == route.weights:
            return route
        return replace(route, weights=held.weights, alone=route.weights)

    def _sampling(self, turn: int) -> Sampling:
        """Another seed each turn: equal questions need not get equal draws."""
        return replace(self.sampling, seed=(self.sampling.seed + turn) % 2**64)

    def finished(self, turn: Turn) -> None:
        """Take a turn into the conversation."""
        answer = turn.answer
        message: Message = {"role": "assistant", "content": answer.text}
        if answer.thoughts is not None:
            # templates that know it decide what stays
            message["reasoning_content"] = answer.thoughts
        self.messages += [{"role": "user", "content": turn.question}, message]
        self.turns.append(turn)
        self._held = answer.route

    def save(self, path: str | Path) -> Path:
        """Write a JSONL file of one row: `messages`, as training data have them, and `turns`, each
        answer with its route; whole or not at all.

        Raises: TargetError: the file is there already, or cannot be written.
        """
        target = user_path(path)
        row = {"messages": self.messages, "turns": [turn.as_json() for turn in self.turns]}
        _write_once(target, f"{json.dumps(row)}\n".encode())
        return target

    def load(self, path: str | Path) -> Path:
        """Go on from what `save` wrote, or any file of one row with messages; mode and pins stay.

        Raises: InputError: no such row, or one that no question can follow; nothing changes then.
        """
        source = user_path(path)
        rows = read_records(source)
        try:
            messages = as_messages(rows[0]) or []
            if len(rows) > 1:
                raise InputError(f"{len(rows):,} rows; must be one conversation")
            if not messages or messages[-1]["role"] != "assistant":
                raise InputError("must end with an answer")
            self.engine.prompt([*messages, {"role": "user", "content": "."}], self.thinking)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
        self.restart()
        self.messages = messages
        return source


@dataclass(eq=False, repr=False)
class Asked:
    """Pieces of an answer; afterwards `turn`, None where nothing was said. owner: takes it."""

    question: str
    stream: AnswerStream
    route_seconds: float
    owner: Conversation | None = None
    turn: Turn | None = None

    def __iter__(self) -> Iterator[str]:
        yield from self.stream
        answer = self.stream.answer
        if answer is None or (answer.finish == "stopped" and not answer.tokens):
            return
        self.turn = Turn(self.question, answer, self.route_seconds)
        if self.owner is not None:
            self.owner.finished(self.turn)


def _write_once(target: Path, data: bytes) -> None:
    """A new file under a temporary name, then its own, which nobody may have taken."""
    temporary = target.parent / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    with target_errors(target, len(data)):
        if not target.parent.is_dir():
            raise TargetError(f"{target.parent}: no such directory; choose another place")
        if os.path.lexists(target):
            raise TargetError(f"{target}: exists; choose another name")
        try:
            write_new(temporary, data)
            try:
                os.link(temporary, target)
            except FileExistsError:
                raise TargetError(f"{target}: exists; choose another name") from None
            except OSError:  # a file system without links
                os.rename(temporary, target)
            sync_directory(target.parent)
        finally:
            with suppress(OSError):  # renamed away, or never written
                temporary.unlink()
