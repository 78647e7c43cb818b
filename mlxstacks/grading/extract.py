"""Answers taken out of generated text, each with the rule that found it (Brainstacks).

Every function returns an `Extracted`: the answer as text, or None, and the name of the rule. A rule
that fires more often in one arm than in another is a change of format, not of knowledge, so reports
count them.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

NONE = "none"


@dataclass(frozen=True, slots=True)
class Extracted:
    """value: None where no rule found an answer, which counts as wrong."""

    value: str | None
    rule: str


_NOTHING = Extracted(None, NONE)


# --- boxes ----------------------------------------------------------------------------------------

_BOX = re.compile(r"\\boxed\s*\{")


def boxes(text: str) -> list[str]:
    r"""Contents of every `\boxed{...}` that is closed, outermost ones only, in order.

    Braces are matched at any depth; `\{` and `\}` are characters, not braces. A box that the end of
    the text cuts off is none.
    """
    contents = []
    place = 0
    while match := _BOX.search(text, place):
        end = _closing_brace(text, match.end())
        if end is None:
            place = match.end()  # a later box may still be whole
        else:
            contents.append(text[match.end() : end].strip())
            place = end + 1
    return contents


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace closes that was opened before `start`."""
    depth, place = 1, start
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 1  # whatever follows is escaped
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return place
        place += 1
    return None


def boxed(text: str) -> Extracted:
    r"""MATH: the last box; a box that holds only a box is that one. No box is no answer."""
    contents = boxes(text)
    if not contents:
        return _NOTHING
    content = contents[-1]
    while (match := _BOX.match(content)) and (
        _closing_brace(content, match.end()) == len(content) - 1
    ):
        content = content[match.end() : -1].strip()
    return Extracted(content, "boxed")


# --- numbers --------------------------------------------------------------------------------------

