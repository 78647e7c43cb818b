"""MLX arrays as bytes with strides, and back: NumPy has no bfloat16, so bits travel."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from tests.emulator.memory import bytes_at

_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


@dataclass(frozen=True)
class Input:
    """An input as a kernel gets it: its bytes, and where element (0, 0, ...) is among them.

    strides: in elements. `origin`: in bytes; not 0 where a stride is negative.
    """

    bytes: np.ndarray
    origin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(array: mx.array, contiguous: bool = True) -> "Input":
        """contiguous: copy an array that is not row-contiguous, as MLX does when asked to."""
        bits = _bits(array)
        if contiguous or bits.flags.c_contiguous:
            bits = np.ascontiguousarray(bits).reshape(array.shape)
        width = array.dtype.size
        strides = tuple(stride // width for stride in bits.strides)
        if bits.size == 0:
            return Input(np.zeros(0, np.uint8), 0, array.shape, strides)
        reach = [(n - 1) * stride for n, stride in zip(array.shape, bits.strides, strict=True)]
        before = -sum(r for r in reach if r < 0)
        extent = before + sum(r for r in reach if r > 0) + width
        # All bytes between the first and the last element, those that no element uses included.
        low = bits.__array_interface__["data"][0] - before
        whole = bytes_at(low, extent).copy()
        return Input(whole, before, array.shape, strides)


def _bits(array: mx.array) -> np.ndarray:
    if array.ndim == 0:
        return _bits(array.reshape(1)).reshape(())
    return np.asarray(array.view(_BITS[array.dtype.size]))


def to_array(content: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array of `dtype` and `shape` with a copy of these bytes."""
    if content.size == 0:
        return mx.zeros(shape, dtype)
    bits = mx.array(content.view(f"uint{8 * dtype.size}"))
    return bits.view(dtype).reshape(shape)
