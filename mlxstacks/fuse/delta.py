"""The delta of an adapter as weight-space rows, a bounded piece at a time.

Rows are those of the weight with leading axes joined: (N, K) stays, (E, N, K) becomes (E * N, K).
The product is `mx.matmul` on the CPU device over the same operands as in mlx-lm's `fuse` methods
(`mlx_lm/tuner/lora.py`), so that refit can be bit-equal to it. Pieces follow whole matrices up to
`_LARGEST_PRODUCT` weights: a BLAS may round the rows of a partial product differently.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from mlxstacks.files.lora_modules import LoraModule
from mlxstacks.fuse.blocks import MX_DTYPES
from mlxstacks.ops.affine import Array, from_storage, to_storage
from mlxstacks.ops.low_rank import low_rank_delta

_LARGEST_PRODUCT = 1 << 24  # weights, 64 MiB in float32
_SMALLEST_PRODUCT = 1 << 20  # weights; several small experts share a product
_CHAIN_ROWS = 16  # of a product, compared with the chain


def dora_delta(weights: Array, delta: Array, magnitude: Array) -> Array:
    """What DoRA changes: `m / |W + D| * (W + D) - W`, the norm over each row.

    Shapes: weights, delta (rows, K), magnitude (rows,), float32 -> (rows, K) float32.
    """
    made = weights + delta
    norms = np.sqrt(np.einsum("ij,ij->i", made, made, dtype=np.float64)).astype(np.float32)
    factors = np.divide(magnitude, norms, out=np.zeros_like(norms), where=norms > 0)
    np.multiply(made, factors[:, None], out=made)
    return np.subtract(made, weights, out=made)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows first to last (exclusive) of a delta.

    delta: (rows, K) float32, the intended change. rounded: (rows, K) float32, the change as
    mlx-lm casts it to the weight's dtype before adding; None where that is the cast of `delta`
    (float32 adapters), or where nobody asked.
    """

    first: int
    last: int
    delta: Array
    rounded: Array | None


