"""What a plan can detect: power and sample sizes for two rates, unpaired and paired.

Sample sizes are the usual normal formulas: Fleiss without continuity correction for two
proportions, Connor (1987) for McNemar's test. Chances at a given n are exact sums over the binomial
distributions, under the very rule that will judge the result. Probabilities lie in (0, 1), effects
are differences of rates (0.05 is five percentage points).
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import NormalDist

from mlxstacks.stats import two_proportion_z_test

ALPHA, POWER = 0.05, 0.8
_EFFECTS = (0.02, 0.05, 0.06, 0.07, 0.08, 0.1)


def items_for_two_proportions(
    rate: float, effect: float, power: float = POWER, alpha: float = ALPHA
) -> int:
    """Items in each of two arms, to find `rate + effect` against `rate` at this power.

    The published 123 of 692 and five points need about 1,015.
    Raises: ValueError for rates outside (0, 1) or an effect of 0.
    """
    _check(rate, rate + effect)
    return _items(partial(_unpaired_noise, rate, power, alpha), effect)


def least_effect_of_two_proportions(
    rate: float, n: int, power: float = POWER, alpha: float = ALPHA
) -> float | None:
    """The smallest gain over `rate` that n items an arm find at this power; None where none."""
    return _least_effect(partial(_unpaired_noise, rate, power, alpha), n, 1 - rate)


def items_for_mcnemar(
    discordant: float, effect: float, power: float = POWER, alpha: float = ALPHA
) -> int:
    """Paired items to find a gain of `effect` where a share `discordant` changes its answer.

    discordant: gained + lost, as a share of all items; effect: gained - lost.
    Raises: ValueError unless 0 < |effect| <= discordant <= 1.
    """
    if not 0 < abs(effect) <= discordant <= 1:
        raise ValueError(f"got an effect of {effect} with {discordant} discordant")
    return _items(partial(_paired_noise, discordant, power, alpha), effect)


def least_effect_of_mcnemar(
    discordant: float, n: int, power: float = POWER, alpha: float = ALPHA
) -> float | None:
    """The smallest gain that n paired items find at this power; None where even gains alone are
    too few.
    """
    return _least_effect(partial(_paired_noise, discordant, power, alpha), n, discordant)


def _unpaired_noise(rate: float, power: float, alpha: float, effect: float) -> float:
    """What n items find at this power is an effect of at least this over sqrt(n)."""
    other, pooled = rate + effect, rate + effect / 2
    spread = math.sqrt(max(0.0, rate * (1 - rate) + other * (1 - other)))
    return _z(1 - alpha / 2) * math.sqrt(2 * pooled * (1 - pooled)) + _z(power) * spread


def _paired_noise(discordant: float, power: float, alpha: float, effect: float) -> float:
    spread = math.sqrt(max(0.0, discordant - effect**2))
    return _z(1 - alpha / 2) * math.sqrt(discordant) + _z(power) * spread


def _items(noise: Callable[[float], float], effect: float) -> int:
    # An effect that was solved for n items must not take one more by rounding.
    return math.ceil((noise(effect) / effect) ** 2 - 1e-6)


def _least_effect(noise: Callable[[float], float], n: int, most: float) -> float | None:
    from scipy.optimize import brentq

    def lacking(effect: float) -> float:
        return noise(effect) - effect * math.sqrt(n)

    return None if lacking(most) > 0 else float(brentq(lacking, 0, most, xtol=1e-15))


def half_widths(rate: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Half the width of the interval of one rate, and of a difference of two, of n items each.

    By the normal approximation, arms taken as unpaired. At the published 18% and n = 692
    they are 2.9 and 4.0 points; one standard error is half of that.
    """
    width = _z(0.5 + confidence / 2) * math.sqrt(rate * (1 - rate) / n)
    return width, math.sqrt(2) * width


def chance_of_passing(
    rate: float, effect: float, n: int, least_gain: float = 0.0, alpha: float = ALPHA
) -> float:
    """Chance that n items an arm show a gain of at least `least_gain` with p < alpha (z-test).

    The published kill criterion is least_gain 0.05, alpha 0.05, n 692.
    Exact: every pair of counts, each with its binomial probability. Raises: ValueError.
    """
    from scipy.stats import binom

    _check(rate, rate + effect, allow_equal=True)
    least = _least_passing_counts(n, least_gain, alpha)
    tails = binom.sf([count - 1 for count in least], n, rate + effect)
    return min(1.0, float(binom.pmf(range(n + 1), n, rate) @ tails))


