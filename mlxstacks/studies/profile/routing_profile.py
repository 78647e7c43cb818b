"""Measures of a routing profile: where groups of prompts differ in the experts they go to.

spec/metal_limits_and_routing.md part B. p[s, l, e] is the share of expert e among the choices of
group s in layer l; the pooled share is the unweighted mean over groups; the divergence of a group
is KL(p_s || pooled) in nats, after adding 1e-9 to every share and normalising again.

Letters: S groups, L layers with experts, E experts; n documents (prompts).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

EPSILON = 1e-9
MOST_TOP_LAYERS = 5


@dataclass(frozen=True, eq=False)
class Measures:
    """Of one set of counts. kl (S, L) nats; top: for k = 1, 2, ... the top-k layers of each group,
    (S, k) places in order; jaccard: k -> mean over pairs; overlap (L,): of the top experts, mean
    over pairs.
    """

    kl: np.ndarray
    top: dict[int, np.ndarray]
    jaccard: dict[int, float]
    overlap: np.ndarray

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())


def measure(counts: np.ndarray, ks: Sequence[int], top_experts: int) -> Measures:
    """All measures of counts (S, L, E), S >= 2."""
    p = shares(counts)
    kl = divergence(p)
    top = {k: top_layers(kl, k) for k in ks}
    layers = counts.shape[1]
    jaccard = {k: float(mean_of_pairs(set_jaccard(membership(top[k], layers)))) for k in ks}
    return Measures(kl, top, jaccard, expert_overlap(p, top_experts))


def shares(counts: np.ndarray) -> np.ndarray:
    """counts (..., E) -> p (..., E), float64, sums of 1.

    Raises: ValueError where a group has no choice in a layer.
    """
    totals = counts.sum(axis=-1, keepdims=True, dtype=np.float64)
    if not (totals > 0).all():
        raise ValueError("a group has no choices in some layer; every group needs tokens")
    return counts / totals


def smoothed(p: np.ndarray) -> np.ndarray:
    """p (..., E) with EPSILON added to every share, sums of 1 again."""
    return (p + EPSILON) / (p + EPSILON).sum(axis=-1, keepdims=True)


def divergence(p: np.ndarray) -> np.ndarray:
    """p (S, L, E) -> KL(p_s || mean over s), (S, L) in nats.

    Laws: never negative (to rounding), 0 for equal groups, at most ln S (to the smoothing); its
    mean over groups is the Jensen-Shannon divergence of them all.
    """
    own, pooled = smoothed(p), smoothed(p.mean(axis=0, keepdims=True))
    return np.maximum(0.0, (own * np.log(own / pooled)).sum(axis=-1))


def pairwise_divergence(p: np.ndarray) -> np.ndarray:
    """p (S, L, E) -> KL(p_a || p_b), mean over layers, (S, S) in nats; row a, column b."""
    own = smoothed(p)
    logs = np.log(own)
    own_terms = (own * logs).sum(axis=-1)  # (S, L)
    cross = np.einsum("ale,ble->abl", own, logs)
    return np.maximum(0.0, (own_terms[:, None] - cross).mean(axis=-1))


def top_layers(kl: np.ndarray, k: int) -> np.ndarray:
    """The k layers (places) of highest divergence of each group, (S, k); ties by lower place."""
    return np.argsort(-kl, axis=1, kind="stable")[:, :k]


def membership(sets: np.ndarray, size: int) -> np.ndarray:
    """sets (..., k) of places -> (..., size) bool."""
    inside = np.zeros((*sets.shape[:-1], size), dtype=bool)
    np.put_along_axis(inside, sets, True, axis=-1)
    return inside


def set_jaccard(inside: np.ndarray, other: np.ndarray | None = None) -> np.ndarray:
    """inside (..., S, m), other (..., S', m) bool, no empty set -> |A & B| / |A | B|,
    (..., S, S').
    """
    one = inside.astype(np.float64)
    two = one if other is None else other.astype(np.float64)
    both = one @ two.swapaxes(-1, -2)
    return both / (one.sum(axis=-1)[..., :, None] + two.sum(axis=-1)[..., None, :] - both)


def mean_of_pairs(matrix: np.ndarray) -> np.ndarray:
    """Mean of symmetric (..., S, S) over the S (S - 1) / 2 pairs, (...)."""
    rows, columns = np.triu_indices(matrix.shape[-1], 1)
    return np.ascontiguousarray(matrix[..., rows, columns]).mean(axis=-1)


def chance_jaccard(k: int, size: int) -> float:
    """Expected Jaccard of two random k-subsets of `size`: top-3 of 40 gives 0.046.

    Raises: ValueError unless 1 <= k <= size.
    """
    from scipy.stats import hypergeom

    if not 1 <= k <= size:
        raise ValueError(f"got {k} of {size}")
    return float(hypergeom(size, k, k).expect(lambda shared: shared / (2 * k - shared)))


def expert_overlap(p: np.ndarray, top: int) -> np.ndarray:
    """p (S, L, E) -> mean Jaccard over pairs of the `top` experts of each group, (L,)."""
    inside = membership(np.argsort(-p, axis=-1, kind="stable")[..., :top], p.shape[-1])  # (S, L, E)
    one = inside.transpose(1, 0, 2).astype(np.float64)  # (L, S, E)
    both = one @ one.transpose(0, 2, 1)  # (L, S, S)
    pairs = np.triu_indices(len(p), 1)
    return (both / (2 * top - both))[:, pairs[0], pairs[1]].mean(axis=-1)


def usual_top_experts(experts: int) -> int:
    """16 of 32 or more (as in the spec), else a quarter: the top half of few is no preference."""
    return 16 if experts >= 32 else max(1, experts // 4)


def expected_bias(groups: int, experts: int, choices: int) -> float:
    """Mean divergence, in nats, that `choices` independent choices a group give where all groups
    are the same: half the degrees of freedom over the choices (Miller 1955).

    A floor: choices of one prompt are not independent, so shuffled labels give more.
    """
    return (experts - 1) * (groups - 1) / (2 * groups * choices)


def least_excess(
    groups: int, experts: int, layers: int, choices: int, alpha: float, power: float = 0.8
) -> float:
    """The smallest mean divergence above `expected_bias`, in nats, that is found at this power, one
    side, where choices are independent: then 2 S C L times the divergence is chi-square with
    k = L (E-1)(S-1) degrees of freedom and noncentral by x, near a normal of variance 2k + 4x.
    Law: twice the choices find half of it.

    A floor, as `expected_bias` is one. Raises: ValueError for alpha or power outside (0, 1).
    """
    if not (0 < alpha < 1 and 0 < power < 1):
        raise ValueError(f"got alpha {alpha} and power {power}; need numbers between 0 and 1")
    degrees = layers * (experts - 1) * (groups - 1)
    bar = NormalDist().inv_cdf(1 - alpha) * math.sqrt(2 * degrees)
    z = NormalDist().inv_cdf(power)
    # x - bar = z sqrt(2k + 4x), solved for x.
    half = bar + 2 * z * z
    root = math.sqrt(half * half - bar * bar + 2 * degrees * z * z)
    return (half + math.copysign(root, z)) / (2 * groups * choices * layers)
