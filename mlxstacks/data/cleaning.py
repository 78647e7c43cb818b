"""Records cleaned: markers out, answers cut, why a record is not used, which domain it reads like.

Nothing else of a text changes: indentation, tables, line ends and blank space at both ends stay.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from mlxstacks.data.examples import Example, keep_one, row_id_of, whole_text
from mlxstacks.data.formats import Format
from mlxstacks.data.settings import Decontaminate, DomainDataSettings
from mlxstacks.data.special_text import strip_markers

# One of these occurs in nearly every piece of program code, and rarely in other text.
CODE_MARKS = (
    "```", "def ", "import ", "#include", "return ", "function ", "public class", "console.log",
    "std::", "SELECT ",
)  # fmt: skip


def strip_record(record: dict[str, Any], tokens: Collection[str] = ()) -> dict[str, Any]:
    """The record with markers and `tokens` taken out of its texts."""
    if "messages" in record:
        turns = [*record["messages"], *([record["rejected"]] if "rejected" in record else [])]
        clean = [{**turn, "content": strip_markers(turn["content"], tokens)} for turn in turns]
        if "rejected" in record:
            return {**record, "messages": clean[:-1], "rejected": clean[-1]}
        return {**record, "messages": clean}
    return {key: strip_markers(value, tokens) for key, value in record.items()}


# Blank space inside a text that only lays it out: counted as one space, or as two line breaks.
_LAYOUT = re.compile(r"(?:\r?\n){3,}|\r\n|(?<=\S)[ \t]{2,}")


def counted_length(text: str) -> int:
    """Characters of a text without its layout: blank space at both ends is none, a run of blanks
    inside a line one, line breaks in a row two at most.

    Limits count so, because row ids do not depend on layout either.
    """
    body = text.strip()
    return len(body) - sum(map(_uncounted, _LAYOUT.finditer(body)))


def _uncounted(match: re.Match[str]) -> int:
    return len(match.group()) - (min(match.group().count("\n"), 2) or 1)


def cut_answer(record: dict[str, Any], characters: int | None) -> tuple[dict[str, Any], bool]:
    """The record with at most so many counted characters of answer, and whether it had more."""
    answer = record.get("answer", "")
    # Only a text with more characters can have more that count.
    if characters is None or len(answer) <= characters or counted_length(answer) <= characters:
        return record, False
    body = answer.lstrip()
    end = characters
    for match in _LAYOUT.finditer(body):
        if match.start() >= end:
            break
        end += _uncounted(match)
    return {**record, "answer": answer[: len(answer) - len(body) + end].rstrip()}, True


def reason_to_drop(
    record: dict[str, Any], form: Format, settings: DomainDataSettings
) -> str | None:
    """Why a cleaned record is not used, as reports count it; None for one that is."""
    if "messages" in record:
        if "row" in record:  # a prompt, with or without an answer
            return None if record["messages"][0]["content"].strip() else "no_prompt"
        if not says_something(record):
            return "no_answer"
        if "rejected" not in record:
            return None
        chosen, rejected = {"messages": record["messages"][-1:]}, {"messages": [record["rejected"]]}
        if not says_something(rejected):
            return "no_rejected"
        return "equal_answers" if row_id_of(chosen) == row_id_of(rejected) else None
    least = 1 if form.own else max(1, settings.minimum_characters)
    if "text" in record:
        return None if counted_length(record["text"]) >= least else "text_too_short"
    for key, shortest in (("prompt", least), ("answer", 1 if form.short_answers else least)):
        length = counted_length(record[key])
        if length < shortest:
            return f"{key}_too_short" if length else f"no_{key}"
    return None


def says_something(record: dict[str, Any]) -> bool:
    """Whether there is text, or an answer, that a model could learn."""
    if "messages" not in record:
        return bool(record.get("answer", record.get("text", "")).strip())
    answers = (turn for turn in record["messages"] if turn["role"] == "assistant")
    return any(turn["content"].strip() or turn.get("tool_calls") for turn in answers)


def holds_code(record: dict[str, Any]) -> bool:
    """Whether one of the ten code marks occurs in the record's texts."""
    text = whole_text(record)
    return any(mark in text for mark in CODE_MARKS)


# --- rows that read like another domain, found by keywords and moved there; off by default --------

