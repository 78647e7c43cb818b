"""Loss and gradients of one optimizer step, over several batches and several processes.

The loss is an argument of the loop. It sees a `MicroBatch` whose weights are already divided by
those of the whole step, so parts add up to the token-weighted mean over all batches that are
accumulated and all processes. The balance of experts is no mean: its sums are added up, and the
loss follows from those of the whole step.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_reduce, tree_unflatten

from mlxstacks.data import Batch
from mlxstacks.layers.adapted import Balance, begin_step
from mlxstacks.layers.gates import balance_gradient
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.ops.token_loss import PieceSums, weighted_cross_entropy_sum
from mlxstacks.processes import size_and_rank


def sum_over_group(tree: Any, group: mx.distributed.Group | None) -> Any:
    """A tree of arrays, added over the processes; sent as one flat message."""
    if group is None:
        return tree
    message = mx.concatenate([array.reshape(-1) for _, array in tree_flatten(tree)])
    return _shaped(mx.distributed.all_sum(message, group=group), tree)


def added_in_order(
    part_at: Callable[[int], Any], count: int, group: mx.distributed.Group | None
) -> Any:
    """The sum of trees of arrays `part_at(0)`, `part_at(1)`, ..., each evaluated by one process.

    Law: the bytes of one process; the parts are added in their order, whoever computed them.
    """
    size, rank = size_and_rank(group)
    total: Any = None
    for first in range(0, count, size):
        # All have to join: one that is left without a part computes the last one again.
        part = part_at(min(first + rank, count - 1))
        for each in _of_all(part, group)[: count - first]:
            total = each if total is None else tree_map(mx.add, total, each)
        mx.eval(total)
    return total


def _of_all(tree: Any, group: mx.distributed.Group | None) -> list[Any]:
    """The trees of all processes, by rank."""
    if group is None:
        return [tree]
    message = mx.concatenate([array.reshape(-1) for _, array in tree_flatten(tree)])
    return [_shaped(row, tree) for row in mx.distributed.all_gather(message[None], group=group)]


def _shaped(message: mx.array, tree: Any) -> Any:
    """Arrays as those of `tree`, from one flat message."""
    flat = tree_flatten(tree)
    ends = list(np.cumsum([array.size for _, array in flat]))
    parts = mx.split(message, [int(end) for end in ends[:-1]])
    return tree_unflatten(
        [(n, p.reshape(a.shape).astype(a.dtype)) for (n, a), p in zip(flat, parts, strict=True)]
    )


Forward = Callable[[nn.Module, mx.array], tuple[mx.array, mx.array | Balance | None]]
"""(model, tokens (B, T)) -> logits (B, T, V) and what to add to the loss: the balance of experts, a
scalar that is a mean over rows, or None.
"""


class MicroBatch(NamedTuple):
    """Rows that go through the model at once.

    inputs, targets: (B, T) int32. weights: (B, T) float32, of each target, as a share of the whole
    step's. share: scalar, the rows here as a share of the step's. key: for what is random in this
    batch; a function of seed, step and place, so a resumed run draws the same. in_parts: the step
    has other batches. counted: (N,) int32, places among the B * T targets, all those with weight
    among them; None: not asked for, or all.
    """

    inputs: mx.array
    targets: mx.array
    weights: mx.array
    share: mx.array
    key: mx.array
    in_parts: bool = False
    counted: mx.array | None = None


Loss = Callable[[nn.Module, MicroBatch], tuple[mx.array, dict[str, Any]]]
"""(model, batch) -> the scalar to differentiate, and scalars to report with it, by name. Both are
added up over the batches and processes of a step, and so is a tree of arrays named `balance`.
"""


def call_model(model: nn.Module, tokens: mx.array) -> tuple[mx.array, None]:
    """The model's own forward pass, with nothing added."""
    return model(tokens), None


def sums_at(
    model: nn.Module,
    sums: PieceSums,
    rows: Batch,
    head: OutputHead | None,
    arrays: Sequence[mx.array],
) -> mx.array:
    """`sums` over the tokens of a batch that have weight, (k,) float32, differentiable.

    arrays: (N, ...) of these N tokens, row by row.
    Law: the same without a head, from all logits at once, but for rounding.
    """
    inputs = mx.array(rows.inputs)
    places = mx.array(np.flatnonzero(rows.target_weights))
    if head is None:
        logits, _ = call_model(model, inputs)
        return sums(logits.reshape(-1, logits.shape[-1])[places], *arrays)
    hidden, _ = head.hidden_states(call_model, model, inputs)
    return head.sum_by_pieces(sums, hidden.reshape(-1, hidden.shape[-1])[places], *arrays)


def token_log_p(logits: mx.array, targets: mx.array) -> mx.array:
    """Logits (..., V), targets (...) int -> log-probabilities (...), float32."""
    return -nn.losses.cross_entropy(logits.astype(mx.float32), targets)


