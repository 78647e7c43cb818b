"""Group relative policy optimization: answers drawn in groups, each worth what it is better than
its group.

Shao et al. 2024 (DeepSeekMath), equations 3 and 4, with the clipped ratio of Schulman et al. 2017
and the unbiased estimate of the divergence from Schulman's note (2020):

    A_i  = (R_i - mean R) / (std R + 1e-6)
    loss = -mean_i mean_t [min(r A_i, clip(r, 1 - c, 1 + c) A_i) - beta (exp(d) - d - 1)]
    r = exp(log p - log p_old),  d = log p_ref - log p,  both exponents at most 10 in size

The answers of a group are drawn together. The prompt goes through the model once; its cache is then
repeated for each answer, so no row is padded and every kind of cache of mlx-lm will do. A row that
has ended goes along until half of the rows have; then the rest go on without them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from mlxstacks import base_model
from mlxstacks.data import Batch, Row, make_batch
from mlxstacks.errors import NonFiniteModelError
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.training.reference import StartingModel
from mlxstacks.training.step import StepGradients, added_up, sums_at, token_log_p

# Of a prompt so many tokens at a time.
PREFILL_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: with the end mark, where `ended`; else the answer was cut at its longest."""

    tokens: tuple[int, ...]
    ended: bool


def sample_answers(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    max_tokens: int,
    end_tokens: Collection[int],
    key: mx.array,
) -> list[Answer]:
    """`count` answers of at most `max_tokens` tokens, each token drawn from the model's own
    distribution (temperature 1).

    prompt: token ids, at least one. key: of mx.random; the answers follow from it and the weights.
    Law: the distribution of an answer is that of one drawn alone, whatever the others are.
    Raises: NonFiniteModelError.
    """
    cache = base_model.make_prompt_cache(model)
    for start in range(0, len(prompt) - 1, PREFILL_TOKENS):
        piece = prompt[start : min(start + PREFILL_TOKENS, len(prompt) - 1)]
        model(mx.array([piece]), cache=cache)
        mx.eval([entry.state for entry in cache])
    if len(prompt) > 1:
        _take_rows(cache, [0] * count)
    drawn: list[list[int]] = [[] for _ in range(count)]
    ended = [False] * count
    rows = list(range(count))  # the answer of each row of the cache
    last = mx.full((count, 1), prompt[-1], mx.int32)
    ends = frozenset(end_tokens)
    for number in range(max_tokens):
        logits = model(last, cache=cache)[:, -1]
        of_token = mx.random.split(key, max_tokens)[number]
        tokens, bad = drawn_tokens(logits, mx.random.split(of_token, count), rows)
        mx.eval(tokens, bad)
        if bad.item():
            raise NonFiniteModelError(f"a logit of token {number + 1} of a sampled answer")
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if not ended[row]:
                drawn[row].append(token)
                ended[row] = token in ends
        going = [place for place, row in enumerate(rows) if not ended[row]]
        if not going:
            break
        last = tokens[:, None].astype(mx.int32)
        if len(going) <= len(rows) // 2:
            _take_rows(cache, going)
            last, rows = last[mx.array(going)], [rows[place] for place in going]
    return [Answer(tuple(one), end) for one, end in zip(drawn, ended, strict=True)]


