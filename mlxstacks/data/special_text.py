"""Text stays text: special tokens that are written in what users and data say are not tokens.

A tokenizer reads `<|im_end|>` as the end of a turn wherever it stands. So each such literal in
content gets a cut mark behind its first character before a template is applied, wherever the
template then puts it; the template's own markers have none. Text is encoded piece by piece
between the marks, and no piece holds the literal. Text without such a literal has no mark: its ids
are those of the whole text. (transformers has this since 5.23 as `sanitize_control_tokens`, for a
whole chat at once: without loss masks and cuts, and not for names of arguments or plain texts.)
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

from mlxstacks.errors import CheckpointError, InputError

# Unicode's noncharacters are for such use; where a text holds one, the next is taken.
_MARKS = (*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xF0000, 0xFFFFE)))
# Tokens near a cut depend on what stands behind it: merges and words reach so far, at most.
_MARGIN_TOKENS = 64
_CHARACTERS_PER_TOKEN = 6
_GROWTH = 4
_LONGEST_LITERAL = 1_000
# Gemma, angle brackets, ChatML, pipes, Llama 3, Llama 2: 21 in all, any case.
MARKERS = (
    "<start_of_turn>", "<end_of_turn>", "<start_of_conversation>", "<end_of_conversation>",
    "<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>",
    "<|system|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>",
)  # fmt: skip
# Reasoning is content, also where a tokenizer has tokens of its own for it.
KEPT = ("<think>", "</think>")
SHORTEST_TOKEN = 3


@dataclass(frozen=True)
class _Literals:
    """Of a tokenizer with this chat template. tags: that begin and end reasoning. patterns: match
    the first character of a literal, the rest of it is the group. normalise: as the tokenizer does
    before it looks for tokens; None where it looks first.
    """

    template: Any
    tags: tuple[str, str]
    literals: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    normalise: Callable[[str], str] | None

    @cached_property
    def beginnings(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self.literals for n in range(1, len(text)))

    @cached_property
    def endings(self) -> frozenset[str]:
        return frozenset(text[n:] for text in self.literals for n in range(1, len(text)))

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.literals), default=0)

    def touches(self, text: str) -> bool:
        """Whether a literal could begin at a text's end, end at its beginning, or enclose it."""
        longest = self.longest
        lengths = range(1, min(len(text) + 1, longest))
        return any(text[-n:] in self.beginnings or text[:n] in self.endings for n in lengths) or (
            len(text) < longest and any(text in literal for literal in self.literals)
        )

    def inside(self, text: str) -> list[str]:
        return [f"{match[0]}{match[1]}" for p in self.patterns for match in p.finditer(text)]

    def marked(self, text: str, mark: str) -> str:
        for pattern in self.patterns:
            text = pattern.sub(lambda match: match[0] + mark, text)
        return text


_known: "WeakKeyDictionary[Any, _Literals]" = WeakKeyDictionary()
_embedding_rows: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()


def special_literals(text: str, tokenizer: Any) -> list[str]:
    """The literals of special tokens in a text; overlapping ones too."""
    return _literals(tokenizer).inside(text)


def foreign_markers(text: str, tokenizer: Any) -> list[str]:
    """The markers of chat templates in a text that are no special tokens of this tokenizer."""
    anywhere, _, _, first, _ = _marker_patterns(())
    if not any(character in text for character in first):
        return []
    return [m for m in anywhere.findall(text) if m not in _literals(tokenizer).literals]


def free_marks(texts: Sequence[str], count: int) -> list[str]:
    """So many characters that occur in none of the texts, not even as escapes of JSON."""
    joined = "\n".join(texts)
    free = (mark for mark in _MARKS if mark not in joined and _escape(mark) not in joined)
    return [next(free) for _ in range(count)]


def mark_literals(text: str, tokenizer: Any, mark: str) -> str:
    """The text with `mark` behind the first character of each literal of a special token."""
    literals = _literals(tokenizer)
    if literals.normalise is not None:
        normal = literals.normalise(text)
        if len(literals.inside(normal)) > len(literals.inside(text)):
            text = normal  # what the tokenizer would read; only there it becomes a literal
    return literals.marked(text, mark)


def mark_ends(text: str, tokenizer: Any, mark: str) -> str:
    """The text with marks at its ends, where a template's text could make a literal with it."""
    core = text.strip()
    if not core or not _literals(tokenizer).touches(core):
        return text
    start = text.index(core[0])
    return f"{text[:start]}{mark}{core}{mark}{text[start + len(core) :]}"


def unescaped(text: str, mark: str) -> str:
    """Marks that a template has written as escapes of JSON, as characters again."""
    return text.replace(_escape(mark), mark)


def encode_marked(text: str, mark: str, tokenizer: Any, limit: int | None = None) -> list[int]:
    """Ids of a text, all or the first `limit`, no special token of them from a marked literal.

    Law: without a mark they are those of `tokenizer.encode(text, add_special_tokens=False)`.
    """
    encode = partial(_encode_pieces, mark=mark, tokenizer=tokenizer)
    return encode(text) if limit is None else first_tokens(text, encode, limit)


