"""The stacks of a run, built and never made: the one in training, frozen ones, their directions."""

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.guard.settings import GuardSettings
from mlxstacks.layers.adapted import Dims
from mlxstacks.layers.attach import add_active, attach_stacks
from mlxstacks.layers.freezing import shape_of
from mlxstacks.layers.latent import LatentPair, input_group
from mlxstacks.layers.moe_lora import MoELoRADelta
from mlxstacks.layers.packed import FrozenStack, Segment, lazy_segment
from mlxstacks.layers.selection import StackId
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.stacked import StackedLayer, stacked_layers
from mlxstacks.layers.targets import Target, check_targets


def attach_lazy_stacks(
    model: nn.Module, targets: Sequence[Target], stack: StackSettings, settings: GuardSettings
) -> tuple[mx.array, ...]:
    """Put stacks on the targets as a run of `stack` has them; the arrays that are no parameters.

    Raises: ValueError as `check_targets`.
    """
    check_targets(targets, stack.latent_dim or stack.rank)
    attach_stacks(model, targets)
    pairs: dict[str, LatentPair] = {}
    if stack.latent_dim is not None:
        pairs = _pairs({target.path: target.dims for target in targets}, stack.latent_dim)
    add_active(model, stack, mx.random.key(0), pairs)
    held = [array for pair in pairs.values() for array in (pair.d_in, pair.d_out)]
    for _, layer in stacked_layers(model):
        held += _frozen(layer, settings)
        held += _directions(layer.active, settings.directions)
    return tuple({id(array): array for array in held}.values())


def _pairs(dims: Mapping[str, Dims], latent_dim: int) -> dict[str, LatentPair]:
    """As `layers.latent.latent_pairs`, of zeros."""
    d_in = {input_group(p): mx.zeros((latent_dim, d.input_dims)) for p, d in dims.items()}
    return {
        path: LatentPair(d_in[input_group(path)], mx.zeros((d.output_dims, latent_dim)))
        for path, d in dims.items()
    }


def _frozen(layer: StackedLayer, settings: GuardSettings) -> Iterator[mx.array]:
    """Serve frozen stacks of the shape of the active one, as `PackedStacks` would; their memory."""
    delta = layer.active
    assert delta is not None
    if not settings.frozen_stacks:
        return
    half = mx.float16 if delta.settings.storage == "float16" else mx.bfloat16
    stack = FrozenStack(
        StackId("frozen", "frozen"),
        shape_of(delta),
        mx.zeros(delta.lora_a.shape, half),
        mx.zeros(delta.lora_b.shape, half),
        mx.zeros(delta.router.shape) if delta.has_router else None,
    )
    stored: Segment = lazy_segment([stack] * settings.frozen_stacks)
    yield from stored.buffers
    served = stored
    if settings.base == "float32":
        served = lazy_segment([stack] * settings.frozen_stacks, mx.float32)
        yield from served.buffers
    layer.install([served])


def _directions(delta: MoELoRADelta | None, directions: int) -> Iterator[mx.array]:
    """Protect so many directions of the output, or all; `protect` would look at the numbers."""
    assert delta is not None
    width = delta.lora_b.shape[1]
    if directions:
        delta._null_vectors = mx.zeros((width, min(directions, width)))
        yield delta._null_vectors
