"""Routing of a token to the experts of a stack: logits, top-k gates, load balance.

Letters: E experts, K input dims; leading axes are rows (tokens, or (token, base expert) pairs of a
switch layer). All of it is float32 whatever the dtype of the model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class Routing:
    """Where the rows go. gates (..., E): what each expert counts, a sum of 1. chosen (..., E)
    bool: the kept experts of each row.
    """

    gates: mx.array
    chosen: mx.array


def router_logits(x: mx.array, router: mx.array) -> mx.array:
    """x (..., K), router (E, K), both of any float dtype -> (..., E) float32."""
    return x.astype(mx.float32) @ router.astype(mx.float32).T


@lru_cache
def _twin_product() -> Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]:
    """x @ w.T twice; made when first used, so that the guard can trace one of its own."""

    @mx.custom_function
    def product(x: mx.array, w: mx.array) -> tuple[mx.array, mx.array]:
        y = x @ w.T
        return y, y

    @product.vjp
    def backward(
        primals: tuple[mx.array, mx.array],
        cotangents: tuple[mx.array, mx.array],
        _: tuple[mx.array, mx.array],
    ) -> tuple[mx.array, mx.array]:
        x, w = primals
        both = (cotangents[0] + cotangents[1]).reshape(-1, w.shape[0])
        return cotangents[0] @ w, both.T @ x.reshape(-1, x.shape[-1])

    return product


def training_logits(
    x: mx.array, router: mx.array, noise: mx.array | None, normal: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Logits (..., E) twice: for the gates, and for the balance loss, whose gradient reaches router
    and noise but not x: through x it would train lora_a and lora_b of earlier layers.

    x (..., K); router, noise (E, K), all float32; normal (..., E): a standard normal draw, constant
    to gradients. With noise the logits are x @ router.T + softplus(x @ noise.T) * normal; zero
    noise weights still give noise, as softplus(0) is 0.693.
    """
    if noise is None or normal is None:
        return _twin_product()(x, router)
    constant = mx.stop_gradient(normal)
    made = []
    for product in _twin_product()(x, mx.concatenate([router, noise])):  # (..., 2E)
        logits, spread = mx.split(product, 2, axis=-1)
        made.append(logits + nn.softplus(spread) * constant)
    return made[0], made[1]


def top_k_mask(logits: mx.array, k: int) -> mx.array:
    """Which logits (..., E) are among the k largest of their row: bool (..., E).

    Law: exactly k are, and of equal logits the first ones, on every backend. The E x E comparisons
    of a row cost nothing beside its products: E is 4 where K is thousands.
    """
    experts = logits.shape[-1]
    fixed = mx.stop_gradient(logits)
    if k >= experts:
        return mx.ones(logits.shape, mx.bool_)
    mine, other = fixed[..., :, None], fixed[..., None, :]
    earlier = mx.tril(mx.ones((experts, experts), mx.bool_), -1)
    ahead = (other > mine) | ((other == mine) & earlier)  # (..., E, E)
    return mx.sum(ahead, axis=-1) < k


def top_k_softmax(logits: mx.array, k: int) -> Routing:
    """Gates over the k largest logits of each row, softmax in float32.

    Law: exactly k gates are not zero (unless a logit is some 100 below the largest) and they sum to
    1; k = E is a dense softmax.
    """
    chosen = top_k_mask(logits, k)
    if k < logits.shape[-1]:
        logits = mx.where(chosen, logits, -mx.inf)
    return Routing(mx.softmax(logits, axis=-1, precise=True), chosen)


def balance_sums(
    logits: mx.array, chosen: mx.array, counted: mx.array, scale: float = 1.0
) -> dict[str, mx.array]:
    """What the balance loss of any number of batches is made of; float32, to be added up.

    logits: (..., E), noisy; chosen: (..., E) bool; counted: (..., 1), 0 for a row of padding and
    the same for all rows of other tokens together. rows: scalar, sum of counted. loads: (E,), that
    of the rows that chose e, without gradient. probabilities: (E,), `scale` times the sum of the
    softmax of all logits.
    """
    axes = tuple(range(logits.ndim - 1))
    p = mx.softmax(logits, axis=-1, precise=True)
    return {
        "rows": mx.sum(counted),
        "loads": mx.sum(chosen * counted, axis=axes),
        "probabilities": mx.sum(p * (scale * counted), axis=axes),
    }


def balance_loss(sums: Mapping[str, mx.array]) -> mx.array:
    """The balance loss E * sum_e P[e] * f[e] over all rows of `balance_sums`, a scalar.

    P: mean over rows of the probabilities. f: share of rows that chose e. Laws: uniform P and f
    give exactly k, at most E; with a scale of 1 / k the uniform value is 1.
    """
    loads = sums["loads"]
    return loads.size * mx.sum(sums["probabilities"] * loads) / sums["rows"] ** 2


def balance_slopes(
    x: mx.array,
    logits: mx.array,
    counted: mx.array,
    scale: float = 1.0,
    noise: mx.array | None = None,
    normal: mx.array | None = None,
) -> mx.array:
    """Gradients of each of the E `probabilities` by router and noise, (E, 2E, K) float32; without
    noise by router alone, (E, E, K). Constants to gradients.

    With given loads the gradient of the loss is linear in them: they can be added up over batches
    before the loads of all are known. x, noise, normal: as `training_logits` takes them.
    """
    experts, width = logits.shape[-1], x.shape[-1]
    x, logits, counted = (
        mx.stop_gradient(a).reshape(-1, a.shape[-1]) for a in (x, logits, counted)
    )
    p = mx.softmax(logits, axis=-1, precise=True)
    by_logit = p * (scale * counted)
    if noise is not None and normal is not None:
        by_spread = mx.sigmoid(x @ mx.stop_gradient(noise).T) * normal.reshape(-1, experts)
        by_logit = mx.concatenate([by_logit, by_logit * by_spread], axis=-1)  # (n, 2E)
    # The gradient of p[e] by logit j is p[j] where e is j, less p[e] * p[j].
    products = (p[..., None] * by_logit[:, None]).reshape(len(x), -1).T @ x
    own = mx.tile(mx.eye(experts), (1, by_logit.shape[-1] // experts))[..., None]  # (E, 2E, 1)
    return own * (by_logit.T @ x) - products.reshape(experts, -1, width)


def balance_gradient(sums: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The gradient of `balance_loss` by name, router and noise (E, K), from sums and slopes."""
    loads = sums["loads"]
    both = mx.tensordot(loads, sums["slopes"], axes=1) * loads.size / sums["rows"] ** 2
    names = ("router", "noise")[: len(both) // loads.size]
    return dict(zip(names, mx.split(both, len(names)), strict=True))