def answer_log_p(model: nn.Module, rows: Batch, head: OutputHead | None) -> np.ndarray:
    """(n, T - 1) float32: log-probability of each target that has weight, 0 elsewhere."""
    inputs, targets = mx.array(rows.inputs), mx.array(rows.targets)
    found = np.zeros(rows.targets.shape, np.float32)
    if head is None:
        return np.array(token_log_p(call_model(model, inputs)[0], targets)) * rows.target_weights
    hidden, _ = head.hidden_states(call_model, model, inputs)
    mx.eval(hidden)
    for i, counted in enumerate(rows.target_weights > 0):
        places = np.flatnonzero(counted)
        for start in range(0, len(places), head.piece_tokens):
            some = mx.array(places[start : start + head.piece_tokens])
            log_p = token_log_p(head(hidden[i, some]), targets[i, some])
            found[i, places[start : start + head.piece_tokens]] = np.array(log_p)
    return found


def added_up(
    model: nn.Module,
    function: Callable[[Any, Any], Any],
    parts: Sequence[tuple[Any, Any]],
    key: str | None = None,
    group: mx.distributed.Group | None = None,
) -> Any:
    """The sum of `function(batch, share)` over (batch, share), as `added_in_order`.

    Each batch has `rows` with target weights. share: whatever `function` takes. key: what dropout
    and noise draw with is made of it and of the batch's place; None turns them off.
    """

    def part_at(place: int) -> Any:
        batch, share = parts[place]
        drawn = None if key is None else random_key(f"{key}/{place}/0")
        begin_step(model, drawn, tokens_that_count(mx.array(batch.rows.target_weights)))
        try:
            return function(batch, share)
        finally:
            begin_step(model, None)

    return added_in_order(part_at, len(parts), group)


@dataclass(frozen=True, eq=False)
class CrossEntropyLoss:
    """What `cross_entropy_loss` makes. head: None for all logits at once."""

    forward: Forward
    extra_weight: float
    head: OutputHead | None

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[mx.array, dict[str, Any]]:
        begin_step(model, batch.key, tokens_that_count(batch.weights), batch.in_parts)
        if self.head is None:
            logits, extra = self.forward(model, batch.inputs)
            task = weighted_cross_entropy_sum(logits, batch.targets, batch.weights)
        else:
            hidden, extra = self.head.hidden_states(self.forward, model, batch.inputs)
            task = self.head.cross_entropy_sum(hidden, batch.targets, batch.weights, batch.counted)
        if isinstance(extra, Balance):
            if batch.in_parts and extra.sums:
                return task, {"task_loss": task, "balance": extra.sums}
            extra = extra.total if extra.sums else None
        if extra is None:
            return task, {}
        total = task + self.extra_weight * extra * batch.share
        return total, {"task_loss": task, "extra_loss": extra * batch.share}

    def with_balance(self, found: dict[str, Any]) -> dict[str, Any]:
        """Loss, parts and gradients, added up over a step in parts, with the balance of it all."""
        parts = dict(found.get("parts", {}))
        sums: dict[str, dict[str, mx.array]] = {}
        for name, array in tree_flatten(parts.pop("balance", {})):
            path, _, what = name.rpartition(".")
            sums.setdefault(path, {})[what] = array
        if not sums:
            return found
        balance = Balance(sums).total
        gradients = {
            f"{path}.active.{name}": self.extra_weight * gradient
            for path, of_path in sums.items()
            for name, gradient in balance_gradient(of_path).items()
        }
        return {
            "loss": found["loss"] + self.extra_weight * balance,
            "parts": {**parts, "extra_loss": balance},
            "gradients": tree_map_with_path(
                lambda name, task: task + gradients.get(name, 0), found["gradients"]
            ),
        }


def tokens_that_count(weights: mx.array) -> mx.array:
    """weights (B, T) of the targets -> (B, T) float32: 1 for inputs up to a row's last target with
    weight, 0 for those after it: padding, and whatever else no counted target can see.
    """
    return (mx.cumsum(weights, axis=1, reverse=True) > 0).astype(mx.float32)


def cross_entropy_loss(
    forward: Forward = call_model, extra_weight: float = 0.0, head: OutputHead | None = None
) -> Loss:
    """Token-weighted cross-entropy in nats, plus `extra_weight` times what `forward` adds.

    Where it adds something, both parts are reported: `task_loss` and `extra_loss`.
    head: the model's (`layers.output_head.find_output_head`); its logits are then made for a few
        tokens at a time, and only for tokens that have weight. Same numbers but for rounding.
    """
    return CrossEntropyLoss(forward, extra_weight, head)


@dataclass(frozen=True, eq=False)
class StepGradients:
    """Evaluated: loss and parts to report (scalars), gradients by parameter."""

    loss: mx.array
    parts: dict[str, mx.array]
    gradients: Any


