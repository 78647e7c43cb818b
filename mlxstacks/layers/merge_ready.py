"""LoRA that a fuse can put into a quantized base without loss, in mlx-lm's parameter names.

    pooled  A acts on the sums of x over the quantization groups (QA-LoRA, Xu et al., ICLR 2024).
            The delta is the same for all weights of a group, so fusing moves biases only.
    grid    the layer computes with W + scale * B A rounded on the module's own grid, as the fuse's
            policy keep rounds it; the gradient passes the rounding as if it were not there.

Letters: M base experts, K input dims, N output dims, R rank, G = K / group_size.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.layers.adapted import AdaptedLayer, adapted_layers, keyed_dropout
from mlxstacks.layers.lora import LoRALinear, LoRASwitchLinear, draw_lora_a
from mlxstacks.layers.settings import LoRASettings
from mlxstacks.layers.targets import Target
from mlxstacks.ops.affine_ops import (
    clip_codes,
    pack_codes,
    stored_values_of,
    unpack_codes,
)
from mlxstacks.ops.expert_delta import expert_delta

MergeReady = Literal["pooled", "grid"]


@dataclass(frozen=True, eq=False)
class Grid:
    """An affine module as stored: codes (..., N, K) uint8, scales and biases (..., N, G)."""

    codes: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int


def stored_grids(model: nn.Module) -> dict[str, Grid]:
    """Path -> grid of every affine module; to be taken before a base is widened."""
    found = {}
    for path, m in model.named_modules():
        if "scales" in m and m.get("biases") is not None:
            codes = unpack_codes(m.weight, m.bits).astype(mx.uint8)
            found[path] = Grid(codes, m.scales, m.biases, m.group_size, m.bits)
    return found


def _pooled(x: mx.array, groups: int) -> mx.array:
    """Sums of x over the groups. Shapes: (..., K) -> (..., G) float32."""
    return x.astype(mx.float32).reshape(*x.shape[:-1], groups, -1).sum(axis=-1)


class PooledLoRALinear(LoRALinear):
    """y = linear(x) + scale * (pooled(x) @ lora_a) @ lora_b; lora_a (G, R), lora_b (R, N).

    Law: that of mlx-lm's LoRALinear with `repeated(lora_a)`, but for the order of a sum.
    """

    def __init__(self, base: nn.Module, settings: LoRASettings, key: mx.array | None, grid: Grid):
        super().__init__(base, settings, None)
        G = grid.scales.shape[-1]
        self.lora_a = draw_lora_a((G, settings.rank), self.input_dims, key)
        self._group_size = grid.group_size

    def __call__(self, x: mx.array) -> mx.array:
        dropped = keyed_dropout(x, self.dropout, self._step.key) if self.training else x
        z = (_pooled(dropped, self.lora_a.shape[0]) @ self.lora_a) @ self.lora_b
        return self.linear(x) + (self.scale * z).astype(x.dtype)

    def repeated(self, lora_a: mx.array) -> mx.array:
        """(G, R) as mlx-lm's (K, R)."""
        return mx.repeat(lora_a, self._group_size, axis=0)


class PooledLoRASwitchLinear(LoRASwitchLinear):
    """As `PooledLoRALinear`, for each base expert; lora_a (M, R, G), lora_b (M, N, R)."""

    def __init__(self, base: nn.Module, settings: LoRASettings, key: mx.array | None, grid: Grid):
        super().__init__(base, settings, None)
        G = grid.scales.shape[-1]
        shape = (self.num_experts, settings.rank, G)
        self.lora_a = draw_lora_a(shape, self.input_dims, key)
        self._group_size = grid.group_size

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = self.linear(x, indices, sorted_indices=sorted_indices)
        dropped = keyed_dropout(x, self.dropout, self._step.key) if self.training else x
        delta = expert_delta(
            _pooled(dropped, self.lora_a.shape[-1]), self.lora_a, self.lora_b, indices, None,
            self.scale, sorted_indices,
        )  # fmt: skip
        return y + delta.astype(y.dtype)

    def repeated(self, lora_a: mx.array) -> mx.array:
        """(M, R, G) as mlx-lm's (M, R, K)."""
        return mx.repeat(lora_a, self._group_size, axis=-1)


def _moved_codes(grid: Grid, delta: mx.array) -> tuple[mx.array, mx.array]:
    """Codes as the fuse's policy keep moves them, and where the grid was wide enough for that.

    Shapes: delta (..., N, K) float32 -> (..., N, G, group_size) float32, bool.
    """
    shape = (*grid.scales.shape, grid.group_size)
    scales = grid.scales.astype(mx.float32)
    steps = delta.reshape(shape) / mx.where(scales == 0, mx.inf, scales)[..., None]
    wanted = grid.codes.reshape(shape) + mx.round(steps)
    codes = clip_codes(wanted, grid.bits)
    return codes, codes == wanted


