"""How good a router is on held-out prompts (Brainstacks).

Letters: N prompts, n domains; scores (N, n) are sigmoids, targets (N, n) lie in 0 to 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlxstacks.stats import wilson_interval

# A domain belongs to a prompt where its target is above this.
TRUE_ABOVE = 0.3
_BINS = 10


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """single_top1, mixed_set: shares, None without such prompts; val_bce: nats a score."""

    single_top1: float | None
    mixed_set: float | None
    val_bce: float

    @property
    def checkpoint_score(self) -> float:
        """0.50 single_top1 + 0.35 mixed_set - 0.15 val_bce; what is not there counts 0."""
        top1, mixed = self.single_top1 or 0.0, self.mixed_set or 0.0
        return 0.50 * top1 + 0.35 * mixed - 0.15 * self.val_bce

    def as_json(self) -> dict[str, float | None]:
        return {**asdict(self), "checkpoint_score": self.checkpoint_score}


def epoch_metrics(
    logits: np.ndarray, targets: np.ndarray, single: np.ndarray, mixed: np.ndarray, batch_size: int
) -> EpochMetrics:
    """single, mixed: (N,) bool, of which kind each prompt is."""
    scores = sigmoid(logits)
    return EpochMetrics(
        _mean(top1_hits(scores[single], targets[single])),
        _mean(top2_hits(scores[mixed], targets[mixed])),
        validation_bce(logits, targets, batch_size),
    )


def top1_hits(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(N,) bool: the domain of the highest score has the highest target."""
    return np.asarray(scores.argmax(axis=1) == targets.argmax(axis=1))


def top2_hits(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(N,) bool: the two highest scores are exactly the domains of targets above 0.3."""
    chosen = np.zeros(scores.shape, dtype=bool)
    highest = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    np.put_along_axis(chosen, highest, True, axis=1)
    return np.asarray((chosen == (targets > TRUE_ABOVE)).all(axis=1))


def binary_cross_entropy(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(N, n) in nats, from logits: no sigmoid is rounded to 0 or 1."""
    return np.logaddexp(0.0, logits) - logits * targets


def validation_bce(logits: np.ndarray, targets: np.ndarray, batch_size: int) -> float:
    """The mean over batches of their mean, as published."""
    losses = binary_cross_entropy(logits.astype(np.float64), targets)
    parts = [losses[at : at + batch_size].mean() for at in range(0, len(losses), batch_size)]
    return float(np.mean(parts))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-np.logaddexp(0.0, -logits.astype(np.float64))))


def calibration(scores: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    """Reliability table of equal bins, and the expected calibration error: the mean distance of
    score and target between bins, weighted by what falls into them. Soft targets count as they are.
    """
    flat, wanted = scores.reshape(-1), targets.reshape(-1)
    places = np.minimum((flat * _BINS).astype(int), _BINS - 1)
    table: list[dict[str, float | int | None]] = []
    error = 0.0
    for place in range(_BINS):
        inside = places == place
        count = int(inside.sum())
        score, target = _mean(flat[inside]), _mean(wanted[inside])
        if score is not None and target is not None:
            error += count / len(flat) * abs(score - target)
        table.append({
            "low": place / _BINS, "high": (place + 1) / _BINS, "count": count,
            "mean_score": score, "mean_target": target,
        })  # fmt: skip
    return {"bins": table, "expected_calibration_error": error, "count": len(flat)}


def domain_metrics(
    scores: np.ndarray, targets: np.ndarray, domains: Sequence[str], threshold: float
) -> dict[str, dict[str, Any]]:
    """Per domain: precision and recall of `score > threshold` against `target > 0.3`, with
    Wilson's intervals; None where nothing was chosen, or nothing is true.
    """
    chosen, true = np.asarray(scores > threshold), np.asarray(targets > TRUE_ABOVE)
    metrics = {}
    for d, name in enumerate(domains):
        chosen_count, true_count, right = (
            int(of[:, d].sum()) for of in (chosen, true, chosen & true)
        )
        table = calibration(scores[:, d], targets[:, d])
        metrics[name] = {
            "chosen": chosen_count,
            "true": true_count,
            "right": right,
            "precision": rate_json(right, chosen_count),
            "recall": rate_json(right, true_count),
            "expected_calibration_error": table["expected_calibration_error"],
        }
    return metrics


def confusion(
    scores: np.ndarray, targets: np.ndarray, domains: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Domain of the highest target -> domain of the highest score -> prompts."""
    counts = {name: dict.fromkeys(domains, 0) for name in domains}
    for row, column in zip(targets.argmax(axis=1), scores.argmax(axis=1), strict=True):
        counts[domains[row]][domains[column]] += 1
    return counts


def gap_rates(
    scores: np.ndarray, threshold: float, groups: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """For each group of prompts, (N,) bool: how many have all scores below the threshold."""
    gaps = np.asarray((scores < threshold).all(axis=1))
    return {name: rate_json(int(gaps[at].sum()), int(at.sum())) for name, at in groups.items()}


def rate_json(count: int, n: int) -> dict[str, Any] | None:
    """A rate with its 95% interval; None of nothing."""
    if n == 0:
        return None
    interval = wilson_interval(count, n)
    return {"rate": count / n, "count": count, "n": n, "low": interval.low, "high": interval.high}


def _mean(values: np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None
