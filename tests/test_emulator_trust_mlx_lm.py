"""The emulator's trust, first part: kernels of mlx-lm, which nobody here wrote, give right numbers.

    python -m pytest tests/test_emulator_trust_mlx_lm.py

Every case runs the installed module's own launcher with the emulator in the place of
`mx.fast.metal_kernel`, and compares with NumPy in float64 or with mlx-lm's path without kernels.
The same calls go through the lint, and their text is compared with what MLX prints.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator.lint import compiler_missing, lint
from tests.emulator.third_party import Recorder, as_if_on_metal, printed_by_mlx
from tests.emulator.third_party_cases import CASES, RACING, Pairs, exact
from tests.metal_emulator import (
    VARIANTS,
    Variant,
    generated_text,
    metal_kernel,
    unavailable,
    variant,
)

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}

# Largest difference allowed, as a share of the largest value of the reference.
# float32: eight roundings of 2^-24. The longest sums add some 40 numbers one after another, whose
# errors partly cancel; measured 4.2e-7 at most.
# 16-bit types: the kernels add up in float32 and round at the store, and some round a norm or a
# factor before it: two roundings of 2^-11 or 2^-8. Measured 1.3 of them.
TOLERANCES = {mx.float32: 8 * 2.0**-24, mx.float16: 2 * 2.0**-11, mx.bfloat16: 2 * 2.0**-8}


def largest_error(pairs: Pairs) -> float:
    """The largest difference of any pair as a share of its reference's largest value."""
    worst = 0.0
    for got, wanted in pairs:
        values = exact(got)
        assert values.shape == wanted.shape
        assert np.isfinite(values).all()  # what no thread wrote is NaN, or a large number
        worst = max(worst, float(np.abs(values - wanted).max() / np.abs(wanted).max()))
    return worst


def run(name: str, dtype: mx.Dtype) -> tuple[Pairs, Recorder]:
    recorder = Recorder(metal_kernel)
    with as_if_on_metal(recorder):
        pairs = CASES[name](np.random.default_rng(20), dtype)
    assert recorder.calls
    return pairs, recorder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_agrees_with_its_reference(
    name: str, dtype: str, record_property: Callable[[str, object], None]
) -> None:
    error = largest_error(run(name, DTYPES[dtype])[0])
    record_property("largest_error", f"{error:.2g}")
    assert error < TOLERANCES[DTYPES[dtype]]


@pytest.mark.parametrize("name", CASES)
def test_no_variant_changes_more_than_roundings(name: str) -> None:
    """Lane orders, poison, guard pages, traps, contraction, flushing, orders of simd_sum."""
    for chosen in VARIANTS:
        with variant(chosen):
            assert largest_error(run(name, mx.float32)[0]) < TOLERANCES[mx.float32], str(chosen)


@pytest.mark.parametrize("name", CASES)
def test_the_lint_is_silent_and_the_text_is_the_one_that_mlx_prints(name: str) -> None:
    recorder = run(name, mx.bfloat16)[1]
    for kernel, arguments in recorder.calls:
        text = recorder.texts[kernel]
        generated = generated_text(metal_kernel(**text), **arguments)
        assert generated == printed_by_mlx(text, arguments)
        found = lint(
            text["header"],
            text["source"],
            ours=False,
            input_names=text["input_names"],
            inputs=arguments["inputs"],
            generated=generated,
        )
        assert found == []


def test_the_lint_had_its_compiler_here() -> None:
    """Without clang half of the lint is missing; that is said, not passed over."""
    if (reason := compiler_missing()) is not None:
        pytest.skip(reason)


# --- promises about bits -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
def test_gated_delta_kernels_keep_mlx_lms_promise_about_bits(chosen: Variant, dtype: str) -> None:
    """The packed kernel equals the one with a written-out tree on any device.

    Where simd_sum adds neighbours first, as on today's GPUs, so does the plain kernel.
    """
    with variant(chosen):
        plain, tree, packed = (
            [exact(got) for got, _ in run(name, DTYPES[dtype])[0]]
            for name in ("gated_delta", "gated_delta_tree", "gated_delta_packed")
        )
    assert all(map(np.array_equal, tree, packed))
    # The second output is the state, which is float32 in both cases.
    assert np.array_equal(plain[1], tree[1]) == (chosen.reduction == "neighbours")


# --- a race in code that nobody here wrote -------------------------------------------------------

# In mlx_lm.tuner.losses a SIMD group reads the others' maxima from shared memory and, without a
# barrier in between, writes its sums to the same place.
MARK = "// Share the sum_exp across the threadgroup"


def losses(name: str, *, mended: bool) -> tuple[float, list[np.ndarray]]:
    """Largest error and outputs of a loss and its gradient, with or without the missing barrier."""

    def maker(**text: Any) -> Any:
        if MARK not in text["source"]:
            pytest.skip("this mlx-lm has other loss kernels")
        barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        if mended:
            text = {**text, "source": text["source"].replace(MARK, barrier)}
        return metal_kernel(**text)

    with as_if_on_metal(maker):
        pairs = RACING[name](np.random.default_rng(20), mx.float32)
    return largest_error(pairs), [exact(got) for got, _ in pairs]


@pytest.mark.parametrize("name", RACING)
def test_a_race_between_simd_groups_shows(name: str) -> None:
    """The order of the SIMD groups decides what the kernel gives, until the barrier is there."""
    outputs, mended = [], []
    for chosen in VARIANTS[:2]:
        with variant(chosen):
            outputs.append(losses(name, mended=False)[1])
            error, _ = losses(name, mended=True)
            mended.append(error)
    assert not np.array_equal(outputs[0][0], outputs[1][0])
    assert max(mended) < 2e-6, mended
