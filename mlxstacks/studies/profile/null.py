"""What chance alone gives: prompts dealt to the groups anew, random layers, split halves.

Divergence is never 0 on finite samples, and a layer whose routers spread more has more of it
whatever the groups are. So shuffled labels can show "shared top layers" too. Whole prompts are
dealt, never single tokens: tokens of one prompt belong together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlxstacks.studies.profile.routing_profile import (
    Measures,
    divergence,
    mean_of_pairs,
    measure,
    membership,
    set_jaccard,
    shares,
    top_layers,
)

RANDOM_SETS = 2000
Tick = Callable[[int], None]


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


def deal(tokens: np.ndarray, groups: int, rng: np.random.Generator) -> np.ndarray:
    """tokens (n,) of each prompt -> labels (n,): prompts in random order, the next group where one
    has its share of the tokens; equal shares to about a prompt.
    """
    order = rng.permutation(len(tokens))
    middles = np.cumsum(tokens[order]) - tokens[order] / 2
    labels = np.empty(len(tokens), dtype=np.int64)
    labels[order] = np.minimum(groups - 1, middles * groups // tokens.sum()).astype(np.int64)
    return labels


def shuffled(
    documents: np.ndarray,
    tokens: np.ndarray,
    groups: int,
    ks: Sequence[int],
    top_experts: int,
    permutations: int,
    seed: int,
    tick: Tick | None = None,
) -> Null:
    """Measures of `permutations` random deals of documents (n, L, E), tokens (n,)."""
    rng = np.random.default_rng([seed, 1])
    found: list[Measures] = []
    for number in range(permutations):
        labels = deal(tokens, groups, rng)
        while len(np.unique(labels)) < groups:  # one prompt can be longer than a group's share
            labels = deal(tokens, groups, rng)
        found.append(measure(group_counts(documents, labels, groups), ks, top_experts))
        if tick:
            tick(number + 1)
    return Null(
        np.array([one.mean_kl for one in found]),
        np.mean([one.kl for one in found], axis=0),
        np.array([one.kl.mean(axis=0) for one in found]),
        {k: np.array([one.jaccard[k] for one in found]) for k in ks},
        np.array([one.overlap for one in found]),
    )


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


@dataclass(frozen=True)
class Halves:
    """Mean Jaccard of the top-k layers of two halves: of one group, and of two groups. Sets of one
    group that differ from half to half leave nothing to read off a difference between groups.
    """

    same_group: float
    other_group: float


def split_halves(
    documents: np.ndarray, labels: np.ndarray, groups: int, k: int, times: int, seed: int
) -> Halves:
    """documents (n, L, E), labels (n,); at least two prompts a group."""
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
    return Halves(float(np.mean(same)), float(np.mean(other)))
