"""Singular values and directions of what frozen stacks do, from their low-rank factors.

A stack adds scale * sum_e gate_e * B_e A_e x at a projection. What it can write is taken block by
block, an expert a block:

    M = scale * [B_1 A_1, B_2 A_2, ...]        (N, blocks * K)

The left singular vectors and values of M are those of the outputs where each expert answers white
input of its own: no gates have to be assumed, and experts cannot cancel. A LoRA is one block, B A.
Stacks of one domain lie side by side the same way.

M is never made, nor anything of N x N. With B = Q R and A_e^T = P_e S_e (thin QR), M is
Q (R diag(S_e^T)) diag(P_e^T): the middle is small and the outer factors are orthonormal.

Letters: N output dims, K input dims. All of it is NumPy in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxstacks.layers.nullspace import OVERSAMPLING, POWER_ITERATIONS
from mlxstacks.layers.packed import FrozenStack

# Up to so many ranks in all the small factor is decomposed exactly; beyond (a pair for each of
# hundreds of base experts) only its leading part is.
EXACT_RANKS = 1024
LEADING = 128

# One expert's (B scaled (N, R), A (R, K)).
Block = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values (m,) of M, falling; vectors (N, m), its left singular vectors.

    energy: the sum of all squared singular values. complete: whether none is left out.
    """

    values: np.ndarray
    vectors: np.ndarray
    energy: float
    complete: bool

    def normalised(self) -> np.ndarray:
        """Values over the largest; empty for a delta of zero."""
        return self.values / self.values[0] if self.energy > 0 else self.values[:0]

    def effective_rank(self) -> float | None:
        """exp of the entropy of the values as shares of their sum (Roy and Vetterli, 2007).

        Law: m for m equal values, 1 for a single one. None where it is not known.
        """
        if not self.complete or self.energy == 0:
            return None
        shares = self.values[self.values > 0] / self.values.sum()
        return float(np.exp(-np.sum(shares * np.log(shares))))

    def stable_rank(self) -> float | None:
        """energy / largest value squared: between 1 and the rank."""
        return self.energy / float(self.values[0]) ** 2 if self.energy > 0 else None


def blocks_of(stack: FrozenStack) -> list[Block]:
    """The experts of a stack, each with the shared latent projections multiplied in."""
    shape = stack.shape
    a, b = (np.array(t.astype(mx.float32)) for t in (stack.lora_a, stack.lora_b))
    if shape.form == "per_expert":
        copies, ranks = a.shape[0], (shape.num_experts, shape.rank)
        a = a.reshape(copies * shape.num_experts, shape.rank, -1)
        b = b.reshape(copies, b.shape[1], *ranks).swapaxes(1, 2)  # (M, E, N, R)
        b = b.reshape(copies * shape.num_experts, -1, shape.rank)
    blocks = [(shape.scale * y.astype(np.float64), x.astype(np.float64))
              for x, y in zip(a, b, strict=True)]  # fmt: skip
    if shape.latent is None:
        return blocks
    d_in, d_out = (np.array(d, dtype=np.float64) for d in (shape.latent.d_in, shape.latent.d_out))
    return [(d_out @ left, right @ d_in) for left, right in blocks]


def spectrum_of(blocks: Sequence[Block], seed: int = 0) -> Spectrum:
    """The spectrum of M for these blocks; seed: of the randomized range beyond EXACT_RANKS."""
    if sum(left.shape[1] for left, _ in blocks) > EXACT_RANKS:
        return _leading_spectrum(blocks, seed)
    basis, outer = np.linalg.qr(np.concatenate([left for left, _ in blocks], axis=1))
    parts, start = [], 0
    for left, right in blocks:
        _, inner = np.linalg.qr(right.T)  # (min(K, R), R)
        parts.append(outer[:, start : start + left.shape[1]] @ inner.T)
        start += left.shape[1]
    turned, values, _ = np.linalg.svd(np.concatenate(parts, axis=1), full_matrices=False)
    return Spectrum(values, basis @ turned, float(np.sum(values**2)), complete=True)


def _leading_spectrum(blocks: Sequence[Block], seed: int) -> Spectrum:
    """LEADING singular values by subspace iteration on M M^T, which is applied, never made."""

    def applied(x: np.ndarray) -> np.ndarray:
        return sum((b @ (a @ (a.T @ (b.T @ x))) for b, a in blocks), np.zeros_like(x))

    width = blocks[0][0].shape[0]
    count = min(width, LEADING + OVERSAMPLING)
    basis = np.random.default_rng(seed).standard_normal((width, count))
    for _ in range(1 + POWER_ITERATIONS):
        basis, _ = np.linalg.qr(applied(basis))
    squares, turned = np.linalg.eigh(basis.T @ applied(basis))
    order = np.argsort(squares)[::-1][:LEADING]
    values = np.sqrt(np.maximum(squares[order], 0))
    energy = sum(float(np.sum((b.T @ b) * (a @ a.T))) for b, a in blocks)
    return Spectrum(values, basis @ turned[:, order], energy, complete=count == width <= LEADING)


def input_direction(blocks: Sequence[Block]) -> np.ndarray:
    """The input v (K,), of norm 1, that moves the outputs most: the leading right singular vector
    of the blocks below each other, its sign open; zeros where they are a delta of zero.
    """
    spectrum = spectrum_of([(right.T, left.T) for left, right in blocks])
    return spectrum.vectors[:, 0] * (spectrum.energy > 0)
