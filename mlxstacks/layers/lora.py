"""LoRA on linear and switch projections, in mlx-lm's parameter names and layouts.

The tensors `<path>.lora_a` and `<path>.lora_b` of a trained model are an mlx-lm adapter as they
stand. Axis order is upstream's, and differs by kind (letters: M base experts, K input dims, N
output dims, R rank):

    LoRALinear        lora_a (K, R)     lora_b (R, N)
    LoRASwitchLinear  lora_a (M, R, K)  lora_b (M, N, R); of either M may be 1, one for all experts

Beside mlx-lm's own classes these draw from an explicit key, so that dropout is the same again when
a checkpoint recomputes it.
"""

from typing import Self

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.files.lora_modules import outer_half
from mlxstacks.layers.adapted import AdaptedLayer, check_rank, keyed_dropout
from mlxstacks.layers.settings import LoRASettings
from mlxstacks.ops.expert_delta import expert_delta


def draw_lora_a(shape: tuple[int, ...], input_dims: int, key: mx.array | None) -> mx.array:
    """Kaiming uniform with a = sqrt(5), that is uniform within 1/sqrt(input_dims); float32."""
    bound = input_dims**-0.5
    return mx.random.uniform(-bound, bound, shape, key=key)


class _LoRALayer(AdaptedLayer):
    """What mlx-lm calls on a LoRA layer."""

    def __init__(self, base: nn.Module, settings: LoRASettings, key: mx.array | None):
        super().__init__(base)
        check_rank(settings.rank, self._dims)
        self.scale = settings.scale
        self.dropout = settings.dropout

    @classmethod
    def from_base(
        cls, linear: nn.Module, r: int = 8, dropout: float = 0.0, scale: float = 20.0,
        key: mx.array | None = None,
    ) -> Self:  # fmt: skip
        """As mlx-lm's, with its defaults. key: None draws from MLX's global state, as mlx-lm does.

        Raises: ValueError for a rank or a base that does not fit.
        """
        layer = cls(linear, LoRASettings(rank=r, dropout=dropout), key)
        layer.scale = scale
        return layer

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """A projection of the base's kind with the delta in its weights, rounded again at its bits
        (the policy refit); dequantize: in floats. Law: mlx-lm's, to the bit. `mlxstacks.fuse` says
        what is left of the delta, and has policies that keep it.
        """
        return base_model.fused_layer(self, dequantize)


class LoRALinear(_LoRALayer):
    """y = linear(x) + scale * (x @ lora_a) @ lora_b, float32 weights, summed in the dtype of x.

    Laws: a new one changes nothing; equal to mlx-lm's LoRALinear with the same arrays, to the bit.
    """

    def __init__(self, base: nn.Module, settings: LoRASettings, key: mx.array | None):
        super().__init__(base, settings, key)
        if self._dims.base_experts is not None:
            raise ValueError("a switch projection needs LoRASwitchLinear")
        K, N, R = self.input_dims, self.output_dims, settings.rank
        self.lora_a = draw_lora_a((K, R), K, key)
        self.lora_b = mx.zeros((R, N))

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        dropped = keyed_dropout(x, self.dropout, self._step.key) if self.training else x
        z = (dropped @ self.lora_a) @ self.lora_b
        return y + (self.scale * z).astype(x.dtype)


class LoRASwitchLinear(_LoRALayer):
    """A pair for each base expert; x, indices and result as in `ops.expert_delta`.

    shared: "lora_a" or "lora_b", the half that all experts have in common; None: neither.
    Laws: those of LoRALinear, with mlx-lm's LoRASwitchLinear; sorted and unsorted rows agree; with
    a shared half, output and gradient are to rounding those of as many equal ones.
    """

    def __init__(
        self,
        base: nn.Module,
        settings: LoRASettings,
        key: mx.array | None,
        shared: str | None = None,
    ):
        super().__init__(base, settings, key)
        if self._dims.base_experts is None:
            raise ValueError("a linear projection needs LoRALinear")
        M, K, N, R = self.num_experts, self.input_dims, self.output_dims, settings.rank
        self.lora_a = draw_lora_a((1 if shared == "lora_a" else M, R, K), K, key)
        self.lora_b = mx.zeros((1 if shared == "lora_b" else M, N, R))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = self.linear(x, indices, sorted_indices=sorted_indices)
        dropped = keyed_dropout(x, self.dropout, self._step.key) if self.training else x
        delta = expert_delta(
            dropped, self.lora_a, self.lora_b, indices, None, self.scale, sorted_indices
        )
        return y + delta

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """As of every LoRA; mlx-lm's fuse takes a pair of every expert."""
        if len(self.lora_a) == len(self.lora_b):
            return super().fuse(dequantize)
        whole = type(self).from_base(self.linear, r=self.lora_a.shape[1], scale=self.scale)
        whole.lora_a = for_experts(self.lora_a, self.num_experts)
        whole.lora_b = for_experts(self.lora_b, self.num_experts)
        return whole.fuse(dequantize)


def for_experts(half: mx.array, experts: int) -> mx.array:
    """A half (M or 1, ...) of a switch pair with one for each expert."""
    return mx.contiguous(mx.broadcast_to(half, (experts, *half.shape[1:])))


def lora_layer(
    base: nn.Module, settings: LoRASettings, key: mx.array, path: str = ""
) -> AdaptedLayer:
    """The LoRA that fits a projection: LoRALinear or LoRASwitchLinear. path: decides which half is
    the outer one, with `shared_outer`.
    """
    if not hasattr(base, "num_experts"):
        return LoRALinear(base, settings, key)
    shared = outer_half(path) if settings.shared_outer else None
    return LoRASwitchLinear(base, settings, key, shared)
