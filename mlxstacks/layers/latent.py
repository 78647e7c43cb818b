"""Shared frozen projections into a latent space, and what they cost.

A latent stack routes and computes in l dims: c = d_in x, delta = d_out (sum of experts of c). Both
projections are frozen and shared by all stacks of a projection; d_in also by all projections that
read the same input (q, k, v; gate, up). With d_in and d_out of its own, a stack would be larger
than a full-width one; shared, the pair is paid once and pays from about four stacks on.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxstacks.layers.adapted import Dims

# Projections that read the same array in mlx-lm's models.
SAME_INPUT = (
    {"q_proj", "k_proj", "v_proj"},
    {"gate_proj", "up_proj"},
    {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_qkvz", "in_proj_ba"},
)


@dataclass(frozen=True, eq=False)
class LatentPair:
    """d_in (l, K) with orthonormal rows and d_out (N, l) with orthonormal columns; float32.

    A plain object, so that a module holds it without making it a parameter.
    """

    d_in: mx.array
    d_out: mx.array

    @property
    def dim(self) -> int:
        return self.d_in.shape[0]


Pairs = Mapping[str, LatentPair]


def input_group(path: str) -> str:
    """The name under which projections with the same input share d_in."""
    parent, _, name = path.rpartition(".")
    for group in SAME_INPUT:
        if name in group:
            return f"{parent}.{min(group)}"
    return path


def latent_pairs(dims: Mapping[str, Dims], latent_dim: int, base_fingerprint: str) -> Pairs:
    """A random pair for each path that depends on base, path and latent_dim alone, so stacks of
    different runs and choices of projections share them. d_in is shared within an input group.

    Raises: ValueError naming each projection that is narrower than latent_dim.
    """
    narrow = [p for p, d in dims.items() if latent_dim > min(d.input_dims, d.output_dims)]
    if narrow:
        raise ValueError(
            f"latent_dim {latent_dim} is above the input or output dims of {', '.join(narrow)}; "
            "lower it or leave these projections out"
        )

    def directions(what: str, width: int) -> mx.array:
        text = f"{base_fingerprint}/{latent_dim}/{what}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        return mx.array(orthonormal_columns(width, latent_dim, np.random.default_rng(seed)))

    d_in = {
        group: mx.contiguous(directions(f"in/{group}", width).T)
        for group, width in {input_group(p): d.input_dims for p, d in dims.items()}.items()
    }
    return {
        path: LatentPair(d_in[input_group(path)], directions(f"out/{path}", d.output_dims))
        for path, d in sorted(dims.items())
    }


def orthonormal_columns(width: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """(width, count) float32 with orthonormal columns, in random directions."""
    q, r = np.linalg.qr(rng.standard_normal((width, count)))
    return (q * np.sign(np.diag(r))).astype(np.float32)


def full_parameters(dims: Iterable[Dims], num_experts: int, rank: int) -> int:
    """Parameters of one full-width stack: E R (K + N) + 2 E K a projection (router and noise)."""
    return sum(
        num_experts * (rank * (d.input_dims + d.output_dims) + 2 * d.input_dims) for d in dims
    )


def latent_parameters(dims: Iterable[Dims], num_experts: int, rank: int, latent_dim: int) -> int:
    """What one latent stack adds: a stack of a projection from l to l dims."""
    square = Dims(latent_dim, latent_dim, None)
    return full_parameters([square for _ in dims], num_experts, rank)


def shared_parameters(dims: Mapping[str, Dims], latent_dim: int) -> int:
    """The shared projections, once: d_out of each, d_in of each input group."""
    widths = {input_group(path): d.input_dims for path, d in dims.items()}
    return latent_dim * (sum(widths.values()) + sum(d.output_dims for d in dims.values()))
