"""Loss and learning rate of the router's training.

Run: pytest tests/routing/test_router_epochs.py
"""

import math

import mlx.core as mx
import pytest

from mlxstacks.routing.router_training import epoch_learning_rate, router_loss
from mlxstacks.routing.settings import RouterTrainSettings


def test_loss_by_hand() -> None:
    logits, targets = [2.0, -0.5], [1.0, 0.2]
    bce = (math.log(1 + math.exp(-2)) + (math.log(1 + math.exp(-0.5)) + 0.2 * 0.5)) / 2
    p = 1 / (1 + math.exp(0.5))
    margin = (0 + (0.3 - (0.5 - p))) / 2  # 0.88 is outside the margin, 0.38 inside
    found = router_loss(mx.array([logits]), mx.array([targets]))
    assert float(found) == pytest.approx(bce + 0.05 * margin, rel=1e-5)


def test_weighted_loss_is_the_weighted_mean_over_examples() -> None:
    logits, targets = mx.array([[3.0, 1.0], [-2.0, 0.1]]), mx.array([[1.0, 0.0], [0.0, 1.0]])
    one, two = (float(router_loss(logits[i : i + 1], targets[i : i + 1])) for i in (0, 1))
    found = router_loss(logits, targets, mx.array([3.0, 1.0]))
    assert float(found) == pytest.approx((3 * one + two) / 4, rel=1e-5)
    assert float(router_loss(logits, targets)) == pytest.approx((one + two) / 2, rel=1e-5)


def test_margin_acts_between_02_and_08_alone() -> None:
    for p, inside in ((0.19, False), (0.21, True), (0.79, True), (0.81, False)):
        logit = mx.array([[math.log(p / (1 - p))]])
        without = float(router_loss(logit, mx.array([[0.5]]), margin_weight=0))
        assert (float(router_loss(logit, mx.array([[0.5]]))) > without + 1e-6) == inside


def test_cosine_steps_by_epoch() -> None:
    rates = [epoch_learning_rate(RouterTrainSettings(), epoch) for epoch in range(8)]
    assert rates[0] == 8e-4
    assert rates[4] == pytest.approx(4e-4)
    assert rates == sorted(rates, reverse=True)
    assert rates[7] > 0