def passes(count: int, control: int, n: int, least_gain: float, alpha: float) -> bool:
    """Whether `count` of n against `control` of n is a gain by the rule: large enough, and p."""
    # 35 of 700 is five points though 158/692 - 123/692 and 0.05 are floats.
    if count <= control or (count - control) / n < least_gain - 1e-12:
        return False
    return two_proportion_z_test(count, n, control, n).p_value < alpha


def least_passing_count(control: int, n: int, least_gain: float, alpha: float = ALPHA) -> int:
    """The smallest count of n that passes against `control` of n; n + 1 where none does."""
    return bisect_left(
        range(n + 1), True, key=lambda count: passes(count, control, n, least_gain, alpha)
    )


@lru_cache(maxsize=8)  # the same for every effect
def _least_passing_counts(n: int, least_gain: float, alpha: float) -> list[int]:
    return [least_passing_count(control, n, least_gain, alpha) for control in range(n + 1)]


def mcnemar_power(gained: float, lost: float, n: int, alpha: float = ALPHA) -> float:
    """Chance of p < alpha by the exact test with a gain, where these shares of n items change.

    Raises: ValueError for shares that are no probabilities.
    """
    from scipy.stats import binom

    discordant = gained + lost
    if gained < 0 or lost < 0 or not 0 < discordant <= 1:
        raise ValueError(f"got {gained} gained and {lost} lost; need shares with a sum in (0, 1]")
    pairs = range(1, n + 1)
    most_lost = binom.ppf(alpha / 2, pairs, 0.5) - 1  # for p < alpha; -1 where no count is enough
    enough = binom.cdf(most_lost, pairs, lost / discordant)
    return min(1.0, float(binom.pmf(pairs, n, discordant) @ enough))


def _z(probability: float) -> float:
    return NormalDist().inv_cdf(probability)


def _check(rate: float, other: float, *, allow_equal: bool = False) -> None:
    if not (0 < rate < 1 and 0 < other < 1) or (rate == other and not allow_equal):
        raise ValueError(f"got rates {rate} and {other}; need two different ones between 0 and 1")


def power_lines(
    n: int, rate: float, discordant: float, least_gain: float, alpha: float = ALPHA
) -> list[str]:
    """What `n` items show, as it is printed with every plan; the chances to pass last.

    rate: the control's, as expected. discordant: share of items expected to change their answer.
    least_gain: the smallest gain that counts, 0 where any does.
    """
    few = f"at 80% power, alpha {alpha:.4g}"
    unpaired = _points(least_effect_of_two_proportions(rate, n, POWER, alpha))
    paired = _points(least_effect_of_mcnemar(discordant, n, POWER, alpha))
    known = f"the control's rate {rate:.1%}, pairs that differ {discordant:.1%}"
    lines = [
        f"{n} items; taken as known: {known}",
        f"smallest effect {few}: {unpaired} (two proportions), {paired} (McNemar)",
    ]
    if 0 < least_gain < 1 - rate:
        items = items_for_two_proportions(rate, least_gain, POWER, alpha)
        pairs = "more than all"
        if least_gain <= discordant:
            pairs = f"{items_for_mcnemar(discordant, least_gain, POWER, alpha):,}"
        lines.append(
            f"items for {_points(least_gain)} {few}: {items:,} an arm (two proportions), {pairs} "
            "(McNemar)"
        )
    of_rate, of_both = (100 * width for width in half_widths(rate, n))
    intervals = (
        f"95% intervals reach {of_rate:.1f} points to each side of one rate, {of_both:.1f} of a "
        "difference"
    )
    chances = ", ".join(
        f"{100 * effect:g}: {chance_of_passing(rate, effect, n, least_gain, alpha):.0%}"
        for effect in (0.0, *_EFFECTS)
        if rate + effect < 1
    )
    return [
        *lines,
        intervals,
        f"chance to pass by a true effect in points: {chances}",
    ]


def _points(effect: float | None) -> str:
    return "none is large enough" if effect is None else f"{100 * effect:.1f} points"
