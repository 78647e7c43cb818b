"""The scale at which a random delta moves as many answers as a trained one.

Equal norm is not equal disturbance: a trained delta lies where the model listens. The search asks
items that neither the random delta was made from nor any arm is tested on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_PROBES = 8
# Of the share of answers moved; a probe of 200 items knows it to some 3 points.
TOLERANCE = 0.02
_STEP, _FACTOR = 4.0, 1.05


@dataclass(frozen=True)
class Probe:
    """moved: of n items, those answered otherwise than by the unfused persona at this scale."""

    scale: float
    moved: int
    n: int

    @property
    def share(self) -> float:
        return self.moved / self.n


def next_scale(target: float, probes: Sequence[Probe]) -> float | None:
    """The scale to try after these probes, 1 being equal norm; None where the search is over.

    target: the share of answers that the trained adapter moves. Steps of 4 until two scales have
    the target between them, or until a step leads away from it, for a delta that drowns the model
    moves no more answers; then bisection of their logarithms. Laws: at most `MOST_PROBES`; where
    more scale moves more and the target lies within reach, the search ends within `TOLERANCE`, or
    between scales that differ by less than 5%, or there.
    """
    if not probes:
        return 1.0
    if len(probes) >= MOST_PROBES or abs(closest(target, probes).share - target) <= TOLERANCE:
        return None
    low = max((probe.scale for probe in probes if probe.share < target), default=None)
    high = min((probe.scale for probe in probes if probe.share >= target), default=None)
    *before, last = probes
    if high is None:  # too few moved, at every scale
        past = any(probe.share > last.share for probe in before)
        return None if past else last.scale * _STEP
    if low is None:
        past = any(probe.share < last.share for probe in before)
        return None if past else last.scale / _STEP
    if not low < high < math.inf or high / low <= _FACTOR:
        return None
    return math.sqrt(low * high)


def saturated(target: float, probes: Sequence[Probe]) -> bool:
    """Whether no random delta moves as many: the most that any scale moves is too few, and a larger
    scale was tried. What is larger still answers at random, which is guessing.
    """
    most = max(probes, key=lambda probe: (probe.share, -probe.scale))
    return most.share < target and any(probe.scale > most.scale for probe in probes)


def closest(target: float, probes: Sequence[Probe]) -> Probe:
    """That which moves most nearly as many; of two, the larger scale."""
    return min(probes, key=lambda probe: (abs(probe.share - target), -probe.scale))
