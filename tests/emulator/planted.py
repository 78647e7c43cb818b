"""Kernels with a planted mistake, each beside the kernel without it.

`right` gives `expected` in every variant; `wrong` differs in one place, and some variant has to
notice: by an error, or by another result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

_E = "uint e = thread_position_in_grid.x; uint l = thread_index_in_threadgroup;\n"
_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_X = np.arange(1, 65, dtype=np.float32)
_RANDOM = np.random.default_rng(5).normal(size=64).astype(np.float32)
_THIRDS = np.array([i / 3 for i in range(64)], np.float32)


@dataclass(frozen=True)
class Planted:
    """replace: the part of `right` that is wrong in the other kernel, and what is in its place."""

    name: str
    right: str
    replace: tuple[str, str]
    expected: np.ndarray
    given: Mapping[str, Any] = field(default_factory=lambda: {"x": _X})
    dtype: mx.Dtype = mx.float32
    grid: int = 64
    threadgroup: int = 64
    header: str = ""
    needs_fma: bool = False
    needs_clang: bool = False

    @property
    def wrong(self) -> str:
        assert self.right.count(self.replace[0]) == 1, self.name
        return self.right.replace(*self.replace)


_TURN = f"""{_E}threadgroup float row[64];
row[l] = x[e];
{_BARRIER}
out[e] = row[63 - l];"""

_TO_THE_RIGHT = f"""{_E}threadgroup float row[64];
row[l] = x[e];
{_BARRIER}
out[e] = row[l < 32 ? l : l - 32];"""

_TWICE = f"""{_E}threadgroup float row[64];
row[l] = x[e];
{_BARRIER}
float first = row[63 - l];
/* again */ {_BARRIER}
row[l] = 2 * x[e];
{_BARRIER.replace("(", "( ")}
out[e] = first + row[63 - l];"""

_CODES = """uint e = thread_position_in_grid.x;
float s = x[e];
for (ushort mask = 1; mask < 32; mask <<= 1) s += simd_shuffle_xor(s, mask);
out[e] = rint(s * 4194304.0f);"""


def _tree(values: np.ndarray) -> np.ndarray:
    halves = []
    for tree in np.split(values, 2):
        while tree.size > 1:
            tree = tree[::2] + tree[1::2]
        halves.append(tree.repeat(32))
    return np.rint(np.concatenate(halves) * np.float32(4194304))


PLANTED = [
    Planted("missing barrier", _TURN, (_BARRIER, ""), _X[::-1]),
    Planted(
        "missing barrier, seen in one order only",
        _TO_THE_RIGHT,
        (_BARRIER, ""),
        np.tile(_X[:32], 2),
    ),
    Planted("missing barrier before reuse", _TWICE, ("/* again */ " + _BARRIER, ""), 3 * _X[::-1]),
    Planted(
        "missing barrier inside a SIMD group",
        f"{_E}threadgroup float row[64]; row[l] = x[e]; simdgroup_barrier(mem_flags::mem_none);"
        "out[e] = row[l ^ 1];",
        ("simdgroup_barrier(mem_flags::mem_none);", ""),
        _X[np.arange(64) ^ 1],
    ),
    Planted(
        "bound test off by one",
        f"{_E}if (e < 50u) out[e] = x[e];",
        ("<", "<="),
        _X[:50],
    ),
    Planted("no bound test", f"{_E}if (e < 50u) out[e] = 1;", ("if (e < 50u)", ""), np.ones(50)),
    Planted(
        "read past the end",
        f"{_E}out[e] = x[e] + (e < 63u ? x[e + 1] : 0);",
        ("e < 63u", "e < 64u"),
        _X + np.append(_X[1:], 0),
    ),
    Planted(
        "read before the start",
        f"{_E}out[e] = e > 0u ? x[int(e) - 1] : 0;",
        ("e > 0u", "e >= 0u"),
        np.append(0, _X[:-1]),
    ),
    Planted(
        "an element left unwritten",
        f"{_E}if (e < 64u) out[e] = 0;",
        ("e < 64u", "e < 63u"),
        np.zeros(64),
    ),
    Planted(
        "a code left unwritten",
        f"{_E}if (e < 64u) out[e] = 255;",
        ("e < 64u", "e < 63u"),
        np.full(64, 255, np.uint8),
        dtype=mx.uint8,
    ),
    Planted(
        "uninitialised sum",
        f"{_E}float s[2] = {{0, 0}}; for (uint i = 0; i <= e; i++) s[i & 1] += x[i];"
        "out[e] = s[0] + s[1];",
        (" = {0, 0}", ""),
        np.cumsum(_X),
    ),
    Planted(
        "uninitialised threadgroup element",
        f"{_E}threadgroup float row[64]; if (l < 64u) row[l] = 1; {_BARRIER}"
        "float s = 0; for (int i = 0; i < 64; i++) s += row[i]; out[e] = s;",
        ("l < 64u", "l < 63u"),
        np.full(64, 64.0),
    ),
    Planted(
        "a SIMD group returns before a barrier",
        f"{_E}if (l >= 64u) return; {_BARRIER} out[e] = 1;",
        ("l >= 64u", "l >= 32u"),
        np.ones(64),
    ),
    Planted(
        "lanes return before a sum",
        f"{_E}if (e >= 64u) return; out[e] = simd_sum(1);",
        ("e >= 64u", "e >= 62u"),
        np.full(64, 32.0),
    ),
    Planted(
        "lane operation in a branch",
        f"{_E}float y = simd_shuffle_xor(x[e], 1); out[e] = l % 3 ? y : x[e];",
        ("float y = simd_shuffle_xor(x[e], 1); out[e] = l % 3 ? y : x[e];",
         "if (l % 3) out[e] = simd_shuffle_xor(x[e], 1); else out[e] = x[e];"),
        np.where(np.arange(64) % 3, _X[np.arange(64) ^ 1], _X),
    ),
    Planted(
        "one helper in two branches",
        f"{_E}float y = beside(e < 40u ? x[e] : -x[e]); out[e] = y;",
        ("float y = beside(e < 40u ? x[e] : -x[e]);",
         "float y; if (e < 40u) y = beside(x[e]); else y = beside(-x[e]);"),
        np.where(np.arange(64) < 40, _X, -_X)[np.arange(64) ^ 1],
        header="inline float beside(float v) { return simd_shuffle_xor(v, 1); }\n",
        needs_clang=True,
    ),
    Planted(
        "codes from a sum in the hardware's order",
        _CODES,
        ("for (ushort mask = 1; mask < 32; mask <<= 1) s += simd_shuffle_xor(s, mask);",
         "s = simd_sum(s);"),
        _tree(_RANDOM),
        given={"x": _RANDOM},
    ),
    Planted(
        "codes that a fused operation changes",
        "#pragma METAL fp contract(off)\n" + f"{_E}out[e] = x[e] * x[e] - y[e];",
        ("#pragma METAL fp contract(off)\n", ""),
        np.zeros(64),
        given={"x": _THIRDS, "y": _THIRDS * _THIRDS},
        needs_fma=True,
    ),
    Planted(
        "codes that need subnormal values",
        f"{_E}out[e] = x[e] * 0.0f == 0.0f ? 1 : 2;",
        ("x[e] * 0.0f == 0.0f", "x[e] * 1e-39f == 0.0f"),
        np.ones(64),
    ),
    Planted(
        "signed overflow",
        f"{_E}out[e] = uint(e * 99999999u) % 7u;",
        ("uint(e * 99999999u)", "uint(int(e) * 99999999)"),
        (np.arange(64, dtype=np.uint64) * 99999999 % 2**32 % 7).astype(np.float32),
    ),
    Planted(
        "mask of a whole word",
        f"{_E}uint bits = 31u + (e > 64u); out[e] = float(((1u << bits) - 1u) >> 24);",
        ("e > 64u", "e > 62u"),
        np.full(64, 127.0),
    ),
    Planted(
        "negative float to unsigned",
        f"{_E}out[e] = uint(int(1.5f - x[e])) >> 31;",
        ("uint(int(1.5f - x[e]))", "uint(1.5f - x[e])"),
        (_X >= 3).astype(np.float32),
    ),
    Planted(
        "write to an input",
        f"{_E}out[e] = x[e];",
        ("out[e] = x[e];", "out[e] = x[e]; ((device float*)x)[e] = 0;"),
        _X,
    ),
    Planted(
        "the last threadgroup taken for a full one",
        f"{_E}out[e] = float(threads_per_threadgroup.x);",
        ("threads_per_threadgroup.x", "dispatch_threads_per_threadgroup.x"),
        np.array([64.0] * 64 + [6.0] * 6),
        grid=70,
    ),
    Planted(
        "a sum in device memory without atomics",
        f"{_E}if (e == 0u) {{ out[0] = 0; for (int i = 0; i < 64; i++) out[0] += x[i]; }}",
        ("if (e == 0u) { out[0] = 0; for (int i = 0; i < 64; i++) out[0] += x[i]; }",
         "if (l == 0u && e == 0u) out[0] = 0; out[0] += x[e];"),
        np.array([_X.sum()]),
    ),
    Planted(
        "misaligned vector",
        f"{_E}if (e < 16u) out[e] = ((const device float4*)(x + 0))[e].y;",
        ("x + 0", "x + 1"),
        _X[1::4],
    ),
    Planted(
        "a lane that is not there",
        f"{_E}float y = simd_shuffle_down(x[e], 1); out[e] = e == 39u ? 0 : y;",
        ("e == 39u", "e == 31u"),
        np.where(np.arange(40) == 39, 0, np.where(np.arange(40) == 31, _X[31], _X[1:41])),
        grid=40,
    ),
    Planted(
        "an index outside a local array",
        f"{_E}float a[4] = {{1, 2, 3, 4}}; out[e] = a[e % 4u];",
        ("e % 4u", "e % 5u"),
        np.tile([1.0, 2, 3, 4], 16),
    ),
    Planted(
        "a loop of unequal length",
        f"{_E}float s = 0; for (uint i = 0; i < 4u; i++) s += simd_sum(1.0f); out[e] = s;",
        ("i < 4u", "i < 4u + (e > 60u)"),
        np.full(64, 128.0),
    ),
    Planted(
        "lanes shuffle by different masks",
        f"{_E}out[e] = simd_shuffle_xor(x[e], ushort(1));",
        ("ushort(1)", "ushort(1 + e / 16u % 2u)"),
        _X[np.arange(64) ^ 1],
    ),
]  # fmt: skip
