"""What benchmarks, arms and the runner of `mlxstacks eval` tell each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Kind = Literal["likelihood", "generate"]


@dataclass(frozen=True, slots=True)
class BenchItem:
    """One item of a benchmark.

    item_id: of its own within the task. stratum: its subject, "" where the task has none.
    prompt: likelihood: the context that candidates follow; generate: the user's message.
    candidates: continuations with their leading blank; none where the answer is generated.
    letters: the same options as letters (" A", " B"), where the prompt lists them by letter.
    gold: place of the right candidate; else the right answer as text.
    domain: the domain whose stacks the item is for, None where it is not labelled.
    extra: what grading needs besides (tests and entry point of a program).
    """

    item_id: str
    prompt: str
    gold: int | str
    candidates: tuple[str, ...] = ()
    letters: tuple[str, ...] = ()
    stratum: str = ""
    domain: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scored:
    """Candidates of one item, scored by one arm.

    sums: log p of all tokens of each candidate, the first included (nats). tokens, characters: its
    lengths. truncated: the context was cut from the left. weights: domains that were active.
    """

    sums: tuple[float, ...]
    tokens: tuple[int, ...]
    characters: tuple[int, ...]
    truncated: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replied:
    """finish: "stop" at an end mark, "length" at max_tokens. weights: domains that were active."""

    text: str
    tokens: int
    finish: str
    truncated: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)


class Arm(Protocol):
    """A model in one mode. An item is routed once, on its prompt, never on a candidate."""

    name: str
    notes: Sequence[str]

    def score(
        self, items: Sequence[BenchItem], candidates: Literal["texts", "letters"] = "texts"
    ) -> list[Scored]:
        """Candidates (or letters) of each item. Law: the batch changes nothing but last bits."""

    def reply(self, items: Sequence[BenchItem], max_tokens: int) -> list[Replied]:
        """The greedy answer to each prompt."""
