"""What expert_delta and stack_sum share around their kernels: checks, launch sizes, gradients.

A kernel has no derivative of its own. Its gradient here is that of the operator's reference, in MLX
operations: training works on many tokens, where those are matrix-matrix products already, and a
kernel made for a few rows would gain nothing.
"""

from collections.abc import Callable, Sequence
from numbers import Real

import mlx.core as mx

from mlxstacks.ops import kernels

Function = Callable[..., mx.array]

# No GPU has float64, and gather_mm would silently round it.
FLOATS = (mx.float32, mx.bfloat16, mx.float16)
SHARED_BYTES = 32768  # threadgroup memory on Metal
_SINGLE_VARIABLES = 64  # bytes of it for the arrays of one element, with alignment


def call_with_gradient(
    kernel: Function, reference: Function, arguments: Sequence[mx.array]
) -> mx.array:
    """`kernel(*arguments)`, differentiated as `reference(*arguments)` is.

    Both take the same arrays and return one array of the same shape and dtype. The gradient is a
    true one for every argument, also at a gate of zero. What is not asked for is not computed.
    There is no jvp.
    """

    @mx.custom_function
    def run(*primals: mx.array) -> mx.array:
        return kernel(*primals)

    @run.vjp
    def run_vjp(
        primals: Sequence[mx.array], cotangent: mx.array, output: mx.array
    ) -> tuple[mx.array, ...]:
        return tuple(mx.vjp(reference, list(primals), [cotangent])[1])

    return run(*arguments)


def products_on_cpu(*arrays: mx.array) -> tuple[mx.array, ...]:
    """The arrays in float32 if MLX's device is a CPU, else as they are.

    A CPU's gather_mm takes float32 alone, and its matmul of half floats is some sixteen times
    slower than a cast and OpenBLAS (256 tokens). A GPU has fast half products of float32 sums.
    """
    if mx.default_device().type == mx.DeviceType.gpu:
        return arrays
    return tuple(array.astype(mx.float32) for array in arrays)


def lanes_for(length: int) -> int:
    """Lanes that share a sum of `length` products: a power of two up to 32.

    Each has four products or more where there are as many: a step of the sum across lanes costs
    about as much as a product.
    """
    lanes = 1
    while lanes < kernels.LANES and 4 * lanes < length:
        lanes *= 2
    return lanes


def shared_memory_refusal(ranks: int, array_bytes: int) -> str | None:
    """Why a launch with `array_bytes` of threadgroup arrays for `ranks` ranks cannot run."""
    needed = array_bytes + _SINGLE_VARIABLES
    if needed <= SHARED_BYTES:
        return None
    return f"{ranks} ranks need {needed} bytes of threadgroup memory, {SHARED_BYTES} exist"


def wrong_floats(**arrays: mx.array) -> list[str]:
    """One line for each array whose dtype is not one of FLOATS."""
    return [
        f"{name}: got {array.dtype}, allowed are float32, bfloat16 and float16; cast it with astype"
        for name, array in arrays.items()
        if array.dtype not in FLOATS
    ]


def wrong_matrices(ndim: int, **arrays: tuple[mx.array, str]) -> list[str]:
    """One line for each (array, its shape in letters) that is empty or not `ndim`-dimensional."""
    return [
        f"{name}: got shape {array.shape}, allowed is {letters}, none of them 0"
        for name, (array, letters) in arrays.items()
        if array.ndim != ndim or array.size == 0
    ]


def wrong_scale(scale: object) -> list[str]:
    """One line if the factor of a change is no number: a kernel would not differentiate to it."""
    if isinstance(scale, Real):
        return []
    kind = type(scale).__name__
    return [f"scale: got {kind}, allowed is a number; multiply the result by what is to be learned"]


def raise_problems(operator: str, problems: Sequence[str]) -> None:
    """Raise one ValueError that lists all problems; do nothing when there are none."""
    if problems:
        raise ValueError("\n  ".join([f"{operator} cannot use these arguments:", *problems]))
