"""Metrics against numbers worked out by hand. Run: pytest tests/routing/test_router_metrics.py"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.routing.router_metrics import (
    EpochMetrics,
    binary_cross_entropy,
    calibration,
    confusion,
    domain_metrics,
    epoch_metrics,
    gap_rates,
    rate_json,
    sigmoid,
    top1_hits,
    top2_hits,
    validation_bce,
)

SCORES = np.array([[0.9, 0.2, 0.05], [0.3, 0.4, 0.1], [0.7, 0.1, 0.8], [0.6, 0.7, 0.1]])
TARGETS = np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 1.0], [1.0, 0.2, 1.0]])
SINGLE = np.array([True, True, False, False])


def test_checkpoint_score_is_the_published_one() -> None:
    found = EpochMetrics(single_top1=0.8, mixed_set=0.5, val_bce=0.4)
    assert found.checkpoint_score == pytest.approx(0.50 * 0.8 + 0.35 * 0.5 - 0.15 * 0.4)
    assert EpochMetrics(0.8, None, 0.4).checkpoint_score == pytest.approx(0.34)


def test_hits() -> None:
    assert top1_hits(SCORES, TARGETS).tolist() == [True, False, False, False]
    assert top2_hits(SCORES, TARGETS).tolist() == [False, False, True, False]


def test_a_target_of_03_does_not_count_and_more_than_two_are_never_a_hit() -> None:
    scores = np.array([[0.9, 0.8, 0.7]])
    assert top2_hits(scores, np.array([[1.0, 1.0, 0.3]])).all()
    assert not top2_hits(scores, np.array([[1.0, 1.0, 0.31]])).any()


def test_epoch_metrics_take_each_kind_of_prompt_for_its_own() -> None:
    logits = np.log(SCORES / (1 - SCORES))
    found = epoch_metrics(logits, TARGETS, SINGLE, ~SINGLE, batch_size=3)
    assert (found.single_top1, found.mixed_set) == (0.5, 0.5)
    losses = -(TARGETS * np.log(SCORES) + (1 - TARGETS) * np.log(1 - SCORES))
    assert found.val_bce == pytest.approx((losses[:3].mean() + losses[3:].mean()) / 2)
    nothing = np.zeros(4, dtype=bool)
    assert epoch_metrics(logits, TARGETS, nothing, nothing, 3).single_top1 is None


def test_large_logits_stay_finite() -> None:
    logits = np.array([[800.0, -800.0]])
    assert binary_cross_entropy(logits, np.array([[0.0, 1.0]])).tolist() == [[800.0, 800.0]]
    assert sigmoid(logits).tolist() == [[1.0, 0.0]]
    assert math.isfinite(validation_bce(logits, np.array([[1.0, 0.0]]), 16))


def test_calibration_table_and_error() -> None:
    scores, targets = np.array([[0.05, 0.95], [0.15, 1.0]]), np.array([[0.0, 1.0], [0.5, 0.0]])
    found = calibration(scores, targets)
    assert [one["count"] for one in found["bins"]] == [1, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert found["bins"][9]["mean_score"] == pytest.approx(0.975)
    assert found["bins"][9]["mean_target"] == pytest.approx(0.5)
    assert found["bins"][5]["mean_score"] is None
    wanted = (0.05 + 0.35 + 2 * 0.475) / 4
    assert found["expected_calibration_error"] == pytest.approx(wanted)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_scores_that_are_their_targets_have_no_calibration_error(values: list[float]) -> None:
    rows = np.array(values)[:, None]
    found = calibration(rows, rows)
    assert found["expected_calibration_error"] == pytest.approx(0, abs=1e-12)
    assert sum(one["count"] for one in found["bins"]) == len(values)


def test_precision_and_recall_of_a_domain() -> None:
    found = domain_metrics(SCORES, TARGETS, ["a", "b", "c"], threshold=0.12)
    assert (found["a"]["chosen"], found["a"]["true"], found["a"]["right"]) == (4, 4, 4)
    assert found["b"]["precision"]["rate"] == 0
    assert found["b"]["recall"] is None
    assert found["c"]["recall"]["rate"] == 0.5
    assert found["c"]["precision"]["rate"] == 1
    assert 0 < found["c"]["precision"]["low"] < 1


def test_confusion_counts_every_prompt_once() -> None:
    found = confusion(SCORES, TARGETS, ["a", "b", "c"])
    assert found["a"] == {"a": 1, "b": 2, "c": 1}
    assert sum(sum(row.values()) for row in found.values()) == 4


def test_gap_rates_by_group() -> None:
    scores = np.array([[0.05, 0.11], [0.05, 0.12], [0.5, 0.0]])
    groups = {"all": np.ones(3, dtype=bool), "none": np.zeros(3, dtype=bool)}
    found = gap_rates(scores, 0.12, groups)
    assert (found["all"]["count"], found["all"]["n"], found["none"]) == (1, 3, None)
    assert rate_json(0, 0) is None