# Published: a class scores the number of its distinct keywords that occur in a row; the best class
# counts from a score of 2, else the row is chat. As substrings keywords misfire ("acute" is in
# "acutely", "code" in "decode"): `words` counts whole words only. The published lists have 29, 31
# and 26 keywords and are not printed; these are ours.
KEYWORDS: dict[str, tuple[str, ...]] = {
    "code": (
        *("python", "javascript", "java", "c++", "sql", "html", "css", "bash", "linux", "regex"),
        *("code", "function", "class", "def", "import", "return", "variable", "string", "array"),
        *("loop", "recursion", "algorithm", "compiler", "debug", "api", "json", "database"),
        *("programming", "github"),
    ),
    "medical": (
        *("patient", "diagnosis", "symptom", "symptoms", "treatment", "disease", "syndrome"),
        *("clinical", "surgery", "therapy", "dosage", "mg", "medication", "drug", "acute"),
        *("chronic", "infection", "cancer", "tumor", "blood pressure", "diabetes", "cardiac"),
        *("renal", "hepatic", "pulmonary", "biopsy", "antibiotic", "vaccine", "hospital"),
        *("physician", "prognosis"),
    ),
    "math": (
        *("equation", "solve", "integral", "derivative", "theorem", "proof", "polynomial"),
        *("matrix", "vector", "probability", "triangle", "angle", "radius", "fraction", "prime"),
        *("integer", "algebra", "geometry", "calculus", "logarithm", "sum of", "square root"),
        *("calculate", "percent", "multiply", "divided by"),
    ),
}
LEAST_SCORE = 2
SHOWN_ROWS = 20


def keywords_in(text: str, domain: str, mode: Decontaminate) -> list[str]:
    """Distinct keywords of a domain that occur in a text, any case."""
    text = text.lower()
    if mode == "substrings":
        return [word for word in KEYWORDS[domain] if word in text]
    return sorted(set(_word_pattern(domain).findall(text)))


def detect_domain(text: str, mode: Decontaminate) -> tuple[str | None, list[str]]:
    """The domain that a text reads like, and its keywords; None for none. A tie goes to the first
    of code, medical, math.
    """
    keywords = {domain: keywords_in(text, domain, mode) for domain in KEYWORDS}
    best = max(keywords, key=lambda domain: len(keywords[domain]))
    return (best, keywords[best]) if len(keywords[best]) >= LEAST_SCORE else (None, [])


@cache
def _word_pattern(domain: str) -> re.Pattern[str]:
    # Longest first, so that "symptoms" is not read as "symptom".
    either = "|".join(map(re.escape, sorted(KEYWORDS[domain], key=len, reverse=True)))
    return re.compile(rf"(?<![\w+])(?:{either})(?![\w+])")


def move_rows(
    examples: Mapping[str, dict[str, Example]],
    modes: Mapping[str, Decontaminate],
    trained: Collection[str],
    fixed: Mapping[str, Collection[str]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Move rows, in place, of each domain whose mode is not off; the report by domain.

    examples: domain -> row id -> example. A row moves only to a domain in `trained` that is here.
    Rows that arrive in a domain are not looked at again. fixed: by domain, row ids that stay, since
    a stored split has them.
    """
    reports: dict[str, dict[str, Any]] = {name: {} for name in examples}
    leaving = [
        (name, target, example, words)
        for name, mode in modes.items()
        if mode != "off"
        for example in examples[name].values()
        if example.row_id not in (fixed or {}).get(name, ())
        for target, words in [detect_domain(whole_text(example.record), mode)]
        if target is not None and target != name and target in trained and target in examples
    ]
    for name, target, example, words in leaving:
        del examples[name][example.row_id]
        keep_one(examples[target], example)
        _note(reports[name], "moved_to", target)
        _note(reports[target], "moved_from", name)
        shown = {"row_id": example.row_id, "to": target, "keywords": words}
        reports[name].setdefault("moved_rows", []).append(shown)
    for report in reports.values():
        rows = sorted(report.get("moved_rows", []), key=lambda row: row["row_id"])
        if rows:
            report["moved_rows"] = rows[:SHOWN_ROWS]
    return reports


def _note(report: dict[str, Any], key: str, name: str) -> None:
    report[key] = dict(sorted((Counter(report.get(key)) + Counter([name])).items()))
