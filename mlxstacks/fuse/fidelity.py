"""How much of an adapter is in the fused weights: sums over blocks, ratios of sums.

With D the intended change of the weights, F the realised one and F0 the one realised at zero
delta (all in float32, summed in float64):

    survival     <F, D> / <D, D>         share of the delta that arrived
    correlation  <F, D> / (|F| |D|)      1 when F points where D points
    error        |F - D| / |D|
    noise        |F - survival * D| / |D|
    artifact     |F0| / |W|              what the fuse does by itself
"""

import math
from dataclasses import dataclass, fields

import numpy as np

from mlxstacks.ops.affine import Array

# Beside a stage's number, in sums by stage: all stages of a module together.
ALL_STAGES = -1
# Short rows cost more in calls than in sums; at 32 groups of 64 the float32 sum is good to 1e-6,
# and a BLAS does not share it among threads.
_ROWS_IN_A_RUN = 32


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over the weights of a block, a module or a model; they add up."""

    weights: int = 0
    delta_delta: float = 0.0
    fused_delta: float = 0.0
    error_error: float = 0.0
    fused_fused: float = 0.0
    weight_weight: float = 0.0
    zero_zero: float = 0.0
    codes: int = 0
    codes_changed: int = 0
    codes_changed_at_zero: int = 0
    groups: int = 0
    step_sum: float = 0.0
    delta_delta_on_grid: float = 0.0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def dot(first: Array, second: Array) -> float:
    """Sum of products of two float32 blocks: runs of some thousand in float32, then float64."""
    run = first.shape[1] * math.gcd(len(first), _ROWS_IN_A_RUN)
    runs = first.reshape(-1, 1, run) @ second.reshape(-1, run, 1)  # half of np.einsum's time
    return float(runs.sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The figures of DESIGN section 6 for a module or a whole model; None where undefined."""

    weights: int
    delta_over_step: float | None
    survival: float | None
    correlation: float | None
    error: float | None
    noise: float | None
    artifact: float | None
    codes_changed: float | None
    codes_changed_at_zero: float | None

    def as_json(self) -> dict[str, float | int | None]:
        """The figures by name; `codes_changed*` are shares of all codes."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def fidelity(sums: Sums) -> Fidelity:
    """Ratios of the sums. Survival, correlation, error and noise are None where <D, D> is 0."""
    survival = correlation = error = noise = None
    if sums.delta_delta > 0:
        dd, fd, ff = sums.delta_delta, sums.fused_delta, sums.fused_fused
        survival = fd / dd
        correlation = fd / math.sqrt(ff * dd) if ff > 0 else 0.0
        # Summed for itself: for a delta that arrives nearly whole, ff - 2 * fd + dd is the small
        # difference of large sums. F - survival * D and D are orthogonal, hence the noise.
        error = math.sqrt(sums.error_error / dd)
        noise = math.sqrt(max(sums.error_error / dd - (1 - survival) ** 2, 0.0))
    return Fidelity(
        weights=sums.weights,
        delta_over_step=_delta_over_step(sums),
        survival=survival,
        correlation=correlation,
        error=error,
        noise=noise,
        artifact=_root_ratio(sums.zero_zero, sums.weight_weight),
        codes_changed=sums.codes_changed / sums.codes if sums.codes else None,
        codes_changed_at_zero=sums.codes_changed_at_zero / sums.codes if sums.codes else None,
    )


def _root_ratio(numerator: float, denominator: float) -> float | None:
    return math.sqrt(numerator / denominator) if denominator > 0 else None


def _delta_over_step(sums: Sums) -> float | None:
    """Root mean square of D over the mean step, over the quantized weights."""
    if not sums.groups or not sums.step_sum or not sums.delta_delta:
        return None
    rms = math.sqrt(sums.delta_delta_on_grid / sums.codes)
    return rms / (sums.step_sum / sums.groups)
