"""From the answers of an arm to right and wrong, item by item. No model is needed for it.

A likelihood item is right when one candidate alone has the highest score and it is the gold one,
under each normalisation. What a generated answer is worth, the task's own grading says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlxstacks.studies.benchmarks.answers import Given
from mlxstacks.studies.benchmarks.grading import Grade
from mlxstacks.studies.benchmarks.settings import NORMALISATIONS, Normalisation
from mlxstacks.studies.benchmarks.types import BenchItem, Replied, Scored

# Two candidates of the same text may differ in last bits, by their places in a batch.
_TIE = 1e-6
LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One item of one arm. correct: under the primary normalisation; None: not graded.

    by: normalisation -> right or wrong. letter, reference: by letters, and without the first token
    of each candidate; None where that was not asked. cut: the reply ended at max_tokens.
    """

    item_id: str
    stratum: str
    correct: bool | None
    value: str | None
    rule: str
    how: str = ""
    by: Mapping[Normalisation, bool] = field(default_factory=dict)
    tie: bool = False
    letter: bool | None = None
    reference: bool | None = None
    truncated: bool = False
    cut: bool = False
    active_domains: int = 0
    seconds: float = 0.0


def pick(scored: Scored, normalisation: Normalisation) -> int | None:
    """The candidate with the highest score; None where two or more share it.

    Law: adding a constant to all sums changes no pick by `sum`.
    """
    lengths = {
        "sum": (1,) * len(scored.sums), "token": scored.tokens, "character": scored.characters,
    }[normalisation]  # fmt: skip
    values = [value / max(length, 1) for value, length in zip(scored.sums, lengths, strict=True)]
    best = max(values)
    near = _TIE * max(1.0, abs(best))
    top = [place for place, value in enumerate(values) if best - value <= near]
    return top[0] if len(top) == 1 else None


def likelihood_outcomes(
    items: Sequence[BenchItem],
    texts: Sequence[Given],
    letters: Mapping[str, Given],
    reference: Mapping[str, Given],
    primary: Normalisation,
) -> list[Outcome]:
    """letters, reference: by item id, for the items that were asked so as well."""
    return [
        _likelihood(item, given, letters.get(item.item_id), reference.get(item.item_id), primary)
        for item, given in zip(items, texts, strict=True)
    ]


def _likelihood(
    item: BenchItem,
    given: Given,
    letter: Given | None,
    reference: Given | None,
    primary: Normalisation,
) -> Outcome:
    scored = given.answer
    assert isinstance(scored, Scored)
    picks = {name: _alone(item, pick(scored, name)) for name in NORMALISATIONS}
    chosen = picks[primary]
    return Outcome(
        item.item_id, item.stratum, chosen == item.gold,
        None if chosen is None else str(chosen),
        "tie" if chosen is None else "likelihood",
        by={name: place == item.gold for name, place in picks.items()},
        tie=chosen is None,
        letter=_by_letter(item, letter),
        reference=_right(item, reference),
        truncated=scored.truncated,
        active_domains=_active(scored.weights),
        seconds=given.seconds + (letter.seconds if letter else 0.0),
    )  # fmt: skip


def _alone(item: BenchItem, chosen: int | None) -> int | None:
    """None where the same text is there twice: batches alone, and rounding, would choose."""
    if chosen is not None and item.candidates.count(item.candidates[chosen]) > 1:
        return None
    return chosen


def _by_letter(item: BenchItem, given: Given | None) -> bool | None:
    """Letters are a token each in most vocabularies; where they are not, the sum is what counts."""
    if given is None:
        return None
    assert isinstance(given.answer, Scored)
    return pick(given.answer, "sum") == item.gold


def _right(item: BenchItem, given: Given | None) -> bool | None:
    """By the old rule: the mean over tokens, and of equal ones the first."""
    if given is None:
        return None
    scored = given.answer
    assert isinstance(scored, Scored)
    # What is left of a one-token candidate is nothing, and its score 0: the best there is.
    means = [
        value / length if length else 0.0
        for value, length in zip(scored.sums, scored.tokens, strict=True)
    ]
    return means.index(max(means)) == item.gold


def reply_outcomes(
    items: Sequence[BenchItem],
    replies: Sequence[Given],
    grade: Callable[[BenchItem, str], Grade],
) -> list[Outcome]:
    """Each generated answer graded by `grade(item, text)`."""
    found = []
    for item, given in zip(items, replies, strict=True):
        reply = given.answer
        assert isinstance(reply, Replied)
        graded = grade(item, reply.text)
        found.append(
            Outcome(
                item.item_id, item.stratum, graded.correct, graded.value, graded.rule, graded.how,
                truncated=reply.truncated, cut=reply.finish == LENGTH,
                active_domains=_active(reply.weights), seconds=given.seconds,
            )
        )  # fmt: skip
    return found


def _active(weights: Mapping[str, float]) -> int:
    return sum(weight > 0 for weight in weights.values())
