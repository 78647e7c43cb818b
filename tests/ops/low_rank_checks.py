"""What the tests of expert_delta and stack_sum share: comparisons, and the lint of a launch."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks.ops import kernels
from tests.cases import MX_DTYPES, TOLERANCES
from tests.metal_emulator import generated_text, lint, metal_kernel

NAMES = {dtype: name.lower() for name, dtype in MX_DTYPES.items()}


def wide(array: mx.array) -> np.ndarray:
    """float64 copy."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def assert_close(got: mx.array, wanted: np.ndarray, dtype: mx.Dtype) -> None:
    """The same shape, the dtype asked for, and values within its tolerance."""
    rtol, atol = TOLERANCES[dtype]
    assert got.dtype == dtype
    assert got.shape == wanted.shape
    np.testing.assert_allclose(wide(got), wanted, rtol=rtol, atol=atol)


def dtype_names(*dtypes: mx.Dtype) -> str:
    """Part of the name of a case."""
    return "_".join(NAMES[dtype] for dtype in dtypes)


def problems_of_launches(work: Callable[[], object]) -> list[str]:
    """What Apple's or CUDA's compiler would refuse in the launches of `work`, which do not run.

    Raises: AssertionError when `work` launches nothing.
    """
    found: list[str] = []
    launches = 0

    def maker(name: str, **made: Any) -> Callable[..., list[mx.array]]:
        kernel = metal_kernel(name, **made)

        def call(**launch: Any) -> list[mx.array]:
            nonlocal launches
            launches += 1
            found.extend(
                lint(
                    made["header"],
                    made["source"],
                    ours=True,
                    input_names=made["input_names"],
                    inputs=launch["inputs"],
                    generated=generated_text(kernel, **launch),
                )
            )
            outputs = zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in outputs]

        return call

    with kernels.substitute("lint", maker):
        work()
    assert launches, "no kernel was launched"
    return found
