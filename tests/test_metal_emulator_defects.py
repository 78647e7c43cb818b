"""The Metal emulator notices mistakes: planted ones in some variant, each kind with its words.

Run: pytest tests/test_metal_emulator_defects.py
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator import launch
from tests.emulator.compiler import find
from tests.emulator.planted import PLANTED, Planted
from tests.emulator.small import call_of, run
from tests.metal_emulator import (
    VARIANTS,
    Kernel,
    KernelError,
    Variant,
    models_contraction,
    prepare,
    unavailable,
    variant,
)

X = "uint e = thread_position_in_grid.x;\n"
NUMBERS = np.arange(64, dtype=np.float32)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Skips without a compiler; else compiles all planted kernels, several to an object."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    prepare([call(planted, body) for planted in PLANTED for body in (planted.right, planted.wrong)])


def call(planted: Planted, body: str) -> tuple[Kernel, dict[str, Any]]:
    return call_of(
        body,
        planted.given,
        planted.expected.shape,
        planted.dtype,
        name=re.sub(r"\W", "_", planted.name),
        header=planted.header,
        grid=planted.grid,
        threadgroup=planted.threadgroup,
    )


def outcome(planted: Planted, body: str) -> str:
    """What a launch in the current variant does: "right", "other values" or "error"."""
    kernel, arguments = call(planted, body)
    try:
        result = np.array(kernel(**arguments)[0])
    except KernelError:
        return "error"
    return "right" if np.array_equal(result, planted.expected) else "other values"


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_mistake_is_noticed(planted: Planted) -> None:
    if planted.needs_fma and not models_contraction():
        pytest.skip("this compiler or processor fuses nothing")
    compiler = find()
    if planted.needs_clang and not (compiler and compiler.is_clang):
        pytest.skip("g++ may merge calls in two branches into one")
    right, wrong = [], []
    for chosen in VARIANTS:
        with variant(chosen):
            right.append(outcome(planted, planted.right))
            wrong.append(outcome(planted, planted.wrong))
    assert set(right) == {"right"}, right
    assert set(wrong) != {"right"}, wrong


def test_no_variant_is_superfluous() -> None:
    """Every value of every option occurs, and kernels need two compilations at most."""
    for option in ("lane_order", "poison", "guard", "reduction"):
        seen = {getattr(v, option) for v in VARIANTS}
        assert len(seen) == (3 if option in ("lane_order", "reduction") else 2)
    for option in ("contraction", "flush", "traps"):
        assert {getattr(v, option) for v in VARIANTS} == {False, True}
    assert len({(v.contraction, v.traps) for v in VARIANTS}) == 2
    assert len({str(v) for v in VARIANTS}) == len(VARIANTS)


def in_end(traps: bool = False) -> Iterator[Variant]:
    return (v for v in VARIANTS if v.guard == "end" and v.traps == traps)


# Body, what the error says, and whether only a variant with traps says it.
SAID = {
    "out[e] = x[e + 1];": (r"thread \(63, 0, 0\).* 0 bytes past the end of x \(256 bytes\)", False),
    "out[e + 2] = 1;": (r"past the end of out", False),
    "((device float*)x)[e] = 1;": (r"byte \d+ of x, which is read-only", False),
    "device float* p = nullptr; out[e] = p[e];": ("near no buffer", False),
    "float a[20000]; for (int i = 0; i < 20000; i++) a[i] = x[e] * i; out[e] = a[int(x[e])];": (
        "outside the thread's stack",
        False,
    ),
    "threadgroup float a[60]; threadgroup float* p = a; p[e] = 1;": (
        "beside a threadgroup array",
        False,
    ),
    "if (e < 5u) out[e] = simd_sum(1);": (
        r"divergence: .*simd_sum \(said, line 2\)",
        False,
    ),
    "if (e < 32u) threadgroup_barrier(mem_flags::mem_none); out[e] = 1;": (
        r"divergence: .*the end of the kernel, .*threadgroup_barrier \(said, line 2\)",
        False,
    ),
    "out[e] = simd_shuffle_xor(x[e], ushort(e & 1u));": (
        r"simd_shuffle_xor \(said, line 2\) with different arguments",
        False,
    ),
    "int z = 2147483647; z += int(x[e]) + 1; out[e] = z;": ("overflow in an addition", True),
    "out[e] = 1u << (32u + e);": ("shift", True),
    "out[e] = int(1e20f + x[e]);": ("float that does not fit", True),
    "float a[4] = {1, 2, 3, 4}; out[e] = a[e];": ("index outside an array", True),
    "out[e] = ((const device float4*)(x + 1))[e / 16u].x;": ("not aligned", True),
    "int z = int(x[e]) - int(e); out[e] = 5 / z;": ("division by zero", True),
}


@pytest.mark.parametrize("body", SAID)
def test_an_error_says_what_happened(body: str) -> None:
    message, with_traps = SAID[body]
    compiler = find()
    assert compiler is not None
    if with_traps and not (compiler.is_clang and sys.platform == "linux"):
        message = "undefined behaviour"
    for chosen in in_end(with_traps):
        with variant(chosen), pytest.raises(KernelError, match=f"^said: .*{message}"):
            run(X + body, {"x": NUMBERS}, (64,), name="said", grid=64, threadgroup=64)


def test_a_write_beside_an_output_is_noticed_without_a_guard_page() -> None:
    body = X + "out[e] = 1; if (e == 63u) out[64 + 5] = 1;"
    for chosen in VARIANTS:
        with variant(chosen), pytest.raises(KernelError, match="past the end of out"):
            run(body, {"x": NUMBERS}, (64,), grid=64, threadgroup=64)


def test_a_loop_without_an_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LONGEST_MS", 50)
    with pytest.raises(KernelError, match=r"still ran after 0.05 s"):
        run(X + "while (out[e] != 5.0f) out[e] = x[e] + 1e6f;", {"x": NUMBERS}, (32,))


def test_after_an_error_kernels_run_as_before() -> None:
    """Signals, stacks and the processor's float mode are as they were."""
    bad = [X + body for body, (_, with_traps) in SAID.items() if not with_traps]
    good = X + "out[e] = simd_sum(x[e]);"
    for chosen in in_end():
        with variant(chosen):
            for body in bad:
                with pytest.raises(KernelError):
                    run(body, {"x": NUMBERS}, (64,), name="said", grid=64, threadgroup=64)
                result = run(good, {"x": NUMBERS}, (64,), grid=64, threadgroup=64)
                assert mx.array_equal(result, mx.array(NUMBERS.reshape(2, 32).sum(1).repeat(32)))
                assert np.float32(1e-40) * np.float32(0.5) > 0
