"""The zero-knowledge control of outcome discovery: a random stack of equal norm for each real one.

A stack that was trained on nothing, with deltas as large, says how much of a gain any perturbation
of this size would find: the search takes the lowest of several noisy losses. Equal to those of the
real stack are shapes, scale and top-k, each expert's |B A| (Frobenius), and the deviation of the
router's weights.
"""

import hashlib
from collections.abc import Iterable, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.layers.freezing import add_frozen
from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.selection import StackId
from mlxstacks.layers.stacked import stacked_layers

# No domain of a store can be called so: names hold no colon.
PREFIX = "random:"


def random_name(domain: str) -> str:
    """Name of the control of a domain, and of its stacks' domain in a model."""
    return f"{PREFIX}{domain}"


def random_hash(sha256: str, seed: int) -> str:
    """Stands for the hash of a random stack's file: all that it depends on."""
    return f"{PREFIX}{seed}:{sha256}"


def expert_norms(stack: FrozenStack) -> mx.array:
    """|B_e A_e| (Frobenius) of each pair, float32: (E,), or (M, E) of the form per_expert.

    Of latent stacks inside the latent space, which its orthonormal projections do not change.
    Worked out from r x r products: |BA|^2 = sum((B^T B) * (A A^T)); no (N, K) array is made.
    """
    a, b = _by_expert(stack)
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    grams = (b.swapaxes(-1, -2) @ b) * (a @ a.swapaxes(-1, -2))
    return mx.sqrt(mx.maximum(mx.sum(grams, axis=(-2, -1)), 0))


def random_stack(stack: FrozenStack, key: mx.array) -> FrozenStack:
    """A random stack in the place of `stack`, at its dtypes, in the domain `random_name`.

    Laws: each expert's norm is that of `stack` (to the rounding of its dtype), so zero stays zero;
    the same key gives the same stack.
    """
    key_a, key_b, key_router = mx.random.split(key, 3)
    size_a, size_b = (_deviation(array) for array in (stack.lora_a, stack.lora_b))
    drawn = FrozenStack(
        StackId(random_name(stack.id.name), random_name(stack.id.domain)),
        stack.shape,
        mx.random.normal(stack.lora_a.shape, key=key_a) * size_a,
        mx.random.normal(stack.lora_b.shape, key=key_b) * size_b,
        None,
    )
    wanted, found = expert_norms(stack), expert_norms(drawn)
    factor = mx.where(found > 0, wanted / mx.maximum(found, 1e-30), 0)
    router = None
    if stack.router is not None:
        values = stack.router.astype(mx.float32)
        noise = mx.random.normal(values.shape, key=key_router)
        router = (noise * _deviation(values)).astype(stack.router.dtype)
    made = FrozenStack(
        drawn.id,
        stack.shape,
        drawn.lora_a.astype(stack.lora_a.dtype),
        (drawn.lora_b * _over_columns(factor, stack)).astype(stack.lora_b.dtype),
        router,
    )
    mx.eval(list(made.tensors().values()))
    return made


def add_random_stacks(
    model: nn.Module, hashes: Mapping[str, str], domains: Iterable[str], seed: int
) -> None:
    """Put the control of every stack of these domains into a model that serves them.

    hashes: stack name -> sha256 of its file; draws depend on it, the path and the seed alone.
    """
    wanted = set(domains)
    by_name: dict[str, dict[str, FrozenStack]] = {}
    for path, layer in stacked_layers(model):
        for stack in layer.stacks.stacks():
            if stack.id.domain in wanted:
                key = _key(f"{random_hash(hashes[stack.id.name], seed)}/{path}")
                by_name.setdefault(stack.id.name, {})[path] = random_stack(stack, key)
    for parts in by_name.values():
        add_frozen(model, parts)


def _key(text: str) -> mx.array:
    return mx.random.key(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def _by_expert(stack: FrozenStack) -> tuple[mx.array, mx.array]:
    """A (..., E, R, K) and B (..., E, N, R); the leading axis of per_expert is M."""
    if stack.shape.form != "per_expert":
        return stack.lora_a, stack.lora_b
    experts, rank = stack.shape.num_experts, stack.shape.rank
    a = mx.unflatten(stack.lora_a, 1, (experts, rank))  # (M, E, R, K)
    b = mx.unflatten(stack.lora_b, 2, (experts, rank))  # (M, N, E, R)
    return a, b.swapaxes(1, 2)  # (M, E, N, R)


def _over_columns(factor: mx.array, stack: FrozenStack) -> mx.array:
    """Factors of the experts laid on lora_b, as it is stored."""
    if stack.shape.form != "per_expert":
        return factor[:, None, None]  # (E, 1, 1)
    return mx.repeat(factor, stack.shape.rank, axis=-1)[:, None, :]  # (M, 1, E*R)


def _deviation(values: mx.array) -> mx.array:
    return mx.std(values.astype(mx.float32))
