"""GRPO: its formulas against float64, pieces against all logits, what a ratio and a group do.

Run: pytest tests/training/test_grpo.py
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map

from mlxstacks.layers.output_head import find_output_head
from mlxstacks.training.grpo import (
    Answer,
    GroupBatch,
    GroupGradients,
    GroupObjective,
    advantages,
    group_rows,
    group_sums,
    sample_answers,
)
from mlxstacks.training.step import answer_log_p
from tests.tiny_models import VOCAB_SIZE
from tests.training.tiny import hybrid_model, with_lora

PROMPT = (3, 1, 4, 1, 5)
ANSWERS = [Answer((2, 7, 1), True), Answer((8,), True), Answer((2, 8, 4, 5), False)]
REWARDS = (1.0, 0.0, 0.25)


def batch(**changes: Any) -> GroupBatch:
    rows = group_rows(PROMPT, ANSWERS, 12)
    rewards = np.asarray(REWARDS, np.float32)
    return GroupBatch(rows, rewards, advantages(REWARDS), **changes)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16), st.floats(0.1, 10))
def test_advantages_are_centered_and_do_not_change_with_the_scale(
    rewards: list[float], scale: float
) -> None:
    found = advantages(rewards)
    assert abs(float(found.sum())) < 1e-4
    if np.std(rewards) > 1e-2:
        assert np.std(found) == pytest.approx(1, abs=1e-3)
        np.testing.assert_allclose(advantages([scale * r for r in rewards]), found, atol=1e-3)


def test_equal_rewards_teach_nothing() -> None:
    assert not advantages([0.1] * 8).any()
    assert not advantages([1.0, 1.0]).any()


def float64_loss(
    log_p: np.ndarray, group: GroupBatch, clip: float, beta: float
) -> tuple[float, float, float]:
    """The formulas of the module's head, an answer and a token at a time."""
    weights, total = group.rows.target_weights, np.zeros(3)
    for i, of_row in enumerate(weights):
        for t in np.flatnonzero(of_row):
            new = float(log_p[i, t])
            old = new if group.old is None else float(group.old[i, t])
            ratio = math.exp(max(-10, min(10, new - old)))
            advantage = float(group.advantages[i])
            inside = min(max(ratio, 1 - clip), 1 + clip)
            gain = min(ratio * advantage, inside * advantage)
            d = 0.0 if group.reference is None else float(group.reference[i, t]) - new
            d = max(-10, min(10, d))
            divergence = math.exp(d) - d - 1
            share = 1 / (len(weights) * of_row.sum())
            clipped = inside * advantage < ratio * advantage
            total += share * np.array([beta * divergence - gain, divergence, clipped])
    return float(total[0]), float(total[1]), float(total[2])


@pytest.mark.parametrize("shift", [0.0, 0.3, -0.3, 30.0])
def test_sums_are_those_of_the_formulas(shift: float) -> None:
    model = with_lora(hybrid_model())
    rows = batch().rows
    log_p = answer_log_p(model, rows, None)
    noise = np.random.default_rng(0).normal(0, 0.3, log_p.shape).astype(np.float32)
    group = batch(reference=log_p + noise, old=log_p + shift)
    found = group_sums(model, GroupObjective(0.2, 0.04), group, len(ANSWERS), None)
    np.testing.assert_allclose(np.array(found), float64_loss(log_p, group, 0.2, 0.04), rtol=1e-4)


def test_pieces_give_what_all_logits_give() -> None:
    model = with_lora(hybrid_model())
    head, why = find_output_head(model)
    assert head is not None, why
    rows = batch().rows
    np.testing.assert_allclose(
        answer_log_p(model, rows, head), answer_log_p(model, rows, None), atol=1e-5
    )
    group = batch(reference=answer_log_p(model, rows, None) + 0.1)
    objective = GroupObjective(0.2, 0.5)
    one, other = (GroupGradients(model, objective, h)([group], 0, 0) for h in (head, None))
    assert one.loss.item() == pytest.approx(other.loss.item(), abs=1e-5)
    for (name, a), (_, b) in zip(
        tree_flatten(one.gradients), tree_flatten(other.gradients), strict=True
    ):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5, err_msg=name)


def test_the_gradient_at_the_start_is_that_of_reinforce() -> None:
    """At the weights that drew the answers: -A times the gradient of log p, mean by mean."""
    model = with_lora(hybrid_model())
    group = batch()
    found = GroupGradients(model, GroupObjective(0.2, 0.04), None)([group], 0, 0)

    def reinforce(weights: Any) -> mx.array:
        model.update(weights)
        inputs, targets = mx.array(group.rows.inputs), mx.array(group.rows.targets)
        logits = model(inputs).astype(mx.float32)
        log_p = mx.take_along_axis(logits, targets[..., None], -1)[..., 0]
        log_p = log_p - mx.logsumexp(logits, axis=-1)
        counted = mx.array(group.rows.target_weights)
        means = mx.sum(log_p * counted, axis=1) / mx.sum(counted, axis=1)
        return -mx.mean(mx.array(group.advantages) * means)

    expected = mx.grad(reinforce)(model.trainable_parameters())
    gap = tree_map(lambda a, b: mx.max(mx.abs(a - b)).item(), found.gradients, expected)
    assert max(value for _, value in tree_flatten(gap)) < 1e-5


def test_groups_add_up_to_the_mean_over_all_answers() -> None:
    model = with_lora(hybrid_model())
    gradients = GroupGradients(model, GroupObjective(0.2, 0.04), None)
    one = gradients([batch()], 0, 0)
    two = gradients([batch(), batch()], 0, 0)
    assert two.loss.item() == pytest.approx(one.loss.item(), abs=1e-6)
    assert two.parts["reward"].item() == pytest.approx(np.mean(REWARDS))


def test_answers_are_drawn_from_the_models_distribution() -> None:
    model = hybrid_model()
    counts = np.zeros(VOCAB_SIZE)
    for seed in range(40):
        for answer in sample_answers(model, PROMPT, 64, 1, (), mx.random.key(seed)):
            counts[answer.tokens[0]] += 1
    p = np.array(mx.softmax(model(mx.array([PROMPT]))[0, -1].astype(mx.float32)))
    n = counts.sum()
    kept = p * n > 5
    chi = float(((counts - p * n)[kept] ** 2 / (p * n)[kept]).sum())
    assert chi < kept.sum() + 4 * math.sqrt(2 * kept.sum())


def test_answers_that_end_leave_the_others_as_they_are() -> None:
    """The same tokens whether rows are dropped when they have ended or kept; greedy by a key."""
    model = hybrid_model()
    ends = tuple(range(0, VOCAB_SIZE, 5))
    free = sample_answers(model, PROMPT, 8, 10, (), mx.random.key(1))
    cut = sample_answers(model, PROMPT, 8, 10, ends, mx.random.key(1))
    assert any(answer.ended for answer in cut)
    for whole, answer in zip(free, cut, strict=True):
        assert whole.tokens[: len(answer.tokens)] == answer.tokens
        assert not set(answer.tokens[:-1]) & set(ends)
        assert answer.ended == (answer.tokens[-1] in ends)