def _on_grid(
    base: nn.Module, grid: Grid, delta: mx.array, *inputs: mx.array, **options: bool
) -> mx.array:
    """What `base` computes once a fuse with keep has put delta into it."""
    codes, _ = _moved_codes(grid, delta)
    stored = base.weight
    # In place for the time of the call: what looks for the output head knows modules by identity.
    if "scales" in base:
        base.weight = pack_codes(codes.reshape(delta.shape), grid.bits)
    else:
        base.weight = _values(grid, codes).reshape(delta.shape).astype(stored.dtype)
    try:
        y: mx.array = base(*inputs, **options)
    finally:
        base.weight = stored
    return y


def _values(grid: Grid, codes: mx.array) -> mx.array:
    scales, biases = (x.astype(mx.float32) for x in (grid.scales, grid.biases))
    return stored_values_of(codes, scales, biases, grid.scales.dtype)


def _straight_through(grid: Grid, delta: mx.array) -> mx.array:
    """Values on the grid; their gradient is that of delta, but where codes were clipped."""
    codes, inside = _moved_codes(grid, mx.stop_gradient(delta))
    values = mx.stop_gradient(_values(grid, codes).reshape(delta.shape))
    passed = mx.where(inside.reshape(delta.shape), delta, 0)
    return values + (passed - mx.stop_gradient(passed))


class GridLoRALinear(LoRALinear):
    """y = x @ rounded(W + scale * (A B)^T)^T.

    Law: in evaluation, to the bit what the base computes once the adapter is fused with keep.
    """

    def __init__(self, base: nn.Module, settings: LoRASettings, key: mx.array | None, grid: Grid):
        super().__init__(base, settings, key)
        self._grid = grid

    def __call__(self, x: mx.array) -> mx.array:
        # the operands of the fuse's own product (fuse/delta.py), so that every code is the same
        delta = (self.scale * self.lora_b.T) @ self.lora_a.T
        if not self.training:
            return _on_grid(self.linear, self._grid, delta, x)
        y = x @ _straight_through(self._grid, delta).astype(x.dtype).T
        return y + self.bias if self.bias is not None else y


class GridLoRASwitchLinear(LoRASwitchLinear):
    """As `GridLoRALinear`, for each base expert."""

    def __init__(self, base: nn.Module, settings: LoRASettings, key: mx.array | None, grid: Grid):
        super().__init__(base, settings, key)
        self._grid = grid

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        delta = (self.scale * self.lora_b) @ self.lora_a
        if not self.training:
            return _on_grid(
                self.linear, self._grid, delta, x, indices, sorted_indices=sorted_indices
            )
        # in float32: on a CPU MLX gathers nothing else
        weight = _straight_through(self._grid, delta).swapaxes(-1, -2)
        y = mx.gather_mm(
            x.astype(mx.float32), weight, rhs_indices=indices, sorted_indices=sorted_indices
        ).astype(x.dtype)
        return y + self.bias[indices][..., None, :] if self.bias is not None else y


_LAYERS: dict[MergeReady, tuple[type, type]] = {
    "pooled": (PooledLoRALinear, PooledLoRASwitchLinear),
    "grid": (GridLoRALinear, GridLoRASwitchLinear),
}


def merge_ready_layers(
    targets: Iterable[Target], grids: Mapping[str, Grid], how: MergeReady | None
) -> Callable[[Target, LoRASettings, mx.array], AdaptedLayer] | None:
    """What makes the layer of a target, for `attach_lora`; None where `how` is.

    grids: the stored form of each projection. Raises: ValueError for targets without an affine one.
    """
    if how is None:
        return None
    missing = [target.path for target in targets if target.path not in grids]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"merge_ready {how} is for affine quantized modules, and {missing[0]}{more} of the "
            "base are not; name others in keys, quantize the base with mlxstacks convert, or leave "
            "merge_ready out"
        )
    plain, switch = _LAYERS[how]

    def layer_of(target: Target, settings: LoRASettings, key: mx.array) -> AdaptedLayer:
        kind = switch if hasattr(target.module, "num_experts") else plain
        layer: AdaptedLayer = kind(target.module, settings, key, grids[target.path])
        return layer

    return layer_of


def as_stored(model: nn.Module, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Tensors of `lora_tensors` as an adapter that mlx-lm loads: pooled ones repeated to K."""
    stored = dict(tensors)
    for path, layer in adapted_layers(model):
        if isinstance(layer, PooledLoRALinear | PooledLoRASwitchLinear):
            stored[f"{path}.lora_a"] = layer.repeated(tensors[f"{path}.lora_a"])
    return stored
