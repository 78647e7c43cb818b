"""Cases of requant: packed weights with hostile groups among them, deltas of every kind."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks.ops import affine
from mlxstacks.ops.policies import POLICIES, PROMOTED_BITS, Change, Groups
from mlxstacks.ops.requant import Requantized, requant
from tests.cases import GRIDS, KERNEL_SHAPES, MX_DTYPES, Grid, third_of_the_grids


@dataclass(frozen=True)
class Case:
    """One call of requant.

    shape: (leading axes and rows, input_dims). source: "dense", "rounded" (a dense delta and its
    rounding, which is not the cast of it) or "lora". size: of the delta, in steps.
    """

    grid: Grid
    policy: str
    new_bits: int | None = None
    shape: tuple[tuple[int, ...], int] = ((7,), 384)
    source: str = "dense"
    control: bool = False
    rank: int = 8
    lora_dtype: mx.Dtype = mx.float32
    size: float = 0.4

    def __str__(self) -> str:
        to = f"to{self.new_bits}" if self.new_bits else ""
        rows = "x".join(map(str, (*self.shape[0], self.shape[1])))
        lora = f"_r{self.rank}_{str(self.lora_dtype).removeprefix('mlx.core.')}"
        control = "_control" if self.control else ""
        tail = lora if self.source == "lora" else ""
        return f"{self.policy}{to}_{self.grid}_{rows}_{self.source}{tail}{control}"

    @property
    def bits_after(self) -> int:
        return self.new_bits or self.grid.bits


@dataclass(frozen=True)
class Call:
    """Arguments of requant, and the same for NumPy."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    groups: Groups
    uniform: np.ndarray = field(repr=False)

    def __call__(self, use_kernel: bool | None = None, **changed: Any) -> Requantized:
        return requant(*self.positional, **(self.named | changed), use_kernel=use_kernel)

    def change(self, delta: mx.array) -> Change:
        """What NumPy's policies take, for a dense (..., N, K) delta."""
        shape = self.groups.codes.shape
        rounded = self.named.get("rounded")
        return Change(
            np.array(delta).reshape(shape),
            None if rounded is None else np.array(rounded).reshape(shape),
            self.named["new_bits"],
            self.uniform.reshape(shape),
        )


