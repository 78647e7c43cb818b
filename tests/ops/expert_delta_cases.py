"""Arguments for the tests of expert_delta: sizes, layouts, dtypes, dropped gates, empty experts."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlxstacks.ops.expert_delta import expert_delta
from tests.ops.low_rank_checks import dtype_names

SCALE = 1.75


@dataclass(frozen=True)
class Case:
    """Sizes in the letters of ops/expert_delta.py; E=0 means no gates, `active` gates are not 0."""

    tokens: tuple[int, int] = (2, 3)
    choices: int = 2
    M: int = 5
    K: int = 63
    N: int = 100
    R: int = 8
    E: int = 4
    active: int = 2
    layout: str = "shared"  # one x for all choices; "own": one x a choice; "sorted"
    dtype: mx.Dtype = mx.float32
    lora_dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        rows = self.tokens[0] * self.tokens[1] * self.choices
        kinds = dtype_names(self.dtype, self.lora_dtype)
        return (
            f"{self.layout}_{rows}x{self.K}to{self.N}_M{self.M}_R{self.R}_E{self.E}"
            f"of{self.active}_{kinds}"
        )


CASES = [
    Case(),
    Case(layout="own"),
    Case(layout="sorted"),
    Case(E=0),
    Case(E=0, layout="sorted", R=1, K=1, N=1),
    Case(tokens=(1, 1), choices=8, M=256, K=100, N=513, R=24, E=6, active=2),
    Case(tokens=(1, 5), choices=3, M=256, K=257, N=63, R=63, E=63, active=7, layout="own"),
    Case(tokens=(1, 1), choices=1, M=1, K=128, N=31, R=128, E=32, active=1),
    Case(tokens=(1, 2), choices=4, K=33, N=300, R=5, E=1, active=1, layout="sorted"),
]
HALF_CASES = [
    replace(CASES[1], dtype=mx.bfloat16, lora_dtype=mx.bfloat16),
    replace(CASES[2], dtype=mx.float16, lora_dtype=mx.float16),
    replace(CASES[0], dtype=mx.bfloat16, lora_dtype=mx.float32),
    replace(CASES[0], dtype=mx.float32, lora_dtype=mx.float16),
]


@dataclass(frozen=True)
class Arguments:
    """What expert_delta takes, apart from the scale."""

    x: mx.array
    a: mx.array
    b: mx.array
    indices: mx.array
    gates: mx.array | None
    sorted_indices: bool

    def call(self, use_kernel: bool | None = None) -> mx.array:
        return expert_delta(
            self.x,
            self.a,
            self.b,
            self.indices,
            self.gates,
            SCALE,
            self.sorted_indices,
            use_kernel=use_kernel,
        )


def make(case: Case, seed: int = 0) -> Arguments:
    """Random arguments; about half of the base experts, and the first one, are never chosen."""
    random = np.random.default_rng(seed)
    batch, tokens = case.tokens
    allowed = [e for e in range(case.M) if e % 2] or [0]
    indices = random.choice(allowed, (batch, tokens, case.choices))
    lead = (batch, tokens, case.choices if case.layout == "own" else 1, 1)
    x = random.standard_normal((*lead, case.K))
    gates = None
    if case.E:
        gates = random.uniform(0.1, 1, (*lead, case.E))
        order = np.argsort(random.random(gates.shape), axis=-1)
        gates = np.where(order < case.active, gates, 0)
    a = random.standard_normal((case.M, case.R, case.K)) / np.sqrt(case.K)
    b = random.standard_normal((case.M, case.N, case.R)) / np.sqrt(case.R)
    made = Arguments(
        mx.array(x.astype(np.float32)).astype(case.dtype),
        mx.array(a.astype(np.float32)).astype(case.lora_dtype),
        mx.array(b.astype(np.float32)).astype(case.lora_dtype),
        mx.array(indices.astype(np.uint32)),
        None if gates is None else mx.array(gates.astype(np.float32)),
        False,
    )
    return sort(made)[0] if case.layout == "sorted" else made


def sort(arguments: Arguments) -> tuple[Arguments, mx.array]:
    """The sorted layout as mlx-lm's switch layers make it, and the order that undoes it."""
    shape = arguments.indices.shape
    flat = arguments.indices.flatten()
    order = mx.argsort(flat)

    def rows(array: mx.array) -> mx.array:
        whole = mx.broadcast_to(array, (*shape, *array.shape[-2:]))
        return whole.reshape(flat.size, *array.shape[-2:])[order]

    gates = None if arguments.gates is None else rows(arguments.gates)
    made = replace(
        arguments, x=rows(arguments.x), gates=gates, indices=flat[order], sorted_indices=True
    )
    return made, mx.argsort(order)