# A minus after a digit or a bracket is a subtraction, not a sign. Digits in threes, or no commas.
_SIGN = r"(?:(?<![\w)\]}])[-\u2212]\s?(?=[$.\d]))?"
# 1.5e3, 1.5 x 10^3, 1.5 \times 10^{3}; three digits: float ends at e308.
_POWER = (
    r"(?:(?:[eE]|\s*(?:\\times|\\cdot|[\u00d7*x])\s*10\s?(?:\^|\*\*)\s?\{?)"
    r"(?P<power>[-+]?\d{1,3})(?!\w)\}?)?"
)
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})\$?(?P<digits>(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    rf"{_POWER}",
    re.ASCII,
)
_MARKER = re.compile(r"####[ \t]*\$?")
GSM8K_TOLERANCE = 0.01


def number(text: str) -> Extracted:
    """GSM8K: the number right after the last `####`, else the last number of the text.

    The value is plain: no commas, no dollar sign, an ASCII minus, no power of ten (`1.5e3` is
    1500). A heading (`#### Step 1`) is no marker. Law: `float` reads every value.
    """
    text = text.replace("\u2212", "-")
    for marker in reversed(list(_MARKER.finditer(text))):
        if match := _NUMBER.match(text, marker.end()):
            return Extracted(_value(match), "marker")
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return Extracted(_value(last), "last number") if last else _NOTHING


def numbers_agree(answer: str | None, gold: str) -> bool:
    """Whether two extracted numbers are less than 0.01 apart. Raises: ValueError for the gold."""
    return answer is not None and abs(float(answer) - float(gold)) < GSM8K_TOLERANCE


def _value(match: re.Match[str]) -> str:
    power = match["power"]
    return _plain(match) if not power else f"{Decimal(f'{_plain(match)}e{power}'):f}"


def _plain(match: re.Match[str]) -> str:
    sign = "-" if match["sign"] else ""
    return sign + match["digits"].replace(",", "")


# --- integers -------------------------------------------------------------------------------------

_ANSWER_INTEGER = re.compile(
    r"answer\s*(?:is|=|:)\W{0,12}?(?P<sign>-?)\$?(?P<digits>\d{1,3}(?:,\d{3})+|\d+)(?![\d])",
    re.IGNORECASE | re.ASCII,
)
_SHORT_INTEGER = re.compile(r"(?<![\w.,])\d{1,3}(?!\w|[.,]\d)", re.ASCII)
_INTEGER = re.compile(rf"(?P<sign>{_SIGN})(?P<digits>\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)", re.ASCII)


def integer(text: str) -> Extracted:
    """AIME: the first integer of the last box that has one, else of the last "answer is", else the
    last integer of one to three digits. The value has no leading zeros.
    """
    for content in reversed(boxes(text)):
        if match := _INTEGER.search(content.replace("{,}", ",").replace("\\,", "")):
            return Extracted(_whole(_plain(match)), "boxed")
    answers = list(_ANSWER_INTEGER.finditer(text))
    if answers:
        return Extracted(_whole(_plain(answers[-1])), "answer is")
    short = _SHORT_INTEGER.findall(text)
    return Extracted(_whole(short[-1]), "last integer") if short else _NOTHING


def _whole(plain: str) -> str:
    """Without leading zeros. Not by `int`: Python refuses the thousands of digits of a loop."""
    digits = plain.removeprefix("-").lstrip("0") or "0"
    return f"-{digits}" if plain.startswith("-") and digits != "0" else digits


# --- letters --------------------------------------------------------------------------------------

_WRAPPERS = re.compile(r"\\(?:text|mathrm|mathbf|textbf|rm|bf)\b|[{}()\[\]$*\s\\]|[.:,;]$")
# What may stand between "answer is" and its letter: brackets, stars, "option", a TeX wrapper.
_BEFORE_LETTER = r"(?:\s|[(*$:{\[]|\\text\w*|\\mathrm|\\mathbf|\\boxed|option|choice|letter)*"
_LAST_CHARACTERS = 50


def choice_letter(text: str, letters: str) -> Extracted:
    r"""MMLU-Pro: the published box, then our order, the first rule that finds one of `letters`:

    boxed             the last `\boxed{X}` whose content is such a letter
    answer is         the last "answer is X", "answer: X"
    first line        the first standalone letter of the first line that is not empty
    last letter       the last standalone letter

    "A" and "I" before a word in small letters are words, not options. Raises: ValueError for
    letters that are none.
    """
    _check(letters)
    for content in reversed(boxes(text)):
        if (letter := _only_letter(content, letters)) is not None:
            return Extracted(letter, "boxed")
    pattern = rf"(?i:answer)\s*(?i:is|:){_BEFORE_LETTER}([{letters}])(?!\w|['\u2019])"
    answers = re.findall(pattern, text)
    if answers:
        return Extracted(answers[-1], "answer is")
    lines = [line for line in text.splitlines() if line.strip()]
    first = _standalone(lines[0], letters) if lines else []
    if first:
        return Extracted(first[0], "first line")
    anywhere = _standalone(text, letters)
    return Extracted(anywhere[-1], "last letter") if anywhere else _NOTHING


def final_letter(text: str, letters: str = "ABCD") -> Extracted:
    """GPQA: the last `ANSWER: X`, else the last standalone letter of the last 50 characters."""
    _check(letters)
    answers = re.findall(rf"ANSWER\s*:{_BEFORE_LETTER}([{letters}])(?!\w|['\u2019])", text)
    if answers:
        return Extracted(answers[-1], "answer")
    # A letter that the cut makes standalone ("...DNA" from its second half on) is none.
    start = max(0, len(text) - _LAST_CHARACTERS)
    standalone = [letter for letter, place in _standalone_places(text, letters) if place >= start]
    return Extracted(standalone[-1], "last letter") if standalone else _NOTHING


def _only_letter(content: str, letters: str) -> str | None:
    r"""`B`, `(B)`, `\text{B.}`, `B) the answer`: the letter that leads the content."""
    bare = _WRAPPERS.sub("", content)
    if len(bare) == 1 and bare in letters:
        return bare
    led = re.match(rf"[({{\[$*\s]*(?:\\text\w*\{{)?\(?([{letters}])\s*[).:]", content)
    return led[1] if led else None


def _standalone(text: str, letters: str) -> list[str]:
    return [letter for letter, _ in _standalone_places(text, letters)]


def _standalone_places(text: str, letters: str) -> list[tuple[str, int]]:
    matches = re.finditer(rf"(?<![\w'\u2019\\])([{letters}])(?!\w|['\u2019])", text)
    return [(m[1], m.start()) for m in matches if not _is_word(m, text)]


def _is_word(match: re.Match[str], text: str) -> bool:
    """The article and the pronoun: "A cell is", "I think"."""
    return match[1] in "AI" and re.match(r" [a-z]", text[match.end() :]) is not None


def _check(letters: str) -> None:
    if not re.fullmatch(r"[A-Z]+", letters) or len(set(letters)) < len(letters):
        raise ValueError(f"got letters {letters!r}; need different capital letters, as 'ABCD'")
