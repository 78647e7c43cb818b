"""The lint notices a planted violation of every rule, and nothing in code that keeps them.

    python -m pytest tests/test_emulator_lint.py

That it is silent on kernels which nobody here wrote is checked in test_emulator_trust_mlx_lm.py.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.ops import kernels
from mlxstacks.ops.affine import BITS
from mlxstacks.ops.dequant import dequant
from mlxstacks.ops.expert_delta import expert_delta
from mlxstacks.ops.kernels import kernel_text
from mlxstacks.ops.policies import POLICIES
from mlxstacks.ops.requant import requant
from mlxstacks.ops.stack_sum import stack_sum
from mlxstacks.resources import resource_dir
from tests.cases import MX_DTYPES, Grid
from tests.emulator.lint import compile_problems, compiler_missing, lint
from tests.emulator.third_party import Recorder, printed_by_mlx
from tests.metal_emulator import generated_text, metal_kernel, unavailable

STEMS = sorted(path.stem for path in resource_dir("kernels").iterdir() if path.suffix == ".metal")

# (planted in a body, words of the problem)
PLANTED_IN_TEXT = [
    ("float scale = 1.0;", "1.0: a double"),
    ("float scale = value * .5;", ".5: a double"),
    ("float eps = 1e-5;", "1e-5: a double"),
    ("float eps = 3.25E+2;", "3.25E+2: a double"),
    ("float eps = 0x1.8p-3;", "0x1.8p-3: a double"),
    ("double sum = 0.0f;", "double: Metal has no such type"),
    ("auto twice = [](float value) { return 2.0f * value; };", "a lambda"),
    ("auto more = [&, scale](float value) -> float { return scale * value; };", "a lambda"),
    ("if constexpr (BITS == 3) { total = 0u; }", "if constexpr"),
    ("float root = metal::sqrt(value);", "metal:: in a body"),
    ("device float* row = result + 3;", "an address space in a body"),
    ("const device uchar* row = packed;", "an address space in a body"),
    ("threadgroup float shared[32];", "an address space in a body"),
    ("float total = simd_sum(value);", "a SIMD function in a body"),
    ("threadgroup_barrier(mem_flags::mem_threadgroup);", "a Metal barrier in a body"),
    ("uint bits = as_type<uint>(value);", "as_type in a body"),
    ('#include "affine.h"\n', "#include in a body"),
    ("uint new_packed_shape = 3u;", "new_packed_shape makes MLX pass packed_shape"),
    ("// the unpacked_strides of a row\n", "unpacked_strides makes MLX pass packed_strides"),
    ("uint half_grid_size = 2u;", "half_grid_size makes MLX pass the attribute grid_size"),
    ("uint grid_size = 2u;", "a local named grid_size"),
]

CLEAN = """
    // A row of double width, read through device memory: 1.0 and simd_sum in words, not in code.
    constexpr int R = GROUP / 32;
    uint row = thread_position_in_grid.x / 32u;
    uint lane = thread_index_in_simdgroup;
    auto codes = packed + row * packed_shape[1];
    float total = 0.0f + 1e-5f + .5f + 0x1p-3f + 3e2f;
    for (uint i = 0u; i < 0x1Fu; ++i) { total = add_rn(total, float(codes[i])); }
    uint three = uint3(1u, 2u, 3u).z;
    float most = max(total, 1.0f);
    if (lane == 0u && row < 4u) { result[row] = T(most) * T(three); }