class LowRankDelta:
    """`scale * B @ A` of one adapted module, in rows of its weight.

    module: the adapter's tensors in mlx-lm's layout. kind: "linear", "switch" or "embedding".
    dtype: dtype of the weight's values ("BF16", "F16", "F32").
    zero: use zeros of the same shapes instead of the learned numbers.
    on_device: multiply on the default device instead of the CPU.
    """

    def __init__(
        self,
        module: LoraModule,
        kind: str,
        dtype: str,
        zero: bool = False,
        on_device: bool = False,
    ) -> None:
        self.device = mx.default_device() if on_device else mx.Device(mx.cpu)
        self.kind, self.dtype, self.lora_dtype, self.scale = kind, dtype, module.dtype, module.scale
        a, b = module.lora_a, module.lora_b
        if zero:
            a, b = np.zeros_like(a), np.zeros_like(b)
        # Every kind as left (..., N, R) @ right (..., R, K), with the strides mlx-lm multiplies.
        if kind == "linear":
            self.left, self.right = _Operand(b, transposed=True), _Operand(a, transposed=True)
        elif kind == "switch":
            self.left, self.right = _Operand(b), _Operand(a)
        else:
            self.left, self.right = _Operand(a), _Operand(b)
        shape = self.left.shape
        self.experts = shape[0] if kind == "switch" else 1
        self.rows_per_expert = shape[-2]
        self.width = self.right.shape[-1]

    @property
    def rows(self) -> int:
        return self.experts * self.rows_per_expert

    def pieces(self, with_rounded: bool) -> Iterator[Piece]:
        """All rows in order, in pieces of bounded size. Shapes as in `Piece`."""
        for first, last in self.ranges():
            product = self._product(first, last)
            delta = self._float32(product, first, last)
            # The cast of a float32 product is left to the workers.
            apart = with_rounded and self.lora_dtype != "F32"
            yield Piece(first, last, delta, self._rounded(product) if apart else None)

    def ranges(self) -> list[tuple[int, int]]:
        """Row ranges of the pieces; they depend on the module's shape alone."""
        matrix = self.rows_per_expert * self.width
        if matrix > _LARGEST_PRODUCT:
            per_piece = max(64, _LARGEST_PRODUCT // self.width // 64 * 64)
            starts = [
                expert * self.rows_per_expert + row
                for expert in range(self.experts)
                for row in range(0, self.rows_per_expert, per_piece)
            ]
        else:
            together = max(1, _SMALLEST_PRODUCT // matrix)
            starts = [e * self.rows_per_expert for e in range(0, self.experts, together)]
        return list(zip(starts, [*starts[1:], self.rows], strict=True))

    def sample(self, rows: Array) -> Array:
        """Delta of chosen rows, (len(rows), K) float32, for estimates."""
        experts, within = np.divmod(rows, self.rows_per_expert)
        delta = np.empty((len(rows), self.width), dtype=np.float32)
        for expert in np.unique(experts):
            chosen = experts == expert
            index = int(expert) if self.kind == "switch" else None
            left = self.left.float32(index, self.lora_dtype)[within[chosen]]
            delta[chosen] = left @ self.right.float32(index, self.lora_dtype)
        return np.multiply(delta, np.float32(self.scale), out=delta)

    def product(self, first: int, last: int) -> Array:
        """The intended change of rows that `ranges` names, (last - first, K) float32."""
        return self._float32(self._product(first, last), first, last)

    def operands(self, first: int, last: int) -> tuple[mx.array, mx.array]:
        """Operands of rows first to last: left (..., n, R), right (..., R, K), n rows of an expert;
        of "switch" with an axis of experts, of which these are whole ones or a part of one.
        """
        dtype, n = self.lora_dtype, self.rows_per_expert
        if self.kind != "switch":
            return self.left.rows(first, last, dtype), self.right.whole(dtype)
        low, high = first // n, -(-last // n)
        assert high - low == 1 or first % n == last % n == 0
        left, right = self.left.experts(low, high, dtype), self.right.experts(low, high, dtype)
        return left[:, first - low * n : last - low * n] if high - low == 1 else left, right

    def _product(self, first: int, last: int) -> mx.array:
        left, right = self.operands(first, last)
        left = mx.multiply(self.scale, left, stream=self.device)
        product = mx.matmul(left, right, stream=self.device)
        return product.reshape(last - first, self.width, stream=self.device)

    def _float32(self, product: mx.array, first: int, last: int) -> Array:
        if self.lora_dtype == "F32":
            return np.array(product, copy=False)
        # Half-precision adapters: what was trained is the product of the stored numbers, not its
        # rounding to half precision.
        wide = [x.astype(mx.float32, stream=self.device) for x in self.operands(first, last)]
        exact = mx.matmul(*wide, stream=self.device)
        exact = mx.multiply(self.scale, exact, stream=self.device)
        return np.array(exact.reshape(last - first, self.width, stream=self.device), copy=False)

    def _rounded(self, product: mx.array) -> Array:
        cast = product.astype(MX_DTYPES[self.dtype], stream=self.device)
        return np.array(cast.astype(mx.float32, stream=self.device), copy=False)


@cache
def product_is_chain(
    kind: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...], lora_dtype: str, scale: float
) -> bool:
    """Whether the CPU's product of such a pair is `ops.low_rank.low_rank_delta`, to the bit.

    Shapes as in `LoraModule`. A BLAS with fused multiply-adds sums over the rank in the kernels'
    order (OpenBLAS does; the reference BLAS has none). Judged by random numbers, because an
    expert that was never trained would agree with anything.
    """
    if kind == "switch":  # as many experts as share a product
        per_expert = b_shape[-2] * a_shape[-1]
        experts = min(a_shape[0], max(1, _SMALLEST_PRODUCT // per_expert))
        a_shape, b_shape = (experts, *a_shape[1:]), (experts, *b_shape[1:])
    random = np.random.default_rng(0)
    pair = (random.standard_normal(shape, np.float32) for shape in (a_shape, b_shape))
    lora_a, lora_b = (to_storage(values, lora_dtype) for values in pair)
    delta = LowRankDelta(LoraModule("", lora_a, lora_b, lora_dtype, scale), kind, "F32")
    ranges = delta.ranges()
    for first, last in {ranges[0], ranges[-1]}:
        left, right = delta.operands(first, last)
        rows = np.unique(np.linspace(0, left.shape[-2] - 1, _CHAIN_ROWS, dtype=np.int64))
        chain = np.array(low_rank_delta(right, left[..., mx.array(rows), :], scale))
        product = delta.product(first, last).reshape(-1, left.shape[-2], delta.width)
        if not np.array_equal(product[:, rows], chain.reshape(-1, len(rows), delta.width)):
            return False
    return True


class _Operand:
    """One factor of the product: a stored array, seen as is or with its last axes swapped."""

    def __init__(self, stored: Array, transposed: bool = False) -> None:
        self.stored, self.transposed = stored, transposed

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[::-1] if self.transposed else self.stored.shape

    def float32(self, expert: int | None, dtype: str) -> Array:
        """The factor (of one expert) as a float32 NumPy matrix."""
        values = from_storage(self.stored if expert is None else self.stored[expert], dtype)
        return values.T if self.transposed else values

    def whole(self, dtype: str) -> mx.array:
        values = as_mx(self.stored, dtype)
        return values.T if self.transposed else values

    def rows(self, first: int, last: int, dtype: str) -> mx.array:
        if (first, last) == (0, self.shape[-2]):
            return self.whole(dtype)
        if self.transposed:
            return as_mx(self.stored[:, first:last], dtype).T
        return as_mx(self.stored[first:last], dtype)

    def experts(self, low: int, high: int, dtype: str) -> mx.array:
        return as_mx(self.stored[low:high], dtype)


def as_mx(raw: Array, dtype: str) -> mx.array:
    """Stored numbers as an MLX array; raw (...) uint16 for BF16, else the NumPy dtype."""
    values = mx.array(np.ascontiguousarray(raw))
    return values.view(mx.bfloat16) if dtype == "BF16" else values
