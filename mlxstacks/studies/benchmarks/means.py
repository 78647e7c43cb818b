"""Means over tasks, each task with the same weight: of arms, and of differences of arms."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxstacks.stats import Interval
from mlxstacks.studies.benchmarks.analysis import ArmScore, Comparison, Label


@dataclass(frozen=True)
class Mean:
    """A mean over tasks, each task with the same weight."""

    tasks: int
    mean: float
    interval: Interval

    def as_json(self) -> dict[str, Any]:
        return {"tasks": self.tasks, "mean": self.mean, "interval": self.interval.as_json()}


def mean_of(values: Sequence[float], intervals: Sequence[Interval]) -> Mean | None:
    """Mean of independent estimates; its interval from theirs (MOVER: Zou and Donner 2008).

    It speaks of these tasks, not of others one might have asked. None for no values.
    """
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    down, up = (
        math.sqrt(math.fsum(reach(v, i) ** 2 for v, i in zip(values, intervals, strict=True)))
        / count
        for reach in (_down, _up)
    )
    return Mean(count, mean, Interval(mean - down, mean + up, intervals[0].confidence))


def _down(value: float, interval: Interval) -> float:
    return value - interval.low


def _up(value: float, interval: Interval) -> float:
    return interval.high - value


@dataclass(frozen=True)
class MeanDifference:
    """An arm less its control, mean over the tasks that both have a score on.

    judged: the interval that decides, wider so that all pairs' hold together (Bonferroni).
    better, worse: tasks whose difference counts in the family of all tests.
    """

    arm: str
    control: str
    mean: Mean
    judged: Interval
    better: tuple[str, ...]
    worse: tuple[str, ...]

    @property
    def label(self) -> Label:
        if self.judged.low <= 0 <= self.judged.high:
            return "not distinguishable"
        return "better" if self.mean.mean > 0 else "worse"

    @property
    def in_words(self) -> str:
        """The label, and where the 95% interval alone would have said more."""
        own = self.mean.interval
        alone = self.label == "not distinguishable" and not own.low <= 0 <= own.high
        return f"{self.label} (alone it would be)" if alone else self.label

    def as_json(self) -> dict[str, Any]:
        return {
            "arm": self.arm, "control": self.control, **self.mean.as_json(),
            "judged_by_interval": self.judged.as_json(), "better": list(self.better),
            "worse": list(self.worse), "label": self.label, "in_words": self.in_words,
        }  # fmt: skip


def mean_differences(comparisons: Sequence[Comparison], alpha: float) -> list[MeanDifference]:
    """One for each (arm, control), in the order in which they come first; the chance that any of
    them is labelled although there is no difference is alpha.
    """
    found = []
    pairs = dict.fromkeys((one.arm, one.control) for one in comparisons)
    confidence = 1 - alpha / max(1, len(pairs))
    for arm, control in pairs:
        own = [one for one in comparisons if (one.arm, one.control) == (arm, control)]
        mean = mean_of([one.difference for one in own], [one.interval for one in own])
        judged = mean_of([one.difference for one in own],
                         [one.interval_at(confidence) for one in own])  # fmt: skip
        assert mean is not None
        assert judged is not None
        better, worse = (
            tuple(one.task for one in own if one.label == label) for label in ("better", "worse")
        )
        found.append(MeanDifference(arm, control, mean, judged.interval, better, worse))
    return found


def arm_means(scores: Mapping[str, Mapping[str, ArmScore]]) -> dict[str, Mean]:
    """scores: task -> arm -> score. Arm -> its mean, over the tasks that every arm has a score on.

    Law: a task that one arm has no score on is in no mean, so that means can be compared.
    """
    arms = dict.fromkeys(arm for found in scores.values() for arm in found)
    common = [
        found
        for found in scores.values()
        if all(arm in found and found[arm].primary is not None for arm in arms)
    ]
    means = {}
    for arm in arms:
        rates = [one for found in common if (one := found[arm].primary) is not None]
        mean = mean_of([one.score for one in rates], [one.interval for one in rates])
        if mean is not None:
            means[arm] = mean
    return means
