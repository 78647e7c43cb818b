r"""The rules of a reply: patterns that it must hold, and patterns that it must not.

A pattern is a text, compared without regard to case, blanks and the form of an apostrophe, with
`I'm` and `I am` the same; where it begins or ends with a letter or digit, a word begins or ends
there too (`Ada` is not in `Canada`). Behind `re:` it is a regular expression of RE2, compared in
the same way; it has no look-around or back references, and its `\b` and `\w` know ASCII letters
alone. Nothing is guessed: the verdict names each pattern that is missing and each that was hit.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlxstacks.files.expressions import compile_expression

RULES = (
    "A reply passes when it holds every required pattern and no forbidden one: case-insensitive, "
    "whole words, blanks as one, I'm as I am; re: marks a regular expression."
)
EXPRESSION = "re:"
_APOSTROPHES = str.maketrans({"\u2019": "'", "\u2018": "'", "\u02bc": "'", "\u0060": "'"})
_CONTRACTIONS = (
    (re.compile(r"\bi'm\b"), "i am"),
    (re.compile(r"\b(it|that|he|she|who|what|name)'s\b"), r"\1 is"),
    (re.compile(r"\b(are|is|was|do|does|did|have|has)n't\b"), r"\1 not"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """missing: required patterns that the reply does not hold. hit: forbidden ones that it does."""

    missing: tuple[str, ...] = ()
    hit: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.missing and not self.hit

    @property
    def reason(self) -> str:
        """In words."""
        words = []
        if self.missing:
            words.append(f"missing {', '.join(map(repr, self.missing))}")
        if self.hit:
            words.append(f"forbidden {', '.join(map(repr, self.hit))}")
        return "; ".join(words) or "passed"


def score(reply: str, required: Sequence[str], forbidden: Sequence[str]) -> Verdict:
    """The verdict of a reply. Laws: an empty one holds no pattern; case and blanks decide nothing.

    Raises: as `holds`.
    """
    text = normalised(reply)
    return Verdict(
        tuple(pattern for pattern in required if not holds(pattern, text)),
        tuple(pattern for pattern in forbidden if holds(pattern, text)),
    )


def normalised(text: str) -> str:
    """Lower case, plain apostrophes, common contractions written out, runs of blanks as one."""
    text = " ".join(text.translate(_APOSTROPHES).casefold().split())
    for contraction, words in _CONTRACTIONS:
        text = contraction.sub(words, text)
    return text


def check_pattern(pattern: str) -> None:
    """Raises: ValueError for a blank or broken pattern, and for an expression that also fits
    nothing: it is in every text.
    """
    if holds(pattern, ""):
        raise ValueError(f"{pattern!r:.200} fits an empty text, so it says nothing of a reply")


def holds(pattern: str, text: str) -> bool:
    """Whether a `normalised` text holds a pattern.

    Raises: ValueError for a pattern that is blank or no expression.
    """
    if not pattern.startswith(EXPRESSION):
        return _words(pattern).search(text) is not None
    try:
        expression = compile_expression(pattern.removeprefix(EXPRESSION).strip(), ignore_case=True)
    except ValueError as error:
        raise ValueError(
            f"{pattern!r:.200} is no regular expression: {error}; what must and must not be there "
            "can be several patterns"
        ) from None
    # Half a character, which a file of answers can hold, is none to RE2.
    return expression.search(text.encode(errors="replace").decode()) is not None


@functools.lru_cache(maxsize=1024)
def _words(pattern: str) -> re.Pattern[str]:
    text = normalised(pattern)
    if not text:
        raise ValueError("a blank pattern is in every text; leave it out")
    before = r"(?<!\w)" if re.match(r"\w", text) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", text) else ""
    return re.compile(before + re.escape(text) + after)
