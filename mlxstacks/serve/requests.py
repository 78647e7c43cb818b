"""What is asked of the engine, and what it says back; neither knows of HTTP or MLX."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxstacks.routing.generation import Prompt, Sampling
from mlxstacks.serve.text import Part

# stop: the model ended it, or a stop text. length: max_tokens, the context or the time.
Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Ask:
    """One request, checked.

    model: as clients name it, see `naming.py`. messages: in the chat template's terms; or text: a
    prompt as it is. n: answers, drawn with seed, seed + 1, ... top_logprobs: None for no log
    probabilities at all.
    """

    model: str
    sampling: Sampling
    messages: tuple[dict[str, Any], ...] = ()
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    top_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer; top: the likeliest ones there, as (text, log probability)."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Begun:
    """It is under way. route: base, ungated, routed or pinned; weights: by name; loaded, resident:
    names read from disk for it, and those that were there.
    """

    route: str
    weights: Mapping[str, float]
    scores: Mapping[str, float]
    gap: bool
    loaded: tuple[str, ...]
    resident: tuple[str, ...]
    load_seconds: float
    prompt_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "route": self.route, "weights": dict(self.weights), "scores": dict(self.scores),
            "gap": self.gap, "loaded": list(self.loaded), "resident": list(self.resident),
            "load_seconds": self.load_seconds,
        }  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Of answer `index`: what a token adds. At its end finish is there, and tokens, all in all."""

    index: int
    parts: tuple[Part, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    stop_text: str | None = None
    tokens: int = 0


@dataclass(frozen=True)
class Refused:
    """It is not answered, or no further. status: of HTTP."""

    status: int
    message: str


Event = Begun | Piece | Refused


@dataclass(eq=False)
class Ticket:
    """A request on its way. prompt: of `Engine.encode`. deliver: takes events, in the engine's
    thread. seconds: it may take.
    """

    ask: Ask
    prompt: Prompt
    deliver: Callable[[Event], None]
    seconds: float
    began: float = field(default_factory=time.monotonic)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Nobody waits for the rest."""
        self._cancelled.set()

    @property
    def is_over(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.began > self.seconds
