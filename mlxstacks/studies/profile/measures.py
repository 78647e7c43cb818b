"""Measures of a routing profile: where groups of prompts differ in the experts they go to, and what
chance alone gives.

As in MoE Routing Layers Converge, p[s, l, e] is the share of expert e among the choices of group s
in layer l; the pooled share is the unweighted mean over groups; the divergence of a group
is KL(p_s || pooled) in nats, after adding 1e-9 to every share and normalising again.

Divergence is never 0 on finite samples, and a layer whose routers spread more has more of it
whatever the groups are. So shuffled labels can show "shared top layers" too. Whole prompts change
their labels, never single tokens: tokens of one prompt belong together. And they change among
prompts of like length alone, so that every group keeps its lengths: few long prompts spread more
than many short ones, and a text's first tokens are routed otherwise than its later ones, which are
no differences of what groups are about.

Letters: S groups, L layers with experts, E experts; n documents (prompts).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

EPSILON = 1e-9
# Of prompts whose labels are exchanged the longest has at most so many times the tokens of the
# shortest; benchmarks/profile_false_positives.py counts what wider strata find in nothing.
LENGTH_RATIO = 1.25
MOST_TOP_LAYERS = 5
RANDOM_SETS = 2000


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


def _smoothed(p: np.ndarray) -> np.ndarray:
    """p (..., E) with EPSILON added to every share, sums of 1 again."""
    return (p + EPSILON) / (p + EPSILON).sum(axis=-1, keepdims=True)


def divergence(p: np.ndarray) -> np.ndarray:
    """p (S, L, E) -> KL(p_s || mean over s), (S, L) in nats.

    Laws: never negative (to rounding), 0 for equal groups, at most ln S (to the smoothing); its
    mean over groups is the Jensen-Shannon divergence of them all.
    """
    q, pooled = _smoothed(p), _smoothed(p.mean(axis=0, keepdims=True))
    return np.maximum(0.0, (q * np.log(q / pooled)).sum(axis=-1))


def pairwise_divergence(p: np.ndarray) -> np.ndarray:
    """p (S, L, E) -> KL(p_a || p_b), mean over layers, (S, S) in nats; row a, column b."""
    q = _smoothed(p)
    logs = np.log(q)
    entropy_terms = (q * logs).sum(axis=-1)  # (S, L)
    cross = np.einsum("ale,ble->abl", q, logs)
    return np.maximum(0.0, (entropy_terms[:, None] - cross).mean(axis=-1))


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
    first = inside.astype(np.float64)
    second = first if other is None else other.astype(np.float64)
    both = first @ second.swapaxes(-1, -2)
    return both / (first.sum(axis=-1)[..., :, None] + second.sum(axis=-1)[..., None, :] - both)


def mean_of_pairs(matrix: np.ndarray) -> np.ndarray:
    """Mean of symmetric (..., S, S) over the S (S - 1) / 2 pairs, (...)."""
    rows, columns = np.triu_indices(matrix.shape[-1], 1)
    return np.ascontiguousarray(matrix[..., rows, columns]).mean(axis=-1)


def chance_jaccard(k: int, size: int) -> float:
    """Expected Jaccard of two random k-subsets of `size`: top-3 of 40 gives 0.046.

    Raises: ValueError unless 1 <= k <= size.
    """
    if not 1 <= k <= size:
        raise ValueError(f"got {k} of {size}")
    ways = {n: math.comb(k, n) * math.comb(size - k, k - n) for n in range(k + 1)}
    return sum(w * n / (2 * k - n) for n, w in ways.items()) / math.comb(size, k)


def expert_overlap(p: np.ndarray, top: int) -> np.ndarray:
    """p (S, L, E) -> mean Jaccard over pairs of the `top` experts of each group, (L,)."""
    inside = membership(np.argsort(-p, axis=-1, kind="stable")[..., :top], p.shape[-1])  # (S, L, E)
    return mean_of_pairs(set_jaccard(inside.transpose(1, 0, 2)))


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


# --- chance ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Null:
    """Of n deals. mean_kl (n,); kl: the mean over deals, (S, L); layer_kl (n, L): mean over
    groups; jaccard: k -> (n,); overlap (n, L).
    """

    mean_kl: np.ndarray
    kl: np.ndarray
    layer_kl: np.ndarray
    jaccard: dict[int, np.ndarray]
    overlap: np.ndarray


def group_counts(documents: np.ndarray, labels: np.ndarray, groups: int) -> np.ndarray:
    """documents (n, L, E), labels (n,) in 0..S-1 -> sums (S, L, E)."""
    member = (labels[None] == np.arange(groups)[:, None]).astype(documents.dtype)  # (S, n)
    flat = member @ documents.reshape(len(documents), -1)
    return flat.reshape(groups, *documents.shape[1:])


def length_strata(lengths: np.ndarray, ratio: float = LENGTH_RATIO) -> np.ndarray:
    """lengths (n,) in tokens -> strata (n,), 0, 1, ... from the shortest: each begins with the
    shortest prompt that is left and has all up to `ratio` times its length.
    """
    strata = np.empty(len(lengths), dtype=np.int64)
    number, shortest = -1, -math.inf
    for place in np.argsort(lengths, kind="stable"):
        if lengths[place] > ratio * shortest:
            number, shortest = number + 1, lengths[place]
        strata[place] = number
    return strata


def comparable(strata: np.ndarray, labels: np.ndarray) -> int:
    """How many of the prompts have one of another group in their stratum."""
    mixed = [s for s in np.unique(strata) if len(np.unique(labels[strata == s])) > 1]
    return int(np.isin(strata, mixed).sum())


def shuffle_within(strata: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """labels (n,), shuffled within each of strata (n,). Law: every stratum keeps its labels."""
    shuffled_labels = np.empty_like(labels)
    order = np.lexsort((rng.random(len(labels)), strata))
    shuffled_labels[order] = labels[np.argsort(strata, kind="stable")]
    return shuffled_labels


def shuffled(
    documents: np.ndarray,
    labels: np.ndarray,
    strata: np.ndarray,
    groups: int,
    ks: Sequence[int],
    top_experts: int,
    permutations: int,
    seed: int,
    tick: Callable[[int], None] | None = None,
) -> Null:
    """Measures of documents (n, L, E) under `permutations` random labels: labels (n,) shuffled
    within strata (n,).
    """
    rng = np.random.default_rng([seed, 1])
    deals: list[Measures] = []
    for number in range(permutations):
        dealt_labels = shuffle_within(strata, labels, rng)
        deals.append(measure(group_counts(documents, dealt_labels, groups), ks, top_experts))
        if tick:
            tick(number + 1)
    return Null(
        np.array([dealt.mean_kl for dealt in deals]),
        np.mean([dealt.kl for dealt in deals], axis=0),
        np.array([dealt.kl.mean(axis=0) for dealt in deals]),
        {k: np.array([dealt.jaccard[k] for dealt in deals]) for k in ks},
        np.array([dealt.overlap for dealt in deals]),
    )


def excess_divergence(documents: np.ndarray, deals: Sequence[np.ndarray], groups: int) -> float:
    """Mean divergence of documents (n, L, E) under the first of the labels (n,), less the mean of
    that under the others, nats: what chance gives depends on how evenly a router spreads.
    """
    own, *others = (
        float(divergence(shares(group_counts(documents, labels, groups))).mean())
        for labels in deals
    )
    return own - float(np.mean(others))


def p_value(found: float, null: np.ndarray) -> float:
    """Share of the null, this one counted, that is as large. Law: in (0, 1]."""
    # Sums in another order miss by rounding.
    return float((1 + np.sum(null >= found - 1e-12 * max(1.0, abs(found)))) / (1 + len(null)))


def adjusted_p_values(found: np.ndarray, null: np.ndarray) -> list[float]:
    """found (L,), null (n, L) -> p-values that hold for all L together: each layer, in standard
    deviations of its null, against the largest layer of each deal (Westfall and Young 1993).

    Holm's rule would need hundreds of deals for each layer; this needs no more for many layers.
    Law: never below `p_value` of the layer alone in the same units.
    """
    mean, spread = null.mean(axis=0), np.maximum(null.std(axis=0), 1e-15)
    largest = ((null - mean) / spread).max(axis=1)  # (n,)
    return [p_value(float(value), largest) for value in (found - mean) / spread]


def random_sets_jaccard(groups: int, k: int, layers: int, seed: int) -> np.ndarray:
    """Mean pairwise Jaccard of random k-sets of layers, a number a draw, (RANDOM_SETS,)."""
    rng = np.random.default_rng([seed, 2])
    sets = rng.random((RANDOM_SETS, groups, layers)).argpartition(k - 1, axis=-1)[..., :k]
    return mean_of_pairs(set_jaccard(membership(sets, layers)))


def split_halves(
    documents: np.ndarray, labels: np.ndarray, groups: int, k: int, times: int, seed: int
) -> tuple[float, float]:
    """Mean Jaccard of the top-k layers of two halves: of one group, and of two groups. Sets of one
    group that differ from half to half leave nothing to read off a difference between groups.

    documents (n, L, E), labels (n,); at least two prompts a group.
    """
    rng = np.random.default_rng([seed, 3])
    layers = documents.shape[1]
    same, other = [], []
    for _ in range(times):
        first = np.zeros(len(labels), dtype=bool)
        for group in range(groups):
            places = rng.permutation(np.flatnonzero(labels == group))
            first[places[: len(places) // 2]] = True
        sets = []
        for half in (first, ~first):
            counts = group_counts(documents[half], labels[half], groups)
            sets.append(membership(top_layers(divergence(shares(counts)), k), layers))
        table = set_jaccard(sets[0], sets[1])  # (S, S)
        on_diagonal = np.eye(groups, dtype=bool)
        same.append(table[on_diagonal].mean())
        other.append(table[~on_diagonal].mean())
    return float(np.mean(same)), float(np.mean(other))