class GradientStep:
    """Loss and gradients by the trainable parameters of `model`; the model itself stays as it is.

    compiled: trace the computation once for each shape of a batch (`mx.compile`). Weights that are
        frozen then become constants: do not change them while this object is in use.
    Law: the same rows with any padding, in one batch or in several, on one process or on several,
        give the same loss and gradients but for rounding, the balance of experts included. Noise
        and dropout are drawn by batch and place, so they differ. Several processes that can share
        the batches of a step evenly take whole ones, and give the bytes of one process; else they
        share the rows of each.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        group: mx.distributed.Group | None = None,
        compiled: bool = False,
    ) -> None:
        self.model, self.loss, self.group = model, loss, group
        # A compiled step is traced, and kept, for each shape that it meets: it takes all places.
        in_pieces = isinstance(loss, CrossEntropyLoss) and loss.head is not None
        self._asks_counted = in_pieces and not compiled

        def loss_at(weights: Any, *micro: Any) -> tuple[mx.array, dict[str, Any]]:
            model.update(weights)
            return loss(model, MicroBatch(*micro))

        function = mx.value_and_grad(loss_at)
        self._function: Callable[..., Any] = mx.compile(function) if compiled else function

    def __call__(self, batches: Sequence[Batch], seed: int, step: int) -> StepGradients:
        """Gradients of the mean loss over all loss weight in `batches`.

        Raises: ValueError where there is no loss weight at all.
        """
        total_weight = sum(float(batch.target_weights.sum()) for batch in batches)
        if total_weight <= 0:
            raise ValueError("a batch has no loss weight: every token is masked")
        count = sum(len(batch.tokens) for batch in batches)
        size, _ = size_and_rank(self.group)
        in_parts = len(batches) > 1 or size > 1
        by_rows, by_batches = (self.group, None) if len(batches) % size else (None, self.group)

        def part_at(place: int) -> Any:
            name = f"{seed}/{step}/{place}"
            micro = self._own_rows(batches[place], total_weight, count, name, by_rows)
            return self._run(micro._replace(in_parts=in_parts))

        total = sum_over_group(added_in_order(part_at, len(batches), by_batches), by_rows)
        if in_parts and isinstance(self.loss, CrossEntropyLoss):
            total = self.loss.with_balance(total)
        mx.eval(total)
        # A tree without leaves does not come back from a sum.
        return StepGradients(total["loss"], total.get("parts", {}), total["gradients"])

    def _run(self, micro: MicroBatch) -> dict[str, Any]:
        weights = self.model.trainable_parameters()
        try:
            given = [part for part in micro if part is not None]
            (loss, parts), gradients = self._function(weights, *given)
        finally:
            self.model.update(weights)  # tracing put placeholders in their place
            begin_step(self.model, None)  # and in the layers' keys; padding is that of this batch
        return {"loss": loss, "parts": parts, "gradients": gradients}

    def _own_rows(
        self,
        batch: Batch,
        total_weight: float,
        count: int,
        place: str,
        group: mx.distributed.Group | None,
    ) -> MicroBatch:
        """The rows of this process. Where there are too few, one row without weight takes part:
        everybody has to join in the sums.
        """
        size, rank = size_and_rank(group)
        rows = np.array_split(np.arange(len(batch.tokens)), size)[rank]
        weights = batch.target_weights[rows] / total_weight
        share = len(rows) / count
        if not len(rows):
            rows, weights = np.arange(1), np.zeros_like(batch.target_weights[:1])
        places = counted_places(weights) if self._asks_counted else None
        some = places is not None and len(places) < weights.size
        counted = mx.array(places) if some else None
        return MicroBatch(
            mx.array(batch.inputs[rows]), mx.array(batch.targets[rows]), mx.array(weights),
            mx.array(share, dtype=mx.float32), random_key(f"{place}/{rank}"), counted=counted,
        )  # fmt: skip


def counted_places(weights: np.ndarray) -> np.ndarray:
    """Places, rising, of all non-zero weights in (B, T), flattened; int32.

    Filled up with other places to a multiple of an eighth of them all: buffers of few sizes are
    used again, those of many sizes pile up in the cache.
    """
    flat = weights.reshape(-1)
    eighth = -(-flat.size // 8)
    most = max(1, -(-int(np.count_nonzero(flat)) // eighth)) * eighth
    return np.sort(np.argsort(flat == 0, kind="stable")[:most]).astype(np.int32)


def random_key(text: str) -> mx.array:
    """A key of mx.random that is a function of a text."""
    return mx.random.key(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def clip_by_global_norm(gradients: Any, largest: float) -> tuple[Any, mx.array]:
    """Gradients scaled so that their joint norm is at most `largest`, and the norm before.

    Law: the same bytes whatever the layout in memory of the gradients, which is another one where
    processes sum them; the order of a sum follows it.
    """
    squares = tree_reduce(
        lambda total, g: total + mx.sum(mx.square(mx.contiguous(g))), gradients, mx.array(0.0)
    )
    norm = mx.sqrt(squares)
    factor = mx.minimum(largest / (norm + 1e-6), 1.0)
    return tree_map(lambda g: g * factor, gradients), norm
