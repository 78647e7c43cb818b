"""What is known of an answer once it has ended, and how thoughts are told from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxstacks.routing.route import Route

# stop: the model ended it. length: max_tokens. context: the model's context is full. stopped: by
# whoever asked, in the middle.
Finish = Literal["stop", "length", "context", "stopped"]


@dataclass(frozen=True)
class Answer:
    """text: without thoughts; thoughts: None where there were none.

    weights: of the domains that answered. loaded, resident: domains read from disk for it, and
    those that were there.
    cached_tokens: of the prompt, that were not computed again. tokens: said, without the end mark.
    prompt_seconds: until the first token; seconds: from there to the last. adapters: names of those
    beside the base.
    """

    text: str
    thoughts: str | None
    finish: Finish
    route: Route
    weights: Mapping[str, float]
    loaded: tuple[str, ...]
    resident: tuple[str, ...]
    load_seconds: float
    bytes_read: int
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    prompt_seconds: float
    seconds: float
    adapters: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding, the first token left out; None for fewer than two."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds > 0 else None

    @property
    def marks(self) -> tuple[str, ...]:
        """What a reader should know about it: a gap, where it was cut off."""
        gap = "gap: no domain fits" if self.route.gap else ""
        words = {
            "length": "cut off at max_tokens", "context": "cut off: the context is full",
            "stopped": "stopped", "stop": "",
        }  # fmt: skip
        return tuple(filter(None, [gap, words[self.finish]]))

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "thoughts": self.thoughts,
            "finish": self.finish,
            "route": route_as_json(self.route),
            "weights": dict(self.weights),
            "loaded": list(self.loaded),
            "resident": list(self.resident),
            "load_seconds": self.load_seconds,
            "bytes_read": self.bytes_read,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "tokens": self.tokens,
            "prompt_seconds": self.prompt_seconds,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "adapters": list(self.adapters),
        }


def route_as_json(route: Route) -> dict[str, Any]:
    return {
        "mode": route.mode,
        "scores": dict(route.scores),
        "weights": dict(route.weights),
        "gap": route.gap,
    }


def begins_in_thought(tokenizer: Any, opening: Sequence[int]) -> bool:
    """Whether the tokens that begin an answer leave the model inside its thoughts."""
    if not getattr(tokenizer, "has_thinking", False):
        return False
    tokens = list(opening)
    return bool(tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens))


def split_thoughts(text: str, tokenizer: Any, inside: bool) -> tuple[str, str | None]:
    """(answer, thoughts or None) of what a model said. inside: it began in its thoughts.

    Thoughts that were cut off have no end mark: then all is thought, and the answer is empty.
    """
    start = getattr(tokenizer, "think_start", None)
    end = getattr(tokenizer, "think_end", None)
    if not start or not end:
        return text, None
    if not inside:
        if not text.lstrip().startswith(start):
            return text, None
        text = text.lstrip().removeprefix(start)
    thoughts, _, answer = text.partition(end)
    return answer.lstrip("\n"), thoughts.strip("\n")
