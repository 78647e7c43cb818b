"""Two arms beside each other on the same items: their pairs, the interval of their difference."""

import math
from collections.abc import Mapping, Sequence

from mlxstacks.stats import Interval, wilson_interval
from mlxstacks.study.answers import Answer


def paired(
    answers: Mapping[str, Sequence[Answer]], arm: str, control: str
) -> list[tuple[Answer, Answer]]:
    """(answer of the arm, answer of its control) to each item, in order.

    Raises: ValueError for arms that answered different items: such pairs are no pairs.
    """
    of_arm, of_control = answers[arm], answers[control]
    if [answer.item_id for answer in of_arm] != [answer.item_id for answer in of_control]:
        raise ValueError(
            f"{arm} and {control} answered different items ({len(of_arm):,} and "
            f"{len(of_control):,} answers); only the same ones can be compared"
        )
    return list(zip(of_arm, of_control, strict=True))


def paired_interval(
    both: int, gained: int, lost: int, n: int, confidence: float = 0.95
) -> Interval:
    """Interval of (gained - lost) / n, for the rates of two arms on the same n items.

    Newcombe (1998), Statistics in Medicine 17, 2635, method 10: Wilson's intervals of both rates
    and the correlation of the pairs, corrected for continuity. Unlike a bootstrap it has a width
    where no pair differs. Laws: it holds the difference; swapping gained and lost mirrors it.
    Raises: ValueError for counts that are negative or more than n.
    """
    neither = n - both - gained - lost
    if min(both, gained, lost, neither) < 0 or n < 1:
        raise ValueError(f"got {both} both, {gained} gained, {lost} lost of {n}")
    right, other = both + gained, both + lost
    first, second = (wilson_interval(count, n, confidence) for count in (right, other))
    product = right * (n - right) * other * (n - other)
    agreement = float(both * neither - gained * lost)
    if agreement > 0:
        agreement = max(agreement - n / 2, 0.0)
    phi = agreement / math.sqrt(product) if product else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    difference = (gained - lost) / n
    down = reach(right / n - first.low, second.high - other / n)
    up = reach(first.high - right / n, other / n - second.low)
    return Interval(max(-1.0, difference - down), min(1.0, difference + up), confidence)
