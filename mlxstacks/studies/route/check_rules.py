"""What an answer is held to: a text or number in it, the share of thinking and of repeats."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxstacks.studies.route.check_settings import CheckPrompt

# What opens a thought, and what closes it: Qwen and DeepSeek, OpenThoughts, Cohere.
THINK_MARKS = (
    ("<think>", "</think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_RUN = 4  # words
# Not inside a word or a longer number ("x60" and "1.60" hold no 60); a unit may follow at once.
_NUMBER = re.compile(r"(?<![\w.,])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)")


@dataclass(frozen=True)
class Judged:
    """An answer under the rules of its prompt. failed: the rules it breaks, in words."""

    text: str
    think_share: float
    repetition: float
    failed: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "think_share": self.think_share,
            "repetition": self.repetition,
            "failed": list(self.failed),
            "passed": not self.failed,
        }


def judge(
    check: CheckPrompt,
    text: str,
    count_tokens: Callable[[str], int],
    *,
    begins_in_thought: bool = False,
    most_think_share: float,
    most_repetition: float,
) -> Judged:
    """Hold an answer to its rules. What is expected must stand outside of thoughts.

    begins_in_thought: the template's prompt ends with an opening mark.
    """
    said, thought = split_thoughts(text, begins_in_thought)
    thinking, speaking = count_tokens(thought) if thought else 0, count_tokens(said) if said else 0
    share = thinking / (thinking + speaking) if thinking else 0.0
    repeats = repetition(text)
    failed = list(_broken(check, said))
    if share > most_think_share:
        failed.append(f"{share:.0%} of it is thinking")
    if repeats > most_repetition:
        failed.append(f"{repeats:.0%} of it repeats")
    return Judged(text, share, repeats, tuple(failed))


def _broken(check: CheckPrompt, said: str) -> Any:
    lower = said.casefold()
    if not said.strip():
        yield "no answer outside of thoughts"
        return
    if check.expect and not any(text.casefold() in lower for text in check.expect):
        yield f"has none of {', '.join(check.expect)}"
    if check.number is not None and not has_number(said, check.number, check.tolerance):
        yield f"lacks the number {check.number:g}"
    for text in check.forbid:
        if text.casefold() in lower:
            yield f"has {text}"


def split_thoughts(text: str, begins_in_thought: bool = False) -> tuple[str, str]:
    """(what is said, what is thought). A thought that is not closed goes on to the end; a closing
    mark without an opening one ends a thought that the template began.
    """
    opening, closing = THINK_MARKS[0]
    for other_opening, other_closing in THINK_MARKS[1:]:
        text = text.replace(other_opening, opening).replace(other_closing, closing)
    first = text.partition(closing)
    if first[1] and opening not in first[0]:
        begins_in_thought = True
    said, thought, inside, rest = "", "", begins_in_thought, text
    while rest:
        part, mark, rest = rest.partition(closing if inside else opening)
        if inside:
            thought += part
        else:
            said += part
        inside = not inside if mark else inside
    return said, thought


def repetition(text: str) -> float:
    """Share of the runs of four words that stand in the text before; 0 for fewer than five words.

    Law: it lies in [0, 1); a text without a repeated run has 0.
    """
    words = text.split()
    runs = [tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if len(runs) > 1 else 0.0


def has_number(text: str, number: float, tolerance: float) -> bool:
    """Whether a number within `tolerance` stands in the text, thousands with or without commas."""
    found = (float(match.group().replace(",", "")) for match in _NUMBER.finditer(text))
    return any(abs(value - number) <= tolerance for value in found)


def missing_domains(check: CheckPrompt, weights: Mapping[str, float]) -> list[str]:
    """Expected domains that the route leaves out."""
    return [name for name in check.domains if name not in weights]
