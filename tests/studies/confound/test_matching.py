"""The search for the scale of a random delta.

Run: pytest tests/studies/confound/test_matching.py
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.studies.confound.plan import (
    MOST_PROBES,
    TOLERANCE,
    Probe,
    closest,
    next_scale,
    saturated,
)


def searched(target: float, middle: float, n: int = 200, most: float = 1.0) -> list[Probe]:
    """A delta that moves half of what it can at scale `middle`, and the more, the larger it is."""
    probes: list[Probe] = []
    while (scale := next_scale(target, probes)) is not None:
        share = most / (1 + (middle / scale) ** 2)
        probes.append(Probe(scale, round(share * n), n))
    return probes


@given(st.floats(0.05, 0.9), st.floats(-5, 5))
def test_a_scale_is_found_that_moves_as_many(target: float, middle: float) -> None:
    probes = searched(target, math.exp(middle))
    assert len(probes) <= MOST_PROBES
    assert probes[0].scale == 1.0
    assert len({probe.scale for probe in probes}) == len(probes)
    assert abs(closest(target, probes).share - target) <= 2 * TOLERANCE


@pytest.mark.parametrize(("target", "most"), [(0.9, 0.3), (0.0, 1.0)])
def test_a_target_out_of_reach_ends_with_the_nearest(target: float, most: float) -> None:
    probes = searched(target, 1.0, most=most)
    assert len(probes) <= MOST_PROBES
    shares = [abs(probe.share - target) for probe in probes]
    assert abs(closest(target, probes).share - target) == min(shares)


def test_of_two_that_are_as_near_the_larger_scale_is_taken() -> None:
    probes = [Probe(1.0, 25, 100), Probe(2.0, 50, 100)]
    assert closest(0.375, probes).scale == 2.0


def test_where_nothing_moves_the_first_scale_is_the_last() -> None:
    assert next_scale(0.0, [Probe(1.0, 0, 200)]) is None
    assert next_scale(0.4, [Probe(1.0, 0, 200), Probe(4.0, 0, 200)]) == 16.0
    drowned = [Probe(1.0, 54, 200), Probe(4.0, 112, 200), Probe(16.0, 144, 200)]
    assert next_scale(0.8, drowned) == 64.0
    assert next_scale(0.8, [*drowned, Probe(64.0, 131, 200)]) is None
    assert saturated(0.8, [*drowned, Probe(64.0, 131, 200)])
    assert not saturated(0.6, [*drowned, Probe(64.0, 131, 200)])  # it moves enough
    assert not saturated(0.8, drowned)  # more scale may move more
    # More does not always move more.
    upside_down = [Probe(1.0, 20, 100), Probe(0.25, 60, 100)]
    assert next_scale(0.4, upside_down) is None
