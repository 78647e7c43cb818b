"""What all adapter layers share: the wrapped base, and what one training step gives and takes.

A step's random key and balance sums travel beside the model's call, in a plain object that no
tree of parameters or compiled state sees:

    begin_step(model, key)             # every layer gets a key of its own
    loss = task_loss(model, batch) + weight * take_balance(model).total

Of a step in several batches, `total` is that of one: the loss of the step follows from their sums.

A layer draws with its key, so recomputation under a checkpoint draws the same again; MLX's global
random state would not. A checkpointed function has to return what its layers left: an array that
goes around it would hold the activations of the layer. `training.checkpointing` does that by
`pop_balances` and `put_balances`; a checkpoint by hand returns `take_balance(layer).total` beside
the output, and adds it outside.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.layers.gates import balance_loss


@dataclass(frozen=True)
class Dims:
    """Shape of a projection; base_experts is None for a linear."""

    input_dims: int
    output_dims: int
    base_experts: int | None


@dataclass(frozen=True, eq=False)
class Balance:
    """What the routers of a forward pass left, by path of the projection (`gates.balance_sums`)."""

    sums: dict[str, dict[str, mx.array]]

    @property
    def total(self) -> mx.array:
        """The balance losses of all projections added up, a scalar."""
        losses = [balance_loss(sums) for sums in self.sums.values()]
        return mx.sum(mx.stack(losses)) if losses else mx.array(0.0)


@dataclass
class StepState:
    """What one layer knows of the step under way, and what it leaves.

    counted: (B, T) float32, 0 where a token of the batch is padding, else 1; None: none is.
    in_parts: the step has other batches, so `balance` needs the slopes.
    """

    key: mx.array | None = None
    counted: mx.array | None = None
    in_parts: bool = False
    balance: dict[str, mx.array] | None = None


def projection_dims(base: nn.Module) -> Dims | None:
    """Dims of a linear, quantized linear, switch or quantized switch projection, else None.

    mlx-lm's switch layers are known by what they have: this level does not import mlx_lm.
    """
    if isinstance(base, nn.QuantizedLinear):
        # Widths come from the scales: packed words hold 32 / bits values only for some bits.
        return Dims(base.scales.shape[-1] * base.group_size, base.weight.shape[0], None)
    if isinstance(base, nn.Linear):
        return Dims(base.weight.shape[1], base.weight.shape[0], None)
    is_switch = "weight" in base and base["weight"].ndim == 3 and hasattr(base, "num_experts")
    return Dims(base.input_dims, base.output_dims, base.num_experts) if is_switch else None


class AdaptedLayer(nn.Module):
    """A projection with something added to its output. The base is `linear`, never changed."""

    def __init__(self, base: nn.Module):
        super().__init__()
        dims = projection_dims(base)
        if dims is None:
            raise ValueError(
                f"{type(base).__name__} cannot be adapted; allowed are linear, quantized linear, "
                "switch and quantized switch projections"
            )
        self.linear = base
        self._dims = dims
        self._step = StepState()

    @property
    def dims(self) -> Dims:
        return self._dims

    @property
    def weight(self) -> mx.array:
        return self.linear.weight

    @property
    def bias(self) -> mx.array | None:
        return self.linear.get("bias")

    @property
    def input_dims(self) -> int:
        return self._dims.input_dims

    @property
    def output_dims(self) -> int:
        return self._dims.output_dims

    @property
    def num_experts(self) -> int:
        """Base experts of a switch projection."""
        if self._dims.base_experts is None:
            raise AttributeError("a linear projection has no num_experts")
        return self._dims.base_experts

    def _extra_repr(self) -> str:
        return f"input_dims={self.input_dims}, output_dims={self.output_dims}"


def check_rank(rank: int, dims: Dims, path: str = "") -> None:
    """Raises: ValueError for a rank above the smaller dim, where nothing is low-rank any more."""
    smaller = min(dims.input_dims, dims.output_dims)
    if not 1 <= rank <= smaller:
        name = f"{path}: " if path else ""
        raise ValueError(
            f"{name}rank {rank}; allowed is 1 to {smaller}, the smaller of input_dims "
            f"{dims.input_dims} and output_dims {dims.output_dims}"
        )


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLayer]]:
    """(path, layer) of every adapted projection of a model, by path."""
    found = [(p, m) for p, m in model.named_modules() if isinstance(m, AdaptedLayer)]
    yield from sorted(found, key=lambda item: item[0])


def begin_step(
    model: nn.Module,
    key: mx.array | None,
    counted: mx.array | None = None,
    in_parts: bool = False,
) -> None:
    """Give each layer its own key for this forward pass, and forget what an earlier one left.

    key: from `mx.random.key`, a new one for every batch. In a compiled step it must be an argument
    of the step: a constant would freeze the noise. None: layers that need chance raise.
    counted, in_parts: see `StepState`.
    """
    layers = [layer for _, layer in adapted_layers(model)]
    keys = mx.random.split(key, len(layers)) if key is not None and layers else None
    for index, layer in enumerate(layers):
        step_key = None if keys is None else keys[index]
        layer._step = StepState(step_key, counted, in_parts)


def take_balance(module: nn.Module) -> Balance:
    """The balance sums that a forward pass in training left in `module`, forgotten there.

    Recomputation in a backward pass leaves new ones; `begin_step` drops those.
    """
    return Balance(pop_balances(module))


def pop_balances(module: nn.Module) -> dict[str, dict[str, mx.array]]:
    """The balance sums in `module` by path, forgotten there."""
    found = {}
    for path, layer in adapted_layers(module):
        if layer._step.balance is not None:
            found[path] = layer._step.balance
            layer._step.balance = None
    return found


def put_balances(module: nn.Module, balances: Mapping[str, dict[str, mx.array]]) -> None:
    """The inverse of `pop_balances`."""
    if balances:
        layers = dict(adapted_layers(module))
        for path, balance in balances.items():
            layers[path]._step.balance = balance


def keyed_dropout(x: mx.array, probability: float, key: mx.array | None) -> mx.array:
    """x with a share of its entries zero and the rest scaled up. Raises: ValueError without key."""
    if probability == 0:
        return x
    if key is None:
        raise ValueError("dropout in training needs a key: call begin_step(model, key) first")
    keep = mx.random.bernoulli(1 - probability, x.shape, key=key)
    return mx.where(keep, x / (1 - probability), 0).astype(x.dtype)
