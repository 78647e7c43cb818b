"""DPO, ORPO and GRPO beside TRL's own trainers: losses and gradients of one bigram model.

Run: pytest tests/training/test_trl_parity.py. The other side was made once, by
tests/fixtures/trl_parity.py.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlxstacks.training.grpo import (
    Answer,
    GroupBatch,
    GroupGradients,
    GroupObjective,
    group_rows,
)
from mlxstacks.training.preference import PairBatch, PairGradients, dpo_loss, orpo_loss
from mlxstacks.training.step import StepGradients, answer_log_p

TRL = mx.load(str(Path(__file__).parents[1] / "fixtures" / "trl.safetensors"))
PROMPT, BETA, CLIP = 4, 0.3, 0.2


class Bigram(nn.Module):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        dims = TRL[f"{prefix}.embedding.weight"].shape
        self.embedding = nn.Embedding(*dims)
        self.out = nn.Linear(dims[1], dims[0], bias=False)
        names = ("embedding.weight", "out.weight")
        self.update(tree_unflatten([(name, TRL[f"{prefix}.{name}"]) for name in names]))

    def __call__(self, inputs: mx.array) -> mx.array:
        return self.out(self.embedding(inputs))


def rows() -> GroupBatch:
    tokens, lengths = np.array(TRL["tokens"]), np.array(TRL["lengths"])
    ends = [(PROMPT, PROMPT + int(length)) for length in lengths]
    answers = [
        Answer(tuple(map(int, row[start:stop])), True)
        for row, (start, stop) in zip(tokens, ends, strict=True)
    ]
    batch = group_rows(tuple(map(int, tokens[0, :PROMPT])), answers, tokens.shape[1])
    return GroupBatch(batch, np.zeros(len(answers)), np.array(TRL["advantages"]))


def dpo() -> StepGradients:
    group = rows()
    sums = np.array(TRL["reference"]).sum(axis=1)
    batch, known = PairBatch(group.rows, [0, 1]), sums.reshape(2, 2)
    return PairGradients(Bigram("model"), dpo_loss(BETA), None, known=known)([batch], 0, 1)


def orpo() -> StepGradients:
    batch = PairBatch(rows().rows, [0, 1])
    return PairGradients(Bigram("model"), orpo_loss(BETA), None)([batch], 0, 1)


def grpo(old: bool) -> StepGradients:
    group = rows()
    reference = answer_log_p(Bigram("start"), group.rows, None)
    drawn_with = np.array(TRL["old"]) if old else None
    batch = replace(group, reference=reference, old=drawn_with)
    return GroupGradients(Bigram("model"), GroupObjective(CLIP, BETA), None)([batch], 0, 1)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("dpo", dpo),
        ("orpo", orpo),
        ("grpo.first", lambda: grpo(old=False)),
        ("grpo.again", lambda: grpo(old=True)),
    ],
)
def test_loss_and_gradients_are_those_of_trl(name: str, ours: Callable[[], StepGradients]) -> None:
    found = ours()
    assert found.loss.item() == pytest.approx(TRL[f"{name}.loss"].item(), rel=1e-5)
    for key, gradient in tree_flatten(found.gradients):
        expected = np.array(TRL[f"{name}.{key}"])
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(np.array(gradient), expected, rtol=1e-4, atol=1e-6)


def test_log_probabilities_are_those_of_trl() -> None:
    found = answer_log_p(Bigram("start"), rows().rows, None)
    np.testing.assert_allclose(found, np.array(TRL["reference"]), atol=1e-6)


def test_some_ratios_are_clipped() -> None:
    assert grpo(old=True).parts["clipped"].item() > 0
