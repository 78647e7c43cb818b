"""Chat markers and special tokens that are written in data, taken out of rows.

They are traces of another template, and no part of what a model should learn to say.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

# Gemma, angle brackets, ChatML, pipes, Llama 3, Llama 2: 21 in all, any case.
MARKERS = (
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_conversation>",
    "<end_of_conversation>",
    "<bos>",
    "<eos>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "<</SYS>>",
)
# Reasoning is content, also where a tokenizer has tokens of its own for it.
KEPT = ("<think>", "</think>")
# Some tokenizers call "!" or a line break a special token; such a one cannot be told from text.
SHORTEST_TOKEN = 3


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """What a tokenizer treats as special when it meets it in text; sorted, without think tags.

    tokenizer: of transformers or mlx-lm's wrapper around one; any other has none.
    """
    found = set(getattr(tokenizer, "all_special_tokens", None) or ())
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    found |= {str(token) for token in added.values() if getattr(token, "special", False)}
    return tuple(
        sorted(
            token
            for token in found
            if len(token) >= SHORTEST_TOKEN and token.strip() and token.lower() not in KEPT
        )
    )


def strip_markers(text: str, tokens: Iterable[str] = ()) -> str:
    """Text without the markers and without `tokens`; every other character stays as it is.

    Laws: no marker is left, also none that two halves made; a text without one stays the same.
    """
    return _without(text, _markers(tuple(sorted(tokens))))


@dataclass(frozen=True, slots=True)
class _Markers:
    """anywhere, at_end: the expressions; first, last: characters that begin or end a marker."""

    anywhere: re.Pattern[str]
    at_end: re.Pattern[str]
    longest: int
    first: frozenset[str]
    last: frozenset[str]


@cache
def _markers(tokens: tuple[str, ...]) -> _Markers:
    found = sorted({*MARKERS, *tokens}, key=lambda marker: (-len(marker), marker))
    either = "|".join(map(re.escape, found))
    first = frozenset(case for marker in found for case in _cases(marker[0]))
    return _Markers(
        re.compile(f"(?=[{re.escape(''.join(sorted(first)))}])(?:{either})", re.IGNORECASE),
        re.compile(rf"(?:{either})\Z", re.IGNORECASE),
        len(found[0]),
        first,
        frozenset(case for marker in found for case in _cases(marker[-1])),
    )


def _cases(character: str) -> tuple[str, str]:
    return character.lower(), character.upper()


def _without(text: str, markers: _Markers) -> str:
    # Most texts hold no first character of a marker, which is found a hundred times faster.
    if not any(character in text for character in markers.first):
        return text
    text = markers.anywhere.sub("", text)
    if not markers.anywhere.search(text):
        return text
    # Two halves closed up into a marker. One scan takes these out, however deeply nested: after
    # each character only the end of what is kept can be a marker.
    kept: list[str] = []
    for character in text:
        kept.append(character)
        if character in markers.last:
            found = markers.at_end.search("".join(kept[-markers.longest :]))
            if found:
                del kept[len(kept) - len(found.group()) :]
    return "".join(kept)