def make(case: Case, seed: int = 0) -> Call:
    """A call of requant for a case."""
    random = np.random.default_rng([seed, *map(ord, str(case))])
    (leading, width), grid = case.shape, case.grid
    groups = hostile_groups(grid, int(np.prod(leading)) * width // grid.group_size, random)
    delta = hostile_delta(groups, case.size, random)
    uniform = random.random(delta.shape, dtype=np.float32)
    shape = (*leading, width)
    packed = mx.array(affine.pack(groups.codes.reshape(shape), grid.bits))
    scales, biases = (
        mx.array(x.reshape(*leading, -1)).astype(MX_DTYPES[grid.dtype])
        for x in (groups.scales, groups.biases)
    )
    named: dict[str, Any] = {
        "policy": case.policy,
        "group_size": grid.group_size,
        "bits": grid.bits,
        "new_bits": case.new_bits,
        "control": case.control,
    }
    factors: list[mx.array | None] = [None, None]
    if case.source == "lora":
        sizes = (*leading[:-1], case.rank, width), (*leading, case.rank)
        std = np.sqrt(case.size * float(np.median(np.abs(groups.scales))) / np.sqrt(case.rank))
        factors = [
            mx.array(random.standard_normal(size).astype(np.float32) * np.float32(std)).astype(
                case.lora_dtype
            )
            for size in sizes
        ]
    else:
        named["delta"] = mx.array(delta.reshape(shape))
    if case.source == "rounded":
        other = affine.round_to(delta * np.float32(1.01), grid.dtype)
        named["rounded"] = mx.array(other.reshape(shape))
    if case.policy == "stochastic":
        named["uniform"] = mx.array(uniform.reshape(shape))
    return Call((packed, scales, biases, *factors, 1.25), named, groups, uniform)


def hostile_groups(grid: Grid, count: int, random: np.random.Generator) -> Groups:
    """Groups as mx.quantize makes them, and where there are enough some that it never would."""
    values = random.standard_normal((count, grid.group_size)).astype(np.float32) * 0.02
    for kind, group in enumerate(random.permutation(count)[: count // 2]):
        if kind % 8 == 0:
            values[group] = -np.abs(values[group]) - 0.001
        elif kind % 8 == 1:
            values[group] = 0.5
        elif kind % 8 == 2:
            values[group] = 0.0
        elif kind % 8 == 3:
            values[group] *= 1e-4
    made = affine.quantize(affine.round_to(values, grid.dtype), grid.bits, grid.dtype)
    codes, scales, biases = made
    for kind, group in enumerate(random.permutation(count)[: count // 2]):
        if kind % 8 == 4:
            codes[group] = random.integers(0, 1 << grid.bits, grid.group_size)
        elif kind % 8 == 5:
            codes[group] = random.integers(0, 1 << grid.bits)
        elif kind % 8 == 6:
            scales[group] = 0.0
        elif kind % 8 == 7 and grid.dtype == "F16":  # a subnormal scale: not all halvings are exact
            scales[group] = np.float16(2.0**-24 * random.integers(1, 1024))
    return Groups(codes, scales, biases, grid.bits, grid.dtype)


def hostile_delta(groups: Groups, size: float, random: np.random.Generator) -> np.ndarray:
    """A delta of `size` steps; in some groups exact ties, zeros, or far beyond the grid."""
    steps = np.abs(groups.scales)[:, None]
    shape = groups.codes.shape
    delta = random.standard_normal(shape).astype(np.float32) * (np.float32(size) * steps)
    for kind, group in enumerate(random.permutation(shape[0])[: shape[0] // 2]):
        halves = random.integers(-5, 5, shape[1]).astype(np.float32) + np.float32(0.5)
        if kind % 4 == 0:  # a half step, rounded: at, just above or just below a tie
            delta[group] = halves * groups.scales[group]
        elif kind % 4 == 1:
            delta[group] = 0.0
        elif kind % 4 == 2:  # quotients of millions: the way of plain divisions
            delta[group] *= np.float32(2.0**12 if groups.dtype == "F16" else 2.0**22)
        elif kind % 4 == 3:
            delta[group] = 0.001
    return delta


def new_widths(policy: str, bits: int) -> list[int | None]:
    """The widths that a policy may go to."""
    if policy == "promote":
        return [wide for wide in PROMOTED_BITS if wide > bits]
    return [None, *affine.BITS] if policy == "refit" else [None]


def reference_cases(every: int = 1) -> Iterator[Case]:
    """Every grid, policy and width; or of these a part in which each policy meets each grid, and
    each width each number of bits.
    """
    for place, grid in enumerate(GRIDS):
        found = [
            Case(grid, policy, wide, source=("dense", "rounded")[n % 2], control=n % 3 == 0)
            for policy in POLICIES
            for n, wide in enumerate(new_widths(policy, grid.bits))
        ]
        yield from (case for n, case in enumerate(found) if (n + place) % every == 0)


def kernel_cases(grids_of_policy: dict[str, list[Grid]]) -> Iterator[Case]:
    """Grids of each policy, with the other choices taken in turn."""
    for policy, grids in grids_of_policy.items():
        for number, grid in enumerate(grids):
            widths = new_widths(policy, grid.bits)
            if widths:
                shape = KERNEL_SHAPES[number % len(KERNEL_SHAPES)]
                if shape[1] % grid.group_size:
                    shape = (shape[0], 256)
                source = "rounded" if policy in ("refit", "nearest") and number % 3 else "dense"
                control = policy == "refit" and number % 2 == 0
                yield Case(grid, policy, widths[number % len(widths)], shape, source, control)


FIRST_CASES = list(
    kernel_cases({policy: third_of_the_grids(i) for i, policy in enumerate(POLICIES)})
)
# All grids and widths of all policies, for the soak.
ALL_CASES = [
    Case(case.grid, case.policy, case.new_bits, ((6,), 384), case.source, case.control)
    for case in reference_cases()
]
_SOME = {grid.bits: grid for grid in third_of_the_grids(1)}
LORA_CASES = [
    Case(_SOME[4], "keep", None, ((12,), 640), "lora", rank=17),
    Case(_SOME[3], "keep", None, ((5,), 384), "lora", rank=1, lora_dtype=mx.bfloat16),
    Case(_SOME[5], "nearest", None, ((2, 6), 256), "lora", rank=3, lora_dtype=mx.float16),
    Case(_SOME[3], "promote", 4, ((256, 2), 128), "lora", rank=8, lora_dtype=mx.bfloat16),
    Case(_SOME[4], "promote", 8, ((256, 1), 128), "lora", rank=3),
    Case(_SOME[6], "refit", None, ((3, 4), 384), "lora", control=True, rank=8),
    Case(_SOME[8], "stochastic", None, ((63,), 128), "lora", rank=256),
    Case(_SOME[2], "refit", 4, ((2, 2, 4), 256), "lora", rank=2, lora_dtype=mx.float16),
]