def encode_text(
    text: str, tokenizer: Any, allow_special: bool = False, limit: int | None = None
) -> list[int]:
    """Ids of a text that somebody wrote, without begin and end marks; all or the first `limit`."""

    def encode(part: str) -> list[int]:
        if allow_special:
            return _encode(part, tokenizer)
        mark = free_marks([part], 1)[0]
        return _encode_pieces(mark_literals(part, tokenizer, mark), mark, tokenizer)

    return encode(text) if limit is None else first_tokens(text, encode, limit)


class SignedMarkers:
    """A template's text as one string that others pass on and put together with texts of theirs:
    its own markers have a sign before them that nobody else knows.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._sign = f"{_MARKS[-1]}{secrets.token_hex(8)}{_MARKS[-1]}"

    def signed(self, text: str, mark: str) -> str:
        """Text of a template, with `mark` in the literals that are not its own."""
        for pattern in _literals(self._tokenizer).patterns:
            text = pattern.sub(lambda match: self._sign + match[0], text)
        return text.replace(mark, "")

    def unsigned(self, text: str) -> str:
        return text.replace(self._sign, "")

    def encode(self, text: str) -> list[int]:
        """Ids; a special token for each literal that is signed, and for no other."""
        mark = free_marks([text], 1)[0]
        first, *signed = (mark_literals(t, self._tokenizer, mark) for t in text.split(self._sign))
        begun = [part.replace(mark, "", 1) if part[1:2] == mark else part for part in signed]
        return _encode_pieces("".join([first, *begun]), mark, self._tokenizer)


def first_tokens(text: str, encode: Callable[[str], list[int]], limit: int) -> list[int]:
    """`encode(text)[:limit]` in time and memory of what is kept."""
    return encode(_settled(text, encode, slice(limit)))[:limit]


def end_of(text: str, encode: Callable[[str], list[int]], limit: int) -> str:
    """An end of the text that has its last `limit` ids (at least one), found in time and memory of
    what is kept. Law: `encode(end_of(text, encode, n))[-n:] == encode(text)[-n:]`.
    """
    return _settled(text, encode, slice(-limit, None))


def _settled(text: str, encode: Callable[[str], list[int]], kept: slice) -> str:
    """A part of a text, from its beginning or its end, whose ids at `kept` are those of the whole.

    Longer parts are encoded until these ids are the same for three that are cut at different
    characters: then what was cut off does not reach to them.
    """
    from_end = kept.stop is None
    limit = -kept.start if from_end else kept.stop
    size = _CHARACTERS_PER_TOKEN * (limit + _MARGIN_TOKENS)
    while size < len(text):
        part, *shorter = (text[-n:] if from_end else text[:n] for n in range(size, size - 3, -1))
        tokens = encode(part)
        if len(tokens) >= limit + _MARGIN_TOKENS and all(
            encode(other)[kept] == tokens[kept] for other in shorter
        ):
            return part
        size *= _GROWTH
    return text


def _encode_pieces(text: str, mark: str, tokenizer: Any) -> list[int]:
    first, *others = text.split(mark)
    tokens = _encode(first, tokenizer)
    ids: dict[str, list[int]] = {}  # whoever writes one literal often writes many
    before = _encode("\n", tokenizer) if others else []
    for piece in others:
        if piece not in ids:
            # Text that goes on has no blank before it, as some tokenizers put before a beginning.
            both = _encode("\n" + piece, tokenizer)
            follows = before and both[: len(before)] == before
            ids[piece] = both[len(before) :] if follows else _encode(piece, tokenizer)
        tokens += ids[piece]
    return tokens


def _encode(text: str, tokenizer: Any) -> list[int]:
    # transformers would log that a text is longer than the model's context: callers say it.
    quiet = {"verbose": False} if hasattr(tokenizer, "model_max_length") else {}
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.end]
        raise InputError(
            f"{near!a} holds half of a surrogate pair, which is no text; mend the prompt, the row "
            "or the chat template that it comes from"
        ) from None
    ids = list(tokenizer.encode(text, add_special_tokens=False, **quiet))
    check_ids(ids, tokenizer)
    return ids


def bind_vocabulary(tokenizer: Any, rows: int) -> None:
    """Refuse, from now on, ids for which a model's embedding of so many rows has none: MLX would
    read past its end. (A tokenizer may hold such tokens as long as no text uses them.)
    """
    _embedding_rows[tokenizer] = rows


def check_ids(ids: Sequence[int], tokenizer: Any) -> None:
    """Raises: CheckpointError for an id without a row in the model's embedding."""
    rows = _embedding_rows.get(tokenizer)
    if rows is not None and (largest := max(ids, default=0)) >= rows:
        raise CheckpointError(
            f"tokenizer.json gives the id {largest:,}, but the model's embedding has {rows:,} "
            "rows; tokenizer and weights have to be of one model"
        )


