"""Do points of several classes lie apart? Principal components, silhouette, nearest centroid.

Letters: n points, F features, D classes. Distances are Euclidean, features as they come.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxstacks.stats import wilson_interval

FOLDS = 5
PERMUTATIONS = 100


@dataclass(frozen=True, eq=False)
class Components:
    """coordinates (n, c) of the points, and the share of all variance along each component."""

    coordinates: np.ndarray
    explained: tuple[float, ...]


def principal_components(features: np.ndarray, count: int = 2) -> Components:
    """The leading components of features (n, F), centred. Each one's largest part is positive.

    Laws: the variance of a coordinate over the total variance is its `explained`; with all
    components, distances between points are those of the features.
    """
    centred = features - features.mean(axis=0)
    left, values, right = np.linalg.svd(centred.astype(np.float64), full_matrices=False)
    largest = np.abs(right).argmax(axis=1)
    signs = np.sign(right[np.arange(len(right)), largest])
    total = float(np.sum(values**2))
    explained = values[:count] ** 2 / total if total > 0 else np.zeros(min(count, len(values)))
    coordinates = (left * values * np.where(signs == 0, 1, signs))[:, :count]
    return Components(coordinates, tuple(map(float, explained)))


def silhouette(features: np.ndarray, labels: Sequence[str]) -> float:
    """Mean of (b - a) / max(a, b): a, mean distance to the others of a point's class; b, to those
    of the nearest other class. 1: far apart, 0: mixed, below 0: nearer to another class.

    A point that is alone in its class counts 0 (Rousseeuw, 1987). Needs two classes.
    """
    from scipy.spatial.distance import cdist

    names, codes = np.unique(np.array(labels), return_inverse=True)
    member = np.eye(len(names))[codes]  # (n, D)
    sizes, totals = member.sum(axis=0), cdist(features, features) @ member  # (D,), (n, D)
    others = sizes[codes] - 1  # (n,)
    inside = totals[member > 0] / np.maximum(others, 1)
    outside = np.where(member > 0, np.inf, totals / sizes).min(axis=1)
    scale = np.maximum(inside, outside)
    scored = (others > 0) & (scale > 0)
    return float(np.sum((outside - inside)[scored] / scale[scored]) / len(codes))


def folds_of(labels: Sequence[str], folds: int, seed: int) -> np.ndarray:
    """The fold of each point (n,), every class spread over the folds as evenly as can be."""
    rng = np.random.default_rng(seed)
    codes = np.array(labels)
    assigned = np.zeros(len(codes), dtype=int)
    for name in sorted(set(labels)):
        places = np.flatnonzero(codes == name)
        assigned[rng.permutation(places)] = np.arange(len(places)) % folds
    return assigned


def nearest_centroid_hits(features: np.ndarray, labels: Sequence[str], fold: np.ndarray) -> int:
    """How many points are nearest to the centroid of their own class, centroids made without the
    point's fold. A class that the other folds do not have can not be hit; of equally near ones the
    first by name is taken.
    """
    from scipy.spatial.distance import cdist

    names, codes = np.unique(np.array(labels), return_inverse=True)
    hits = 0
    for number in np.unique(fold):
        inside = fold == number
        member = np.eye(len(names))[codes[~inside]]
        sizes = member.sum(axis=0)
        centroids = member.T @ features[~inside] / np.maximum(sizes, 1)[:, None]  # (D, F)
        distances = cdist(features[inside], centroids)
        distances[:, sizes == 0] = np.inf
        hits += int(np.sum(distances.argmin(axis=1) == codes[inside]))
    return hits


def separation(features: np.ndarray, labels: Sequence[str], seed: int) -> dict[str, Any] | None:
    """How far the classes of features (n, F) can be told apart; None unless there are two of at
    least two points each.

    accuracy: share of the n points that are nearest to their own centroid, with its interval;
    chance: the share of the largest class; permuted_accuracy: its mean with labels shuffled; p:
    share of shuffles (this one counted) that do as well.
    """
    counts = Counter(labels)
    if len(counts) < 2 or min(counts.values()) < 2:
        return None
    folds = min(FOLDS, *counts.values())
    # All components keep every distance, in at most n numbers a point.
    points = principal_components(features, len(labels)).coordinates
    hits = nearest_centroid_hits(points, labels, folds_of(labels, folds, seed))
    rng = np.random.default_rng(seed)
    shuffled = []
    for _ in range(PERMUTATIONS):
        drawn = [str(name) for name in rng.permutation(np.array(labels))]
        shuffled.append(nearest_centroid_hits(points, drawn, folds_of(drawn, folds, seed)))
    as_good = sum(count >= hits for count in shuffled)
    return {
        "n": len(labels),
        "accuracy": hits / len(labels),
        "interval": wilson_interval(hits, len(labels)).as_json(),
        "chance": max(counts.values()) / len(labels),
        "permuted_accuracy": float(np.mean(shuffled)) / len(labels),
        "p": (1 + as_good) / (1 + PERMUTATIONS),
        "folds": folds,
        "silhouette": silhouette(points, labels),
    }
