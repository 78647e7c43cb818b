"""Rows that read like another domain, found by keywords and moved there. Off by default.

Published: a class scores the number of its distinct keywords that occur in a row; the best class
counts from a score of 2, else the row is chat. As substrings keywords misfire ("acute" is in
"acutely", "code" in "decode"): `words` counts whole words only.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from mlxstacks.data.cleaning import whole_text
from mlxstacks.data.examples import Example
from mlxstacks.data.read_source import keep_one
from mlxstacks.data.settings import Decontaminate

# The published lists have 29, 31 and 26 keywords and are not printed; these are ours.
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
    return sorted(set(_words(domain).findall(text)))


def detect_domain(text: str, mode: Decontaminate) -> tuple[str | None, list[str]]:
    """The domain that a text reads like, and its keywords; None for none. A tie goes to the first
    of code, medical, math.
    """
    found = {domain: keywords_in(text, domain, mode) for domain in KEYWORDS}
    best = max(found, key=lambda domain: len(found[domain]))
    return (best, found[best]) if len(found[best]) >= LEAST_SCORE else (None, [])


@cache
def _words(domain: str) -> re.Pattern[str]:
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
