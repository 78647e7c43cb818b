"""Comparisons that the tests of expert_delta and stack_sum share."""

import mlx.core as mx
import numpy as np

from tests.cases import MX_DTYPES, TOLERANCES

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
