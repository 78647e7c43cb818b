"""Protected output directions: the span of what frozen stacks write, kept out of a new one.

For each sample, the delta of all frozen stacks at weight 1 is averaged over its tokens: one row of
D (n, N), not centred. The basis V (N, k) holds the k leading right singular vectors of D. A new
stack's delta becomes delta - (delta V) V^T, and V is folded into lora_b at freezing.

Letters: n samples, N output dims, k directions. Linear algebra is NumPy in float64: it happens once
a domain, and orthogonality is then exact to float32.
"""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

Scope = Literal["aggregate", "cumulative"]

OVERSAMPLING = 8
POWER_ITERATIONS = 2
# Directions with less than this share of the largest singular value are rounding, not signal.
NEGLIGIBLE = 1e-6


@dataclass(frozen=True, eq=False)
class NullBasis:
    """Protected directions of one projection.

    vectors: (N, k) float32, orthonormal columns. captured_energy: share of |D|^2 inside the span of
    `vectors`, None where D is zero. capacity: k / N, the share of the output that is protected.
    """

    vectors: mx.array
    captured_energy: float | None
    capacity: float


def right_singular_vectors(
    rows: np.ndarray, k: int, *, oversampling: int = OVERSAMPLING, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Leading right singular vectors (N, k') and singular values (k',) of rows (n, N); k' <= k.

    Exact for n <= 2k: QR of the transpose, then the SVD of the small factor, so nothing of N x N
    is made. Beyond, a randomized range of k + oversampling directions with two power iterations,
    seeded, cut back to k. Directions whose singular value is rounding are left out.
    """
    count, width = rows.shape
    if count <= 2 * k:
        basis, small = np.linalg.qr(rows.T)  # (N, m), (m, n), m = min(N, n)
        left, values, _ = np.linalg.svd(small, full_matrices=False)
    else:
        size = min(k + oversampling, width, count)
        draw = np.random.default_rng(seed).standard_normal((count, size))
        basis, _ = np.linalg.qr(rows.T @ draw)  # (N, size)
        for _ in range(POWER_ITERATIONS):
            basis, _ = np.linalg.qr(rows.T @ (rows @ basis))
        _, values, right = np.linalg.svd(rows @ basis, full_matrices=False)
        left = right.T
    keep = min(k, int(np.sum(values > NEGLIGIBLE * values[0]))) if values.size else 0
    return basis @ left[:, :keep], values[:keep]


def null_basis(
    rows: np.ndarray,
    k: int,
    *,
    scope: Scope = "aggregate",
    previous: NullBasis | None = None,
    oversampling: int = OVERSAMPLING,
    seed: int = 0,
) -> NullBasis:
    """The basis of one projection from its delta rows (n, N).

    scope: aggregate protects the k leading directions of `rows` alone, however many domains they
    come from; cumulative keeps those of `previous` and adds k new ones.
    Law: vectors^T vectors is the identity to 1e-6.
    Raises: ValueError for rows that are not a finite matrix, or k < 1.
    """
    data = np.asarray(rows, dtype=np.float64)
    if data.ndim != 2 or not np.isfinite(data).all():
        raise ValueError(f"delta rows: got shape {data.shape}; allowed is a finite (n, N) matrix")
    if k < 1:
        raise ValueError(f"{k} directions; allowed is 1 or more")
    width = data.shape[1]
    old = np.zeros((width, 0))
    if scope == "cumulative" and previous is not None:
        old = np.array(previous.vectors, dtype=np.float64)
    outside = data - (data @ old) @ old.T
    if np.linalg.norm(outside) <= NEGLIGIBLE * np.linalg.norm(data):
        outside = outside[:0]  # all of it is protected already
    new, _ = right_singular_vectors(outside, min(k, width - old.shape[1]),
                                    oversampling=oversampling, seed=seed)  # fmt: skip
    # Once more against the old ones: rounding of the first time is of the size of `data`.
    new, _ = np.linalg.qr(new - old @ (old.T @ new))
    vectors = np.concatenate([old, new], axis=1)
    return _finished(vectors, data)


def _finished(vectors: np.ndarray, data: np.ndarray) -> NullBasis:
    total = float(np.sum(data * data))
    captured = float(np.sum((data @ vectors) ** 2)) / total if total > 0 else None
    capacity = vectors.shape[1] / vectors.shape[0]
    return NullBasis(mx.array(vectors.astype(np.float32)), captured, capacity)


def remove_directions(delta: mx.array, vectors: mx.array) -> mx.array:
    """delta (..., N) without its part in the span of vectors (N, k): two thin products."""
    return delta - (delta @ vectors) @ vectors.T


def fold_into(lora_b: mx.array, vectors: mx.array) -> mx.array:
    """lora_b (..., N, R) whose outputs have no part in the span of vectors (N, k).

    Law: gating and packing commute with it, so the frozen delta is the projected one; and
    vectors^T lora_b is zero to rounding.
    """
    once = lora_b - vectors @ (vectors.T @ lora_b)
    # Twice: what rounding left in the span the first time.
    return once - vectors @ (vectors.T @ once)


def latent_vectors(vectors: mx.array, d_out: mx.array) -> mx.array:
    """Directions (l, k) of the latent space that d_out (N, l) maps onto the span of vectors (N, k).

    A latent delta without them stays out of the span: vectors^T d_out z = (d_out^T vectors)^T z.
    Removing them before the shared d_out, not after, is what can be folded into a stack.
    """
    inside = np.array(d_out, dtype=np.float64).T @ np.array(vectors, dtype=np.float64)  # (l, k)
    basis, _ = right_singular_vectors(inside.T, min(inside.shape))
    return mx.array(basis.astype(np.float32))
