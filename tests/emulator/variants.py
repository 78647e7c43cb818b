"""Ways to run a kernel that Metal leaves open, or that make a mistake visible.

A kernel that promises bits gives the same bits in all of them; `VARIANTS` is a small set in which
every value of every option occurs, with no more than two compilations of a kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LANE_ORDERS = ("forward", "reverse", "shuffled")
REDUCTIONS = ("neighbours", "halves", "sequence")
POISONS = {"nan": 0xFF, "a5": 0xA5}


@dataclass(frozen=True)
class Variant:
    """
    lane_order: order of threadgroups, SIMD groups and lanes between the places where they meet.
    poison: what unwritten outputs, threadgroup memory, padding and absent lanes hold: bytes 0xFF,
        which are NaN in every float type, or bytes 0xA5.
    guard: which side of a buffer touches memory that must not be used: "end" or "start".
    contraction: a * b + c may become one fused operation, as in Metal's safe mode.
    flush: subnormal float32 values are zero, as on a GPU.
    traps: undefined behaviour stops the kernel, and uninitialised variables hold a pattern.
    reduction: how simd_sum and its like add up lanes.
    """

    lane_order: str = "forward"
    poison: str = "nan"
    guard: str = "end"
    contraction: bool = True
    flush: bool = False
    traps: bool = False
    reduction: str = "neighbours"
    seed: int = 1

    def __str__(self) -> str:
        switches = ["contraction", "flush", "traps"]
        on = [name for name in switches if getattr(self, name)]
        return "-".join([self.lane_order, self.poison, self.guard, self.reduction, *on])


VARIANTS: tuple[Variant, ...] = (
    Variant("forward", "nan", "end", contraction=True),
    Variant("reverse", "a5", "start", contraction=True, flush=True, reduction="sequence"),
    Variant("shuffled", "nan", "start", contraction=True, reduction="halves", seed=2),
    Variant("forward", "a5", "start", contraction=False, traps=True, flush=True),
    Variant("reverse", "nan", "end", contraction=False, traps=True, reduction="halves"),
    Variant("shuffled", "a5", "end", contraction=False, traps=True, reduction="sequence", seed=3),
)

_current: list[Variant] = [VARIANTS[0]]


def current() -> Variant:
    return _current[-1]


@contextmanager
def variant(chosen: Variant) -> Iterator[Variant]:
    """Kernels of a `with` block run this way."""
    _current.append(chosen)
    try:
        yield chosen
    finally:
        _current.pop()
