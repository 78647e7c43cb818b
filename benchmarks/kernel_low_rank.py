"""Cases of the low-rank kernels: `expert_delta` at decode, `stack_sum` at decode and prefill."""

from functools import partial

import mlx.core as mx

from benchmarks.kernel_case import (
    DTYPE,
    SCALE,
    Arguments,
    Arrays,
    Case,
    Comparison,
    Sizes,
    float_comparison,
    sets,
)
from mlxstacks.ops.expert_delta import expert_delta, expert_delta_reference
from mlxstacks.ops.stack_sum import stack_sum, stack_sum_reference


def expert_delta_case(sizes: Sizes, name: str, rank: int) -> Case:
    """One token through one projection of its chosen experts."""
    into_expert = name == "gate_proj"
    inputs = sizes.hidden if into_expert else sizes.inner
    outputs = sizes.inner if into_expert else sizes.hidden
    pair_bytes = rank * (inputs + outputs) * DTYPE.size

    def run(x: mx.array, a: mx.array, b: mx.array, indices: mx.array) -> Arrays:
        return [expert_delta(x, a, b, indices, None, SCALE, False, use_kernel=True)]

    def composition(x: mx.array, a: mx.array, b: mx.array, indices: mx.array) -> Arrays:
        return [expert_delta_reference(x, a, b, indices, None, SCALE, False)]

    def compare(arrays: Arguments, result: Arrays) -> Comparison:
        with mx.stream(mx.cpu):
            x, a, b, indices = arrays
            # Only the chosen experts, in float32: all of them would be hundreds of megabytes.
            down, up = (w[indices.flatten()].astype(mx.float32) for w in (a, b))
            own = mx.arange(indices.size).reshape(indices.shape)
            wanted = expert_delta_reference(x.astype(mx.float32), down, up, own, None, SCALE, False)
            return float_comparison(result[0], wanted)

    width = f"{outputs}x{inputs}"
    return Case(
        kernel="expert_delta",
        label=f"rank {rank}, {name} {width}, {sizes.chosen} of {sizes.experts}",
        composition_name="gather_mm twice",
        make=partial(_tokens_of_layers, sizes, rank, inputs, outputs, into_expert),
        run=run,
        composition=composition,
        compare=compare,
        needed_bytes=lambda x, a, b, indices: (
            indices.size * (pair_bytes + outputs * DTYPE.size) + x.nbytes + indices.nbytes
        ),
    )


def _tokens_of_layers(
    sizes: Sizes, rank: int, inputs: int, outputs: int, one_input: bool
) -> list[Arguments]:
    """(x, a, b, indices) of as many layers as no cache holds, and of tokens enough for each.

    one_input: whether the chosen experts of a token share one x.
    """
    layer_bytes = sizes.experts * rank * (inputs + outputs) * DTYPE.size
    layers, tokens = 1 + sizes.cycle_bytes // layer_bytes, sizes.experts // sizes.chosen
    made: list[Arguments] = []
    for _ in range(layers):
        a = mx.random.normal((sizes.experts, rank, inputs), scale=0.05).astype(DTYPE)
        b = mx.random.normal((sizes.experts, outputs, rank), scale=0.05).astype(DTYPE)
        order = mx.random.permutation(sizes.experts).astype(mx.uint32)
        mx.eval(a, b, order)
        # Tokens that together use every expert once: the next pass over a layer is cold again.
        for first in range(0, sizes.experts, sizes.chosen):
            x = mx.random.normal((1, 1, 1 if one_input else sizes.chosen, 1, inputs)).astype(DTYPE)
            chosen = order[None, None, first : first + sizes.chosen]
            made.append((x, a, b, mx.contiguous(chosen)))
    mx.eval(made)
    # By layers first, as a model goes through them.
    return [made[layer * tokens + t] for t in range(tokens) for layer in range(layers)]


def stack_sum_case(sizes: Sizes, tokens: int) -> Case:
    """All packed stacks of one hidden-to-hidden projection, half of the experts active."""
    ranks = sizes.stacks * sizes.stack_experts * sizes.stack_rank
    weights_bytes = 2 * ranks * sizes.hidden * DTYPE.size

    def arguments() -> Arguments:
        a = mx.random.normal((ranks, sizes.hidden), scale=0.05).astype(DTYPE)
        b = mx.random.normal((sizes.hidden, ranks), scale=0.05).astype(DTYPE)
        logits = mx.random.normal((1, tokens, sizes.stacks, sizes.stack_experts))
        kept = logits >= mx.sort(logits, axis=-1)[..., sizes.stack_experts // 2, None]
        gates = mx.softmax(mx.where(kept, logits, -mx.inf), axis=-1)
        return mx.random.normal((1, tokens, sizes.hidden)).astype(DTYPE), a, b, gates

    def run(x: mx.array, a: mx.array, b: mx.array, gates: mx.array) -> Arrays:
        return [stack_sum(x, a, b, gates, SCALE, use_kernel=True)]

    def composition(x: mx.array, a: mx.array, b: mx.array, gates: mx.array) -> Arrays:
        return [stack_sum_reference(x, a, b, gates, SCALE)]

    def compare(arrays: Arguments, result: Arrays) -> Comparison:
        with mx.stream(mx.cpu):
            x, a, b, gates = (array.astype(mx.float32) for array in arrays)
            wanted = stack_sum_reference(x, a, b, gates, SCALE)
            return float_comparison(result[0], wanted)

    def needed_bytes(x: mx.array, a: mx.array, b: mx.array, gates: mx.array) -> int:
        # An expert that no token uses need not be read.
        used = float((gates != 0).any(axis=(0, 1)).astype(mx.float32).mean())
        return int(used * (a.nbytes + b.nbytes)) + 2 * x.nbytes + gates.nbytes

    shape = f"{sizes.stacks} stacks E={sizes.stack_experts} r={sizes.stack_rank}"
    return Case(
        kernel="stack_sum",
        label=f"{shape}, {sizes.hidden}x{sizes.hidden}, {tokens} token{'s' * (tokens > 1)}",
        composition_name="two matmuls and the gates",
        make=lambda: sets(weights_bytes, sizes.cycle_bytes, arguments),
        run=run,
        composition=composition,
        compare=compare,
        needed_bytes=needed_bytes,
    )