def drawn_tokens(
    logits: mx.array, keys: mx.array, rows: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """A token for each of `rows`, (n,), and whether a logit is NaN. logits: (n, V). keys: of all
    answers, in use or not: a row draws the same whether others go on or not.
    """
    logits = logits.astype(mx.float32)
    noise = mx.stack([mx.random.gumbel(logits.shape[1:], key=keys[row]) for row in rows])
    return mx.argmax(logits + noise, axis=-1), mx.any(mx.isnan(logits))


def _take_rows(cache: Sequence[Any], rows: Sequence[int]) -> None:
    """Leave these rows in each entry of a cache, in this order; a row may be taken many times."""
    places = mx.array(rows)

    def taken(value: Any) -> Any:
        return value[places] if isinstance(value, mx.array) and value.ndim else value

    for entry in cache:
        entry.state = tree_map(taken, entry.state)
    mx.eval([entry.state for entry in cache])


# --- what is learned from them --------------------------------------------------------------------

# Largest size of an exponent: a ratio beyond e^10 is a broken model, not a policy.
LARGEST_EXPONENT = 10.0
_LEAST_SPREAD = 1e-6


def advantages(rewards: Sequence[float]) -> np.ndarray:
    """(n,) float32, mean 0; all 0 where the rewards of the group are the same."""
    values = np.asarray(rewards, np.float64)
    centered = values - values.mean()
    spread = float(np.sqrt(np.mean(centered**2)))
    if spread < _LEAST_SPREAD:
        return np.zeros(len(values), np.float32)
    return (centered / (spread + 1e-6)).astype(np.float32)


@dataclass(slots=True)
class GroupBatch:
    """The answers to one prompt. rows: prompt and answer, weight 1 on answers. rewards,
    advantages: (n,) float32. old: (n, T - 1) float32, log-probabilities of the targets under the
    weights that drew the answers, or None for those of now. reference: the same under the model at
    its starting weights, or None for no divergence, or where it was not needed yet.
    """

    rows: Batch
    rewards: np.ndarray
    advantages: np.ndarray
    reference: np.ndarray | None = None
    old: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        return self.rows.tokens


def group_rows(prompt: Sequence[int], answers: Sequence[Answer], width: int) -> Batch:
    """Prompt and answers, padded to `width` tokens; weight 1 on the answers, end marks included."""
    rows = [
        Row((*prompt, *a.tokens), (0.0,) * len(prompt) + (1.0,) * len(a.tokens)) for a in answers
    ]
    return make_batch(rows, width)


class GroupObjective:
    """What is summed over the tokens of answers; see the formulas above.

    clip: how far a ratio may be from 1. beta: weight of the divergence.
    """

    def __init__(self, clip: float, beta: float) -> None:
        self.clip, self.beta = clip, beta

    def __call__(
        self,
        logits: mx.array,
        targets: mx.array,
        weights: mx.array,
        advantage: mx.array,
        reference: mx.array,
        old: mx.array,
    ) -> mx.array:
        """(3,): loss, divergence from the reference and share of ratios clipped, each the sum of
        weight times the token's. Logits (N, V), all else (N,); `reference` and `old` where NaN: as
        of now.
        """
        log_p = token_log_p(logits, targets)
        now = mx.stop_gradient(log_p)
        ratio = mx.exp(_bounded(log_p - mx.where(mx.isnan(old), now, old)))
        inside = mx.clip(ratio, 1 - self.clip, 1 + self.clip)
        gain = mx.minimum(ratio * advantage, inside * advantage)
        further = _bounded(mx.where(mx.isnan(reference), now, reference) - log_p)
        divergence = mx.exp(further) - further - 1
        loss = self.beta * divergence - gain
        clipped = (inside * advantage < ratio * advantage).astype(mx.float32)
        parts = [mx.sum(weights * part) for part in (loss, divergence, clipped)]
        return mx.stack([parts[0], *map(mx.stop_gradient, parts[1:])])


def _bounded(exponent: mx.array) -> mx.array:
    return mx.clip(exponent, -LARGEST_EXPONENT, LARGEST_EXPONENT)


class GroupGradients:
    """Loss and gradients of the mean over the answers of all groups of a step, an answer being the
    mean over its tokens; see `GradientStep`. Reports `divergence`, `clipped` and `reward`.

    start: what the divergence is measured from; batches without a reference get it from there.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: GroupObjective,
        head: OutputHead | None,
        start: StartingModel | None = None,
    ) -> None:
        self.model, self.objective, self.head, self.start = model, objective, head, start

        def loss_of(batch: GroupBatch, answers: float) -> tuple[mx.array, mx.array]:
            sums = group_sums(model, objective, batch, answers, head)
            return sums[0], sums

        self._function = nn.value_and_grad(model, loss_of)

    def __call__(self, batches: Sequence[GroupBatch], seed: int, step: int) -> StepGradients:
        """seed, step: not used, since nothing here is random: dropout and noise are off."""
        answers = sum(len(batch.tokens) for batch in batches)
        of_step = [(batch, answers) for batch in batches]
        (_, sums), gradients = added_up(self.model, self._of_batch, of_step)
        reward = float(np.mean(np.concatenate([batch.rewards for batch in batches])))
        parts = {"reward": mx.array(reward), "divergence": sums[1], "clipped": sums[2]}
        return StepGradients(sums[0], parts, gradients)

    def _of_batch(self, batch: GroupBatch, answers: float) -> Any:
        if self.start is None or batch.reference is not None:
            return self._function(batch, answers)
        with self.start.sharing():
            batch.reference = self.start.log_p(batch.rows)
            return self._function(batch, answers)


def group_sums(
    model: nn.Module,
    objective: GroupObjective,
    batch: GroupBatch,
    answers: float,
    head: OutputHead | None,
) -> mx.array:
    """The sums of `GroupObjective` over one group, as shares of a step of so many answers.

    Law: the same without a head, from all logits at once, but for rounding.
    """
    rows = batch.rows
    each = rows.target_weights / (answers * rows.target_weights.sum(axis=1, keepdims=True))
    shape = rows.targets.shape
    # no reference: at distance 0
    reference = np.full(shape, np.nan, np.float32) if batch.reference is None else batch.reference
    old = np.full(shape, np.nan, np.float32) if batch.old is None else batch.old
    spread = np.broadcast_to(batch.advantages[:, None], shape)
    arrays = [mx.array(a) for a in (rows.targets, each, spread, reference, old)]
    places = mx.array(np.flatnonzero(rows.target_weights))
    counted = [array.reshape(-1)[places] for array in arrays]
    return sums_at(model, objective, rows, head, counted)
