"""The Metal emulator notices mistakes: planted ones in some variant, each kind with its words.

Run: pytest tests/test_metal_emulator_defects.py
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator import launch, memory
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
    "abort(); out[e] = 1;": (r"thread .* was aborted by the C library \(SIGABRT\)", False),
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


def said(body: str) -> mx.array:
    header = 'extern "C" void abort();\n' if "abort" in body else ""
    options = {"name": "said", "header": header, "grid": 64, "threadgroup": 64}
    return run(X + body, {"x": NUMBERS}, (64,), **options)


@pytest.mark.parametrize("body", SAID)
def test_an_error_says_what_happened(body: str) -> None:
    message, with_traps = SAID[body]
    compiler = find()
    assert compiler is not None
    if with_traps and not (compiler.is_clang and sys.platform == "linux"):
        message = "undefined behaviour"
    for chosen in in_end(with_traps):
        with variant(chosen), pytest.raises(KernelError, match=f"^said: .*{message}"):
            said(body)


# Prints what no error told of.
FAR = """
import gc
import mlx.core as mx
from tests.emulator.small import run
from tests.metal_emulator import VARIANTS, KernelError, variant
BODIES = {
    "read": "out[0] = data[OFFSET(at[0])];",
    "write": "out[0] = data[0]; out[OFFSET(at[0])] = 1.0f;",
    "shared write": "threadgroup float row[32]; row[OFFSET(at[0])] = 1; out[0] = row[0];",
    "shared read": "threadgroup float row[32]; row[1] = 1; out[0] = row[OFFSET(at[0])];",
}
offsets = [int(sign * 2 ** (k / 2)) for k in range(20, 62) for sign in (-1, 1)]
wrapped = [2**32 - 1, 2**32 - 2**20, 2**31, 3 * 2**30]
data = mx.ones((32,))
for what, body in BODIES.items():
    for kind, values in ((mx.int32, offsets), (mx.uint32, wrapped)):
        for value in values:
            given = {"data": data, "at": mx.array([value], kind)}
            options = {"template": [("OFFSET", kind)], "grid": 1, "threadgroup": 1}
            noticed = 0
            for chosen in VARIANTS[:2]:  # one ends memory at a gap, one starts it there
                try:
                    with variant(chosen):
                        run(body, given, (32,), **options)
                except KernelError:
                    noticed += 1
            if not noticed or (abs(value) > 2**20 and noticed < 2):
                print(what, value)
        gc.collect()
print("done")
"""


def test_memory_far_outside_buffers_is_noticed_and_the_process_survives() -> None:
    """Any index of 32 bits, in both directions; in a process of its own, should it not survive."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", FAR]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


def test_far_memory_is_named_after_the_nearest_buffer() -> None:
    for at, message in (
        (2**28, f"{4 * 2**28 - 256} bytes past the end of out"),
        (-(2**28), f"{4 * 2**28} bytes before the start of out"),
    ):
        with pytest.raises(KernelError, match=message):
            run("out[at] = 1;", {"at": mx.array(at)}, (64,), grid=1)


def test_smaller_gaps_where_address_space_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    real = memory._map
    refused = []

    def scarce(size: int, *rest: Any) -> int | None:
        if size > 1 << 29:
            refused.append(size)
            return None
        return real(size, *rest)

    monkeypatch.setattr(memory, "_map", scarce)
    assert run("out[0] = x[1];", {"x": NUMBERS}, (64,), grid=1)[0].item() == 1
    assert len(refused) == 2
    for body in ("out[0] = x[64 + 1000000];", "out[-1000000] = x[0];"):
        with pytest.raises(KernelError, match=r"bytes (past|before)"):
            run(body, {"x": NUMBERS}, (64,), grid=1)
    with pytest.raises(MemoryError):
        run("out[0] = x[0];", {"x": NUMBERS}, (1 << 28,), grid=1)


def test_a_limit_on_address_space_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, gap in ((memory.resource.RLIM_INFINITY, 16 << 30), (100 << 30, 1 << 30), (1, 0)):
        monkeypatch.setattr(memory.resource, "getrlimit", lambda _, n=limit: (n, n))
        area = memory.Area([memory.PAGE] * 3)
        area.close()
        assert area.gap == (gap or memory.PAGE)


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
    bad = [body for body, (_, with_traps) in SAID.items() if not with_traps]
    good = X + "out[e] = simd_sum(x[e]);"
    for chosen in in_end():
        with variant(chosen):
            for body in bad:
                with pytest.raises(KernelError):
                    said(body)
                result = run(good, {"x": NUMBERS}, (64,), grid=64, threadgroup=64)
                assert mx.array_equal(result, mx.array(NUMBERS.reshape(2, 32).sum(1).repeat(32)))
                assert np.float32(1e-40) * np.float32(0.5) > 0
