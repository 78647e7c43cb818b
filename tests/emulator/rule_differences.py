"""How often MLX's Metal rule and its CPU rule quantize the same weights differently.

    python -m tests.emulator.rule_differences

prints the table of kernels/README.md: `mx.quantize` on the CPU against the NumPy transcription of
the Metal kernel (metal_rule.py), which the emulator runs to the bit (test_emulator_trust_mlx.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxstacks.ops.affine import BITS, round_to, unpack
from tests.cases import MX_DTYPES
from tests.emulator import metal_rule

Array = np.ndarray

ROWS, GROUP_SIZE = 4096, 64


@dataclass(frozen=True)
class Difference:
    """Shares of what the two rules store differently, in percent."""

    codes_percent: float
    groups_percent: float  # groups with another scale or bias
    largest_step: int  # the largest difference of two codes


def gaussian(rng: np.random.Generator, groups: int, group_size: int) -> Array:
    """Ordinary weights: normal, with a standard deviation of 0.02."""
    return rng.normal(0, 0.02, (groups, group_size)).astype(np.float32)


def all_negative(rng: np.random.Generator, groups: int, group_size: int) -> Array:
    """Groups without a weight of zero or more, as biases and norms have them."""
    return -rng.uniform(0.01, 0.05, (groups, group_size)).astype(np.float32)


def tied(bits: int) -> Callable[[np.random.Generator, int, int], Array]:
    """One weight in sixteen half way between two codes, the others on codes.

    Every group spans the whole grid in steps of 1/16, so that its scale is exactly that.
    """

    def weights(rng: np.random.Generator, groups: int, group_size: int) -> Array:
        bins = (1 << bits) - 1
        codes = rng.integers(0, bins + 1, (groups, group_size)).astype(np.float32)
        planted = (rng.random(codes.shape) < 1 / 16) & (codes < bins)
        codes[planted] += np.float32(0.5)
        codes[:, 0], codes[:, 1] = 0, bins
        return (codes - np.float32(bins)) / np.float32(-16)

    return weights


def compare(weights: Array, bits: int, dtype: str) -> Difference:
    """mx.quantize on the CPU against the Metal rule.

    Shapes: weights (G, group_size) float32 with values of `dtype`; bits and dtype ("BF16", "F16",
    "F32") as in mlxstacks.ops.affine.
    """
    ours = metal_rule.quantize(weights, bits, dtype)
    stored = mx.array(weights).astype(MX_DTYPES[dtype])
    packed, scales, biases = mx.quantize(
        stored, group_size=weights.shape[1], bits=bits, stream=mx.cpu
    )
    codes = unpack(np.array(packed), bits)
    grid = [np.array(part.astype(mx.float32))[:, 0] for part in (scales, biases)]
    other = (grid[0] != ours[1]) | (grid[1] != ours[2])
    apart = np.abs(codes.astype(np.int16) - ours[0].astype(np.int16))
    return Difference(100 * (apart > 0).mean(), 100 * other.mean(), int(apart.max()))


def fused_percent(weights: Array, bits: int) -> float:
    """Share of float32 weights that affine_dequantize gives otherwise when it is contracted.

    Shapes: weights (G, group_size) float32.
    """
    rule = metal_rule.quantize(weights, bits, "F32")
    fused = metal_rule.dequantize(*rule, "F32", contracted=True)
    return 100 * float((fused != metal_rule.dequantize(*rule, "F32")).mean())


def table() -> list[tuple[str, str, int, Difference]]:
    """(weights, dtype, bits, difference) for every row of the table; the same on every machine."""
    rows = []
    for dtype in ("BF16", "F16", "F32"):
        for bits in BITS:
            kinds = {"gaussian": gaussian, "all negative": all_negative, "ties": tied(bits)}
            for kind, make in kinds.items():
                weights = round_to(make(np.random.default_rng(bits), ROWS, GROUP_SIZE), dtype)
                rows.append((kind, dtype, bits, compare(weights, bits, dtype)))
    return sorted(rows, key=lambda row: row[:3])


def main() -> None:
    print(f"{ROWS} groups of {GROUP_SIZE} weights; Metal's rule against mx.quantize on the CPU\n")
    print("| weights | dtype | bits | codes that differ | other scale or bias | largest step |")
    print("|---|---|---|---|---|---|")
    for kind, dtype, bits, found in table():
        print(
            f"| {kind} | {dtype} | {bits} | {found.codes_percent:.3f}% "
            f"| {found.groups_percent:.3f}% | {found.largest_step} |"
        )
    print("\n| affine_dequantize, float32, bits | values that contraction moves |")
    print("|---|---|")
    for bits in BITS:
        share = fused_percent(gaussian(np.random.default_rng(bits), ROWS, GROUP_SIZE), bits)
        print(f"| {bits} | {share:.1f}% |")


if __name__ == "__main__":
    main()