"""


@pytest.mark.parametrize(("planted", "problem"), PLANTED_IN_TEXT)
def test_a_planted_violation_is_named(planted: str, problem: str) -> None:
    body = CLEAN + planted
    found = lint("", body, ours=True, input_names=["packed"])
    assert len(found) == 1, found
    assert problem in found[0]


def test_code_that_keeps_the_rules_is_clean() -> None:
    assert lint("", CLEAN, ours=True, input_names=["packed"], inputs=[mx.zeros((2, 8))]) == []


def test_a_problem_is_found_in_the_header_too() -> None:
    assert lint("inline float half_of(float a) { return a * 0.5; }", "", ours=True) == [
        "header:1: 0.5: a double in C++ and CUDA; write 0.5f"
    ]


def test_inputs_without_axes_and_with_short_names_are_named() -> None:
    found = lint("", "", ours=True, input_names=["x", "eps"], inputs=[mx.zeros(3), 1.0])
    assert len(found) == 2
    assert "input x: too short" in found[0]
    assert "input eps is 0-d" in found[1]


def test_only_kernels_of_ours_have_to_serve_cuda() -> None:
    body = "device float* row = result; float total = metal::simd_sum(row[0]) * 0.5;"
    assert lint("", body, ours=False) == []


# --- the compiler's part -------------------------------------------------------------------------

needs_clang = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))

# Inputs: `small` (7 values) is in constant space, `large` (9 values) in device space.
PLANTED_FOR_THE_COMPILER = {
    "device_pointer_to_a_small_input": "const device float* row = small;",
    "pointer_without_a_space": "const float* row = large;",
    "pointer_to_an_output_without_a_space": "T* row = out;",
    "input_written": "large[0] = 1.0f;",
    "spaces_mixed_in_a_choice": "auto row = lane > 3u ? large : small;",
    "wrong_space_given_to_a_helper": "out[0] = first_of(small);",
    "max_of_two_types": "out[0] = max(out[1], 3);",
    "min_of_signed_and_unsigned": "uint least = min(lane, 3);",
    "simd_sum_of_64_bits": "ulong total = simd_sum(ulong(lane));",
    "function_that_metal_lacks": "out[0] = erf(out[1]);",
    "shared_memory_in_a_block": "if (G > 1) { threadgroup float inner[4]; inner[0] = 1.0f; }",
    "newer_c++": "auto [one, two] = pair();",
    "size_that_no_template_value_gives": "float many[H];",
}

HEADER = """
struct Two { float one; float two; };
inline Two pair() { Two both; both.one = 1.0f; both.two = 2.0f; return both; }
inline float first_of(const device float* row) { return row[0]; }
"""

COMPILED = """
    threadgroup float shared[2][G];
    uint lane = thread_index_in_simdgroup;
    auto first = small + 1;
    T value = static_cast<T>(first_of(large) + first[0] * pair().two + float(F));
    shared[1][lane] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[lane] = static_cast<T>(simd_max(shared[1][0]) + simd_shuffle_xor(float(value), 1));
