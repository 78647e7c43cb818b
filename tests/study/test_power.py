"""Power and sample sizes against the specification's numbers, laws and simulation.

Run: pytest tests/studies/test_power.py
"""

import numpy as np
import pytest

from mlxstacks.stats import mcnemar_exact_test
from mlxstacks.study.power import (
    chance_of_passing,
    half_widths,
    items_for_mcnemar,
    items_for_two_proportions,
    least_effect_of_mcnemar,
    least_effect_of_two_proportions,
    least_passing_count,
    mcnemar_power,
    passes,
)

FLOOR = 123 / 692


def test_items_for_five_points_are_the_published_about_1015() -> None:
    assert items_for_two_proportions(FLOOR, 0.05) == pytest.approx(1015, abs=3)
    # Bonferroni over four claims: (2.498 + 0.842)**2 / (1.960 + 0.842)**2 as many
    assert items_for_two_proportions(FLOOR, 0.05, alpha=0.05 / 4) == pytest.approx(1442, abs=5)


def test_items_of_pairs_by_hand() -> None:
    """Gains alone, of a fifth: (1.959964 sqrt(0.2) + 0.841621 sqrt(0.2 - 0.04))^2 / 0.04 = 36.8."""
    assert items_for_mcnemar(0.2, 0.2) == 37


def test_the_least_effect_and_the_items_are_one_formula() -> None:
    for n in (200, 692, 6000):
        effect = least_effect_of_two_proportions(FLOOR, n)
        assert effect is not None
        assert items_for_two_proportions(FLOOR, effect) <= n
        assert items_for_two_proportions(FLOOR, effect * 0.999) >= n
        paired = least_effect_of_mcnemar(0.1, n)
        assert paired is not None
        assert items_for_mcnemar(0.1, paired) <= n <= items_for_mcnemar(0.1, paired * 0.999)
    assert least_effect_of_two_proportions(0.5, 3) is None
    assert least_effect_of_mcnemar(0.01, 50) is None


@pytest.mark.parametrize(("effect", "percent"), [(5, 50), (6, 68), (7, 82), (8, 91), (10, 99)])
def test_chance_of_passing_the_kill_criterion(effect: int, percent: int) -> None:
    """From the published 123 of 692."""
    chance = chance_of_passing(FLOOR, effect / 100, 692, least_gain=0.05)
    assert 100 * chance == pytest.approx(percent, abs=1.5)


def test_a_null_effect_passes_at_most_half_of_alpha() -> None:
    assert 0.015 < chance_of_passing(0.3, 0.0, 300) < 0.035  # one side of 5%
    assert chance_of_passing(0.3, 0.0, 300, least_gain=0.2) < 1e-6


def test_least_passing_counts_of_the_specification() -> None:
    assert least_passing_count(123, 692, least_gain=0.0) == 153
    assert least_passing_count(123, 692, least_gain=0.05) == 158
    assert least_passing_count(690, 692, least_gain=0.05) == 693
    assert not passes(123, 158, 692, least_gain=0.05, alpha=0.05)  # a loss is no gain
    assert not passes(5, 4, 20, least_gain=0.05, alpha=0.05)  # large, not significant


def test_mcnemar_power_by_simulation() -> None:
    random = np.random.default_rng(0)
    gained, lost, n = 0.09, 0.04, 400
    draws = random.multinomial(n, [gained, lost, 1 - gained - lost], size=600)
    pairs, counts = np.unique(draws[:, :2], axis=0, return_counts=True)
    found = [a > b and mcnemar_exact_test(int(a), int(b)).p_value < 0.05 for a, b in pairs]
    power = mcnemar_power(gained, lost, n)
    assert power == pytest.approx(np.average(found, weights=counts), abs=0.03)
    # Connor's formula asks for about as many items as give this power
    assert items_for_mcnemar(gained + lost, gained - lost, power) == pytest.approx(n, rel=0.12)


@pytest.mark.parametrize(("n", "one", "two"), [(200, 5.3, 7.5), (500, 3.4, 4.8), (692, 2.9, 4.0)])
def test_half_widths_of_the_specification(n: int, one: float, two: float) -> None:
    """At the published 18%."""
    assert [round(100 * width, 1) for width in half_widths(0.18, n)] == [one, two]


def test_half_widths_of_the_published_benchmarks() -> None:
    """Of the published benchmarks: about 0.07 at n = 200, 0.10 for an unpaired difference."""
    assert [round(width, 2) for width in half_widths(0.486, 200)] == [0.07, 0.10]


def test_the_published_noise_is_one_standard_error() -> None:
    """Of "+-3 pp at n=200" and "below 3 pp on n<500": 95% bounds are twice as far away."""
    assert 100 * half_widths(FLOOR, 200)[0] / 1.96 == pytest.approx(3, abs=0.4)
    assert 100 * half_widths(FLOOR, 500)[1] / 1.96 == pytest.approx(3, abs=0.6)
    assert half_widths(0.3, 50, 0.99)[0] > half_widths(0.3, 50)[0]


def test_power_of_few_pairs_by_hand() -> None:
    """Six pairs that all change: significant where none or, at alpha 0.25, at most one is lost."""
    assert mcnemar_power(0.75, 0.25, 6) == pytest.approx(0.75**6)
    more = 0.75**6 + 6 * 0.75**5 * 0.25
    assert mcnemar_power(0.75, 0.25, 6, alpha=0.25) == pytest.approx(more)
    # p of 0 of 5 is exactly 0.0625, which is not below it.
    assert mcnemar_power(1, 0, 5, alpha=0.0625) == 0
    assert mcnemar_power(1, 0, 5, alpha=0.0626) == 1


def test_chance_of_few_items_by_hand() -> None:
    """Two items an arm at alpha 0.05: only two against none pass, z = 2."""
    assert chance_of_passing(0.5, 0.2, 2) == pytest.approx(0.7**2 * 0.5**2)


@pytest.mark.parametrize(("rate", "effect"), [(0.5, 0.0), (0.9, 0.2), (0.0, 0.1), (0.1, -0.2)])
def test_impossible_rates_are_refused(rate: float, effect: float) -> None:
    with pytest.raises(ValueError, match="two different ones"):
        items_for_two_proportions(rate, effect)


def test_impossible_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="discordant"):
        items_for_mcnemar(0.1, 0.2)
    with pytest.raises(ValueError, match="need shares"):
        mcnemar_power(-0.1, 0.2, 10)
