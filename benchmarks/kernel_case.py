"""What the kernel benchmark knows of one kernel at one shape, and how results are compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.kernel_timing import CACHE_BYTES
from tests.cases import TOLERANCES

Arguments = tuple[Any, ...]
Arrays = Sequence[mx.array]

DTYPE = mx.bfloat16
SCALE = 20.0  # mlx-lm's default


@dataclass(frozen=True)
class Sizes:
    """Shapes of a mixture-of-experts model and of what is stacked on it.

    hidden: width between layers. inner: width inside an expert. chosen: experts per token.
    ranks: of the experts' LoRA. stacks, stack_experts, stack_rank: of the packed stacks.
    tokens: numbers of tokens that the packed stacks see.
    """

    name: str
    experts: int
    hidden: int
    inner: int
    chosen: int
    ranks: tuple[int, ...]
    stacks: int
    stack_experts: int
    stack_rank: int
    tokens: tuple[int, ...]
    # Bytes that different arguments add up to, so that no cache can serve them.
    cycle_bytes: int


QWEN_35B = Sizes(
    "Qwen3.5-35B-A3B", 256, 2048, 512, 8, (8, 16, 64), 10, 4, 16, (1, 8, 256), CACHE_BYTES
)
SMALL = Sizes("small", 8, 512, 128, 4, (8, 64), 4, 4, 16, (1, 8, 32), 4_000_000)
TINY = Sizes("tiny", 2, 128, 64, 2, (8,), 2, 2, 4, (1, 5), 0)


@dataclass(frozen=True)
class Comparison:
    """A kernel's result beside the reference.

    largest_error: the largest difference of weights or outputs, in their own unit.
    relative_error: the largest one as a share of its value (see `float_comparison`); None where
        bits are compared.
    allowed: what relative_error may be; 0 where bits are compared.
    differs: what is not as it should be, in words; empty where all is.
    """

    largest_error: float
    relative_error: float | None
    allowed: float
    differs: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return not self.differs


@dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    make: sets of arguments that need `cycle_bytes` in all, each as `run` takes them.
    run: the kernel. composition: the same in MLX operations, in the weights' dtype.
    compare: checks a result of `run` against the reference, worked out on the CPU.
    needed_bytes: what any implementation has to read and write at least.
    """

    kernel: str
    label: str
    composition_name: str
    make: Callable[[], list[Arguments]]
    run: Callable[..., Arrays]
    composition: Callable[..., Arrays]
    compare: Callable[[Arguments, Arrays], Comparison]
    needed_bytes: Callable[..., int]


def sets(needed: int, cycle_bytes: int, make: Callable[[], Arguments]) -> list[Arguments]:
    """As many sets of arguments as add up to `cycle_bytes`."""
    made = [make() for _ in range(1 + cycle_bytes // max(needed, 1))]
    mx.eval(made)
    return made


def some(experts: int) -> mx.array:
    """The experts that a large weight is compared at: the first, the last and two between."""
    return mx.array(sorted({0, experts // 3, 2 * experts // 3, experts - 1}))


def same_bytes(left: mx.array, right: mx.array) -> bool:
    return left.dtype == right.dtype and bool(
        mx.array_equal(left.view(mx.uint8), right.view(mx.uint8))
    )


def largest_error(found: mx.array, wanted: mx.array) -> float:
    """The largest difference; NaN where one of the two is not a number."""
    return float(mx.abs(found.astype(mx.float32) - wanted.astype(mx.float32)).max())


def close(found: mx.array, wanted: mx.array, relative: float, absolute: float) -> bool:
    """Whether every element is near; `absolute` is a share of the largest one of its column."""
    left, right = (np.array(x.astype(mx.float32)) for x in (found, wanted))
    if left.shape != right.shape:
        return False
    columns = np.abs(right).reshape(-1, right.shape[-1]).max(axis=0)
    return bool((np.abs(left - right) <= relative * np.abs(right) + absolute * columns).all())


def bit_comparison(error: float, **same: bool) -> Comparison:
    """For results whose every bit is asked for. same: by the name of each, whether it has them."""
    return Comparison(error, None, 0.0, tuple(name for name, right in same.items() if not right))


def float_comparison(found: mx.array, wanted: mx.array) -> Comparison:
    """By the table of tolerances; `wanted` is float32, whatever the kernel works in.

    The tolerance of a value is `relative * |value| + absolute * |largest value|`, so an error is
    measured in `|value| + absolute / relative * |largest value|` and may be up to `relative`.
    """
    relative, absolute = TOLERANCES[found.dtype]
    left, right = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (found, wanted))
    assert left.shape == right.shape
    sizes = np.abs(right) + absolute / relative * np.abs(right).max()
    errors = np.abs(left - right)
    shares = np.divide(errors, sizes, out=np.where(errors == 0, 0.0, np.inf), where=sizes != 0)
    worst = float(shares.max())  # NaN where something is not a number
    differs = () if worst <= relative else ("outputs",)
    return Comparison(largest_error(found, wanted), worst, relative, differs)