"""


def _printed(body: str, dtype: mx.Dtype = mx.float32) -> str:
    text: dict[str, Any] = {
        "name": "planted",
        "input_names": ["small", "large"],
        "output_names": ["out"],
        "source": body,
        "header": HEADER,
    }
    arguments: dict[str, Any] = {
        "inputs": [mx.zeros(7), mx.zeros(9)],
        "template": [("T", dtype), ("G", 64), ("F", True)],
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(32,)],
        "output_dtypes": [dtype],
    }
    return printed_by_mlx(text, arguments)


@needs_clang
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_compiler_takes_what_metal_takes(dtype: mx.Dtype) -> None:
    assert compile_problems(_printed(COMPILED, dtype)) == []


@needs_clang
def test_of_texts_compiled_together_each_is_looked_at() -> None:
    planted = _printed(COMPILED + PLANTED_FOR_THE_COMPILER["input_written"] + "\n")
    texts = [_printed(COMPILED), planted, _printed(COMPILED, mx.float16)]
    assert compile_problems(*texts) == compile_problems(planted) != []


@needs_clang
@pytest.mark.parametrize("name", PLANTED_FOR_THE_COMPILER)
def test_the_compiler_refuses_a_planted_violation(name: str) -> None:
    body = COMPILED + PLANTED_FOR_THE_COMPILER[name] + "\n"
    found = compile_problems(_printed(body))
    # Line 1 of the body is the empty one before its first statement.
    assert any(problem.startswith("body:9:") for problem in found), found
    if name != "newer_c++":
        assert lint(HEADER, body, ours=False, generated=_printed(body)) == found


@needs_clang
def test_shared_memory_is_the_kernels_own() -> None:
    header = "inline void helper() { threadgroup float mine[4]; mine[0] = 1.0f; }\n"
    found = compile_problems(header + _printed(COMPILED))
    assert len(found) == 1
    assert found[0].startswith("header:1:")


# --- our own kernels -----------------------------------------------------------------------------


@pytest.mark.parametrize("stem", STEMS)
def test_the_text_of_our_kernels_is_clean(stem: str) -> None:
    header, body = kernel_text(stem, "metal")
    assert lint(header, body, ours=True) == []


def _low_rank(rng: np.random.Generator, grid: Grid) -> None:
    dtype = MX_DTYPES[grid.dtype]
    x = mx.array(rng.standard_normal((5, 128), dtype=np.float32)).astype(dtype)
    a_all, b_all, gates = mx.zeros((24, 128), dtype), mx.zeros((48, 24), dtype), mx.ones((5, 2, 3))
    stack_sum(x, a_all, b_all, gates, 2.0, use_kernel=True)
    a, b = mx.zeros((4, 6, 128), dtype), mx.zeros((4, 40, 6), dtype)
    chosen = mx.array(rng.integers(0, 4, (5, 2)))
    for gate in (None, mx.ones((5, 2, 1, 3))):
        expert_delta(x[:, None, None], a, b, chosen, gate, 2.0, False, use_kernel=True)


def _quantized(rng: np.random.Generator, grid: Grid) -> None:
    weights = mx.array(rng.standard_normal((9, 384), dtype=np.float32))
    options: dict[str, Any] = {"group_size": grid.group_size, "bits": grid.bits}
    packed, scales, biases = mx.quantize(weights.astype(MX_DTYPES[grid.dtype]), **options)
    options["use_kernel"] = True
    dequant(packed, scales, biases, **options)
    a, b = mx.zeros((4, 384)), mx.zeros((9, 4))
    uniform = mx.zeros((9, 384))
    for policy in POLICIES:
        if policy == "promote" and grid.bits == 8:
            continue
        wider = BITS[BITS.index(grid.bits) + 1] if policy == "promote" else None
        options |= {"policy": policy, "new_bits": wider, "delta": None, "control": False}
        options["uniform"] = uniform if policy == "stochastic" else None
        requant(packed, scales, biases, a, b, 2.0, **options)
        options |= {"delta": uniform, "control": policy == "refit"}
        requant(packed, scales, biases, None, None, 2.0, **options)


SOME_GRIDS = [Grid(2, 32, "F16"), Grid(3, 64, "BF16"), Grid(5, 128, "F32"), Grid(8, 64, "BF16")]


@needs_clang
@pytest.mark.parametrize("grid", SOME_GRIDS, ids=str)
def test_every_launch_of_ours_is_clean(grid: Grid) -> None:
    """Text and compiler, with the names, sizes and template values of real launches."""
    recorder = Recorder(_zeros)
    with kernels.substitute("recorder", recorder):
        for launches in (_low_rank, _quantized):
            launches(np.random.default_rng(7), grid)
    generated = {}
    for kernel, arguments in recorder.calls:
        text = recorder.texts[kernel]
        names, inputs = text["input_names"], arguments["inputs"]
        found = lint(text["header"], text["source"], ours=True, input_names=names, inputs=inputs)
        assert found == [], kernel
        generated[generated_text(metal_kernel(**text), **arguments)] = kernel
    assert {kernel.split("_b")[0] for kernel in generated.values()} == set(STEMS)
    assert compile_problems(*generated) == []


def _zeros(**text: Any) -> Any:
    def call(**arguments: Any) -> list[mx.array]:
        outputs = zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    return call


def test_a_compiler_means_that_the_emulator_can_be_built() -> None:
    """A mistake in the emulator's own headers must not turn its tests into skipped ones."""
    assert "cannot build" not in (unavailable() or "")