@cache
def _escape(mark: str) -> str:
    """A character as JSON in ASCII writes it."""
    return json.dumps(mark)[1:-1]


def template_text(tokenizer: Any) -> str:
    """The source of the chat template, of all where it has several; "" where it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return (
        "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)
    )


def reasoning_tags(tokenizer: Any) -> tuple[str, str]:
    """The literals that begin and end reasoning."""
    return _literals(tokenizer).tags


def _literals(tokenizer: Any) -> _Literals:
    template = getattr(tokenizer, "chat_template", None)
    literals = _known.get(tokenizer)
    if literals is None or literals.template != template:
        literals = _known[tokenizer] = _find_literals(tokenizer, template)
    return literals


def _find_literals(tokenizer: Any, template: Any) -> _Literals:
    """Special tokens, and added tokens that the template or mlx-lm's parsers take for markers.

    Other added tokens (tags of HTML, runs of blanks) are words like any other.
    """
    source = template_text(tokenizer)
    names = ("think_start", "think_end", "tool_call_start", "tool_call_end")
    markers = {getattr(tokenizer, name, None) for name in names}
    markers |= {*(getattr(tokenizer, "chat_control_tokens", None) or ())}
    added = (getattr(tokenizer, "added_tokens_decoder", None) or {}).values()
    chosen = [t for t in added if t.special or str(t) in source or str(t) in markers]
    literals = {*map(str, chosen), *(getattr(tokenizer, "all_special_tokens", None) or ())}
    literals = _long_enough(literals)
    if len(longest := max(literals, key=len, default="")) > _LONGEST_LITERAL:
        raise CheckpointError(
            f"a special token of the tokenizer, {longest[:20]!r}..., has {len(longest):,} "
            f"characters; at most {_LONGEST_LITERAL:,} are allowed"
        )
    # A pattern for each first character: the search for one character is many times faster.
    by_initial = groupby(sorted(literals, key=lambda t: (t[0], -len(t), t)), lambda t: t[0])
    patterns = tuple(
        re.compile(f"{re.escape(initial)}(?=({'|'.join(re.escape(t[1:]) for t in same)}))")
        for initial, same in by_initial
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normaliser = getattr(backend, "normalizer", None)
    is_normalised = any(t.normalized and str(t) in literals for t in chosen)
    normalise = normaliser.normalize_str if normaliser is not None and is_normalised else None
    begin, end = (getattr(tokenizer, name, None) for name in names[:2])
    tags = (begin, end) if begin and end else ("<think>", "</think>")
    return _Literals(template, tags, frozenset(literals), patterns, normalise)


# --- markers and special tokens taken out of rows: traces of another template, and no part of what
# --- a model should learn to say


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """What a tokenizer treats as special when it meets it in text; sorted, without think tags.

    tokenizer: of transformers or mlx-lm's wrapper around one; any other has none.
    """
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    tokens = {str(token) for token in added.values() if getattr(token, "special", False)}
    tokens |= set(getattr(tokenizer, "all_special_tokens", None) or ())
    return tuple(sorted(t for t in _long_enough(tokens) if t.lower() not in KEPT))


def _long_enough(literals: Iterable[str]) -> set[str]:
    # Some tokenizers call "!" or a line break a special token; such a one cannot be told from text.
    return {text for text in literals if len(text) >= SHORTEST_TOKEN and text.strip()}


def strip_markers(text: str, tokens: Iterable[str] = ()) -> str:
    """Text without the markers and without `tokens`; every other character stays as it is.

    Laws: no marker is left, also none that two halves made; a text without one stays the same.
    """
    anywhere, at_end, longest, first, last = _marker_patterns(tuple(sorted(tokens)))
    # Most texts hold no first character of a marker, which is found a hundred times faster.
    if not any(character in text for character in first):
        return text
    text = anywhere.sub("", text)
    if not anywhere.search(text):
        return text
    # Two halves closed up into a marker. One scan takes these out, however deeply nested: after
    # each character only the end of what is kept can be a marker.
    kept: list[str] = []
    for character in text:
        kept.append(character)
        if character in last and (marker := at_end.search("".join(kept[-longest:]))):
            del kept[len(kept) - len(marker[0]) :]
    return "".join(kept)


@cache
def _marker_patterns(
    tokens: tuple[str, ...],
) -> tuple[re.Pattern[str], re.Pattern[str], int, frozenset[str], frozenset[str]]:
    """Markers anywhere, at the end; the longest's length; what characters begin one, end one."""
    markers = sorted({*MARKERS, *tokens}, key=lambda marker: (-len(marker), marker))
    either = "|".join(map(re.escape, markers))
    first, last = (
        frozenset(case for m in markers for case in (m[at].lower(), m[at].upper()))
        for at in (0, -1)
    )
    return (
        re.compile(f"(?=[{re.escape(''.join(sorted(first)))}])(?:{either})", re.IGNORECASE),
        re.compile(rf"(?:{either})\Z", re.IGNORECASE),
        len(markers[0]),
        first,
        last,
    )
