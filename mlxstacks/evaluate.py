"""Loss and multiple-choice likelihood of a model that is passed in as a function of tokens.

`logits_of(tokens (B, T) int32) -> (B, T, V)`; a causal model, so padding on the right changes
nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxstacks.data import Batch, Row, make_batch
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.ops.token_loss import piece_tokens, pieces
from mlxstacks.settings import Normalisation

LogitsOf = Callable[[mx.array], mx.array]
# A validation set has at most so many rows, always the first ones.
VALIDATION_ROWS = 200


@dataclass(frozen=True, slots=True)
class ChoiceItem:
    """A context, candidate continuations, their lengths in characters, and the right one."""

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    characters: tuple[int, ...]
    answer_index: int

    def __post_init__(self) -> None:
        if not self.context or not all(self.continuations):
            raise ValueError("an item needs a context and candidates of at least one token each")
        if not 0 <= self.answer_index < len(self.continuations) == len(self.characters):
            raise ValueError(
                f"answer {self.answer_index} of {len(self.continuations)} candidates, "
                f"{len(self.characters)} character counts"
            )


def evaluate_mean_loss(
    logits_of: LogitsOf,
    rows: Sequence[Row],
    batch_size: int = 32,
    widths: Sequence[int] = (),
    head: OutputHead | None = None,
) -> float:
    """Mean cross-entropy in nats over all rows together, each token counted by its loss weight.

    The one evaluator: what training reports as validation loss is this. widths: tokens to which a
    batch is padded, rising; where none fits, its longest row decides. head: of the model that
    `logits_of` calls; logits are then made for a few tokens at a time, none without loss weight.
    Law: independent of batch size, row order and padding (to rounding).

    Raises:
        ValueError: no token carries loss weight.
    """
    total = weight = 0.0
    for _, batch in batches_of(rows, batch_size, widths):
        if head is None:
            log_p = target_log_probabilities(logits_of, batch)
        else:
            log_p = _log_probabilities_in_pieces(head, logits_of, batch)
        total -= float((log_p * batch.target_weights).sum(dtype=np.float64))
        weight += float(batch.target_weights.sum(dtype=np.float64))
    if weight == 0:
        raise ValueError(f"none of the {len(rows)} rows has a token with loss weight")
    return total / weight


def evaluate_row_losses(
    logits_of: LogitsOf, batch: Batch, head: OutputHead | None = None
) -> np.ndarray:
    """Mean cross-entropy in nats of each row of a batch, (B,) float64; see `evaluate_mean_loss`.

    Law: a row's loss is that of `evaluate_mean_loss` on it alone (to rounding).

    Raises:
        ValueError: a row without a token that carries loss weight.
    """
    weights = batch.target_weights.astype(np.float64)
    if not (weights.sum(axis=1) > 0).all():
        raise ValueError("a row has no token with loss weight")
    if head is None:
        log_p = target_log_probabilities(logits_of, batch)
    else:
        log_p = _log_probabilities_in_pieces(head, logits_of, batch)
    losses: np.ndarray = -(log_p * weights).sum(axis=1) / weights.sum(axis=1)
    return losses


def log_probabilities_at(
    logits_of: LogitsOf,
    tokens: np.ndarray,
    places: np.ndarray,
    targets: np.ndarray,
    head: OutputHead | None = None,
) -> np.ndarray:
    """log p of `targets` (N,) by what follows the tokens at `places` (N,), float32.

    tokens: (B, T). places: among the B * T tokens; one may be there more than once. head: see
    `evaluate_mean_loss`.
    """
    array = mx.array(tokens)
    outputs = logits_of(array) if head is None else head.hidden_states(logits_of, array)
    outputs = outputs.reshape(-1, outputs.shape[-1])  # (B * T, V), or (B * T, K) before a head
    mx.eval(outputs)
    most = piece_tokens(outputs.shape[-1]) if head is None else head.piece_tokens
    log_p = np.zeros(len(places), np.float32)
    for part in pieces(len(places), most):
        chosen = outputs[mx.array(places[part])]
        logits = chosen if head is None else head(chosen)
        log_p[part] = np.array(_log_p(logits, mx.array(targets[part])))
    return log_p


def choose(
    items: Sequence[ChoiceItem], scores: Sequence[Sequence[float]], normalisation: Normalisation
) -> list[int | None]:
    """The candidate of each item with the highest normalised score; None for a tie at the top."""
    picks: list[int | None] = []
    for item, sums in zip(items, scores, strict=True):
        values = normalised(item, sums, normalisation)
        best = max(values)
        picks.append(values.index(best) if values.count(best) == 1 else None)
    return picks


def normalised(
    item: ChoiceItem, sums: Sequence[float], normalisation: Normalisation
) -> list[float]:
    """Of each candidate its sum of log p, or the mean over its tokens or characters."""
    lengths = {
        "sum": [1] * len(sums),
        "token": [len(tokens) for tokens in item.continuations],
        "character": item.characters,
    }[normalisation]
    return [value / max(length, 1) for value, length in zip(sums, lengths, strict=True)]


def batches_of(
    rows: Sequence[Row], batch_size: int, widths: Sequence[int] = ()
) -> Iterator[tuple[list[int], Batch]]:
    """Row numbers and batch, rows of like length together."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index].tokens))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        longest = len(rows[indices[-1]].tokens)
        width = next((width for width in widths if width >= longest), longest)
        yield indices, make_batch([rows[index] for index in indices], width)


def target_log_probabilities(logits_of: LogitsOf, batch: Batch) -> np.ndarray:
    """log p of each target, (B, T - 1) float32; 0 where the loss weight is 0."""
    log_p = np.array(_log_p(logits_of(mx.array(batch.inputs)), mx.array(batch.targets)))
    return np.where(batch.target_weights > 0, log_p, 0.0)


def _log_probabilities_in_pieces(head: OutputHead, logits_of: LogitsOf, batch: Batch) -> np.ndarray:
    """The same; logits are made, and gone again, for one piece of tokens after the other."""
    counted = np.flatnonzero(batch.target_weights > 0)
    targets, log_p = batch.targets.reshape(-1), np.zeros(batch.targets.size, np.float32)
    log_p[counted] = log_probabilities_at(logits_of, batch.inputs, counted, targets[counted], head)
    return log_p.reshape(batch.targets.shape)


def _log_p(logits: mx.array, targets: mx.array) -> mx.array:
    """log p of each target, float32: logits (..., V), targets (...)."""
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1)
    return chosen - mx.logsumexp(logits, axis=-1)
