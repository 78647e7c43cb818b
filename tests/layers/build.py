"""Small projections, stacks with random numbers, and one comparison, for the tests of layers."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks.layers.adapted import Dims
from mlxstacks.layers.latent import LatentPair
from mlxstacks.layers.moe_lora import MoELoRADelta
from mlxstacks.layers.packed import FrozenStack, StackShape
from mlxstacks.layers.selection import StackId
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.stacked import StackedLayer

K, N, M = 24, 20, 6  # input dims, output dims, base experts


def assert_close(got: object, wanted: object, tolerance: float = 1e-5) -> None:
    """Largest difference, relative to the largest number: float32 sums of tens of products."""
    left, right = (np.array(a, dtype=np.float64) for a in (got, wanted))
    assert left.shape == right.shape
    size = np.abs(right).max() if right.size else 1.0
    error = np.abs(left - right).max() / size if size else np.abs(left).max()
    assert error <= tolerance, f"off by {error:.2e} of the largest number {size:.3g}"


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def linear_base(seed: int = 0, input_dims: int = K, output_dims: int = N) -> nn.Linear:
    base = nn.Linear(input_dims, output_dims, bias=True)
    base.weight, base.bias = normal(seed, output_dims, input_dims) * 0.2, normal(9, output_dims)
    return base


def switch_base(seed: int = 0, input_dims: int = K, output_dims: int = N) -> nn.Module:
    from mlx_lm.models.switch_layers import SwitchLinear

    base = SwitchLinear(input_dims, output_dims, M, bias=False)
    base.weight = normal(seed, M, output_dims, input_dims) * 0.2
    return base


def dims_of(form: str) -> Dims:
    return Dims(K, N, None if form == "linear" else M)


def settings_of(form: str, **changes: object) -> StackSettings:
    values: dict[str, object] = {"rank": 3, "num_experts": 4}
    if form != "linear":
        values["switch_form"] = form
    return StackSettings.model_validate(values | changes)


def trained_delta(
    form: str = "linear", seed: int = 0, latent: LatentPair | None = None, **changes: object
) -> MoELoRADelta:
    """A delta as training might leave it: nothing in it is zero."""
    if latent is not None:
        changes["latent_dim"] = latent.dim
    delta = MoELoRADelta(dims_of(form), settings_of(form, **changes), mx.random.key(seed), latent)
    delta.lora_b = 0.3 * normal(seed + 100, *delta.lora_b.shape)
    if delta.has_router:
        delta.router = 0.3 * normal(seed + 200, *delta.router.shape)
        delta.noise = 0.3 * normal(seed + 300, *delta.noise.shape)
    mx.eval(delta.parameters())
    return delta


def random_stack(
    form: str = "linear", seed: int = 0, name: str = "", domain: str = "chat", **changes: Any
) -> FrozenStack:
    """A frozen stack of random numbers in float32."""
    delta = trained_delta(form, seed, **changes)
    s = delta.settings
    shape = StackShape(delta.form, s.num_experts, s.rank, s.top_k, s.scale)
    router = delta.router if delta.has_router else None
    return FrozenStack(
        StackId(name or f"{domain}/{seed}", domain), shape, delta.lora_a, delta.lora_b, router
    )


def active_of(layer: StackedLayer) -> MoELoRADelta:
    assert layer.active is not None
    return layer.active


def fill_active(layer: StackedLayer, seed: int, std: float = 0.1) -> None:
    """Numbers in place of the zeros of lora_b, as training leaves them."""
    active = active_of(layer)
    active.lora_b = std * normal(seed, *active.lora_b.shape)


def stacked(form: str, stacks: list[FrozenStack], seed: int = 0) -> StackedLayer:
    layer = StackedLayer(linear_base(seed) if form == "linear" else switch_base(seed))
    layer.set_stacks(stacks)
    return layer


def switch_rows(seed: int, batch: int, tokens: int, chosen: int) -> tuple[mx.array, mx.array]:
    """x (B, T, 1, 1, K) and indices (B, T, k) as mlx-lm gives them to gate_proj, unsorted."""
    x = normal(seed, batch, tokens, 1, 1, K)
    scores = normal(seed + 1, batch, tokens, M)
    return x, mx.argsort(scores, axis=-1)[..., :chosen]
