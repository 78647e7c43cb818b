"""From tokens of an answer to its parts: text, reasoning, calls of tools; cut at a stop text."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Part(NamedTuple):
    """call: of a part of the kind tool, as OpenAI has it: name, and arguments as JSON text."""

    kind: Literal["text", "reasoning", "tool"]
    text: str
    call: dict[str, str] | None = None


class StopText:
    """Finds the first of some texts in text that comes in pieces, and holds back what could become
    one.

    Law: what it lets through is the text up to where the first one begins, however it is cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """What is known to stand before any stop text. After `found`, nothing."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if places:
            place, self.found = min(places)
            return text[:place]
        longest = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]

    def flush(self) -> str:
        """What was held back, at the end."""
        held, self._held = ("" if self.found is not None else self._held), ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Characters at the end of the text with which `stop` begins."""
        most = min(len(text), len(stop) - 1)
        return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(eq=False)
class AnswerText:
    """One answer's text. machine: of `base_model.text_machine`. inside: it begins in its thoughts.
    tools: as the request has them, for mlx-lm's parser of the model's calls.
    """

    tokenizer: Any
    machine: Any
    inside: bool
    stops: Sequence[str]
    tools: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self._detokenizer = self.tokenizer.detokenizer
        self._stop = StopText(self.stops)
        begin = "reasoning" if self.inside else "normal"
        self._state = self.machine.make_state(self.tokenizer.response_initial_state or begin)
        self._tool = ""
        self._last = self._state[0]
        self.calls = 0

    @property
    def stopped(self) -> str | None:
        """The stop text that ended it."""
        return self._stop.found

    def feed(self, token: int) -> list[Part]:
        """What a token adds."""
        self._detokenizer.add_token(token)
        return list(self._parts(self._stop.feed(self._detokenizer.last_segment)))

    def finish(self) -> list[Part]:
        """What is left at the end."""
        self._detokenizer.finalize()
        text = self._stop.feed(self._detokenizer.last_segment) + self._stop.flush()
        parts = list(self._parts(text))
        self._state, rest, state = self.machine.flush(self._state)
        return [*parts, *self._of_state(state, rest), *self._called()]

    def _parts(self, text: str) -> Iterator[Part]:
        self._state, segments = self.machine.split(self._state, text)
        for state, piece in segments:
            yield from self._of_state(state, piece)

    def _of_state(self, state: str, text: str) -> Iterator[Part]:
        if self._last == "tool" and state != "tool":
            yield from self._called()
        self._last = state
        if state == "tool":
            self._tool += text
        elif text:
            yield Part("reasoning" if state == "reasoning" else "text", text)

    def _called(self) -> Iterator[Part]:
        """The calls that stand in what was said to tools; what is none stays text."""
        text, self._tool = self._tool, ""
        if not text.strip():
            return
        try:
            parsed = self.tokenizer.tool_parser(text, self.tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            named = [
                {
                    "name": str(call["name"]),
                    "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                }
                for call in calls
            ]
        except (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError):
            yield Part("text", text)
            return
        for call in named:
            self.calls += 1
            yield Part("tool", "", call)
