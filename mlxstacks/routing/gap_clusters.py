"""Groups of like gap events.

Greedy: the event with the most others within the cosine becomes the centre of a group, these others
its members; they are taken out, and so on (the clustering of Daura et al. 1999, there of molecular
structures). Every member is within the cosine of its centre, and no two centres are within it.

Laws: the same events give the same groups; so do the same events in another order, but for ties,
which the earlier event wins.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxstacks.routing.gaps import GapEvent

# Rows of the table of cosines that are made at a time.
_BLOCK = 512


@dataclass(frozen=True, eq=False)
class GapCluster:
    """events: the centre first, then by falling cosine to it. cohesion: their mean cosine to it."""

    events: tuple[GapEvent, ...]
    cohesion: float

    def prompts(self, count: int) -> list[str]:
        """Different texts, those nearest the centre first."""
        texts = dict.fromkeys(event.text for event in self.events if event.text)
        return list(texts)[:count]

    def mean_scores(self) -> dict[str, float]:
        """Domain -> mean raw score over the events that have one, the highest first."""
        found: dict[str, list[float]] = {}
        for event in self.events:
            for name, score in event.scores.items():
                found.setdefault(name, []).append(score)
        means = {name: float(np.mean(scores)) for name, scores in found.items()}
        return dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))

    def as_json(self, samples: int, minimum_events: int) -> dict[str, Any]:
        return {
            "events": len(self.events),
            "propose_domain": len(self.events) >= minimum_events,
            "cohesion": self.cohesion,
            "first_time": min(event.time for event in self.events),
            "last_time": max(event.time for event in self.events),
            "mean_scores": self.mean_scores(),
            "prompts": self.prompts(samples),
        }


def cluster_gaps(
    events: Iterable[GapEvent], similarity: float = 0.8, *, centre: bool = False
) -> list[GapCluster]:
    """Groups, the largest first. Events without a feature are left out; features of other widths
    come from other models and never share a group.

    centre: take the mean of the features of one width off first.
    """
    by_width: dict[int, list[GapEvent]] = {}
    for event in events:
        if event.feature is not None:
            by_width.setdefault(len(event.feature), []).append(event)
    clusters = [
        GapCluster(tuple(of_width[place] for place in places), cohesion)
        for _, of_width in sorted(by_width.items())
        for places, cohesion in _groups(_directions(of_width, centre), similarity)
    ]
    return sorted(clusters, key=lambda cluster: -len(cluster.events))


def _directions(events: Sequence[GapEvent], centre: bool) -> np.ndarray:
    """(n, D) float32 rows of length 1; zero where the feature is zero."""
    points = np.stack([event.feature for event in events if event.feature is not None])
    if centre:
        points = points - points.mean(axis=0)
    # twice: the square of a small number of float32 is zero
    points = points / np.maximum(np.abs(points).max(axis=1, keepdims=True), 1e-30)
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    return points / np.maximum(lengths, 1e-30)


def _groups(points: np.ndarray, similarity: float) -> list[tuple[list[int], float]]:
    """(places of a group, mean cosine to its centre) in the order they are found."""
    n = len(points)
    near = np.empty((n, n), dtype=bool)
    for start in range(0, n, _BLOCK):
        near[start : start + _BLOCK] = points[start : start + _BLOCK] @ points.T > similarity
    # rounding may not decide who is a neighbour of whom, nor a zero vector be alone with nobody
    near |= near.T
    np.fill_diagonal(near, True)
    left = np.ones(n, dtype=bool)
    neighbours = near.sum(axis=1)
    groups = []
    while left.any():
        middle = int(np.argmax(np.where(left, neighbours, -1)))
        members = np.flatnonzero(near[middle] & left)
        cosines = points[members] @ points[middle]
        order = sorted(
            range(len(members)), key=lambda i: (members[i] != middle, -cosines[i], members[i])
        )
        groups.append(([int(members[i]) for i in order], float(cosines.mean())))
        left[members] = False
        neighbours -= near[:, members].sum(axis=1)
    return groups
