"""MLX's FP4 and FP8 modes in NumPy: mxfp4, nvfp4 and mxfp8, and the policies of a fuse on them.

A group stores a code a weight and one scale byte, and stands for `scale * element(code)`: elements
are E2M1 (FP4) or E4M3 (FP8), scales powers of two (E8M0; the OCP Microscaling Formats
specification, v1.0) or E4M3 (nvfp4). There is no bias. Values are exact in BF16.

`quantize` follows MLX's CPU device to the bit for values of normal size, and the policies do what
those of `ops/policies.py` do on the affine grid:

    refit       what `mlx_lm.fuse` does on the CPU device: quantize W + delta again
    keep        the scale stays; a weight takes the element nearest to W + delta
    nearest     per group keep or refit, whichever is closer to W + delta in squared error
    stochastic  keep with unbiased rounding between neighbouring elements
    promote     an affine grid of more bits in groups of 32. Of mxfp4 it holds every old value;
                mxfp8 and nvfp4 fit no affine grid exactly, so their grid is fitted anew

Law (tests/ops/test_float_grids.py): at zero delta keep, nearest and stochastic return the very
groups they were given, and promote of mxfp4 groups of the same values.
"""

from dataclasses import dataclass, replace

import numpy as np

from mlxstacks.ops.affine import Array, fit_grid, nearest_codes, round_to
from mlxstacks.ops.policies import Change, Groups

# mlx-lm dequantizes these modes to BF16, whatever the model's dtype (`mx.dequantize`'s default).
VALUE_DTYPE = "BF16"
# Of the affine grid that `promote` goes to: MLX's smallest.
PROMOTED_GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Element:
    """A small float: sign, exponent from `least` on, `mantissa` bits; `largest` is finite."""

    bits: int
    mantissa: int
    least: int
    largest: float

    def encode(self, values: Array) -> Array:
        """Codes of the nearest elements, saturated. Any shape, float32 -> uint8.

        Ties go as on MLX's CPU device: to even for E4M3, towards zero for E2M1 (on Metal to even).
        """
        sizes = np.minimum(np.abs(values), np.float32(self.largest))
        exponents = np.where(sizes == 0, self.least, np.frexp(sizes)[1] - 1)
        exponents = np.maximum(exponents, self.least)
        steps = np.ldexp(sizes, self.mantissa - exponents)
        steps = np.ceil(steps - np.float32(0.5)) if self.bits == 4 else np.rint(steps)
        steps = steps.astype(np.int32)
        codes = ((exponents - self.least) << self.mantissa) + steps
        return (codes | np.signbit(values) << (self.bits - 1)).astype(np.uint8)

    @property
    def values(self) -> Array:
        """The element of each code, float32; of what is not a number, NaN."""
        codes = np.arange(1 << (self.bits - 1))
        exponents, steps = codes >> self.mantissa, codes & ((1 << self.mantissa) - 1)
        normal = exponents > 0
        steps = steps + (normal << self.mantissa)
        sizes = np.ldexp(steps.astype(np.float32), np.where(normal, exponents - 1, 0) + self.least
                         - self.mantissa)  # fmt: skip
        sizes[sizes > self.largest] = np.nan
        return np.concatenate([sizes, -sizes]).astype(np.float32)


_E2M1, _E4M3 = Element(4, 1, 0, 6.0), Element(8, 3, -6, 448.0)


@dataclass(frozen=True, slots=True)
class Mode:
    """One of MLX's modes whose scales are bytes; each has one width and one group size."""

    name: str
    element: Element
    group_size: int

    @property
    def bits(self) -> int:
        return self.element.bits

    def scale_values(self, scales: Array) -> Array:
        """What scale bytes stand for, float32."""
        if self.name == "nvfp4":
            return _E4M3_VALUES[scales]
        # 0 is 2**-127, below the normal numbers
        return np.ldexp(np.float32(1), scales.astype(np.int32) - 127)

    def _scales(self, largest: Array) -> Array:
        """The scale byte for groups whose largest elements have this size. (G,) -> (G,) uint8."""
        wanted = (largest / np.float32(self.element.largest)).astype(np.float32)
        if self.name == "nvfp4":
            return _E4M3.encode(wanted)
        # The smallest power of two that is at least as large; 1 for a group of zeros.
        fraction, exponent = np.frexp(wanted)
        exponent = np.where(fraction == 0.5, exponent - 1, exponent)
        exponent = np.where(wanted == 0, 0, exponent)
        return (np.clip(exponent, -127, 127) + 127).astype(np.uint8)

    def pack(self, codes: Array) -> Array:
        """Packed words of codes, lowest first. Shapes: (..., K) uint8 -> (..., K * bits / 32)."""
        octets = np.ascontiguousarray(codes)
        if self.bits == 4:
            octets = octets[..., 0::2] | octets[..., 1::2] << np.uint8(4)
        return octets.view(np.uint32)

    def unpack(self, packed: Array) -> Array:
        """The inverse of `pack`."""
        octets = np.ascontiguousarray(packed).view(np.uint8)
        if self.bits == 8:
            return octets
        codes = np.stack([octets & np.uint8(15), octets >> np.uint8(4)], axis=-1)
        return codes.reshape(*octets.shape[:-1], 2 * octets.shape[-1])


MODES = {
    mode.name: mode
    for mode in (Mode("mxfp4", _E2M1, 32), Mode("nvfp4", _E2M1, 16), Mode("mxfp8", _E4M3, 32))
}
_E4M3_VALUES = _E4M3.values
_VALUES = {mode.element: mode.element.values for mode in MODES.values()}


def _gaps(values: Array) -> Array:
    """Mean distance of each element to its neighbours, by code."""
    sizes = values[: len(values) // 2]
    steps = np.diff(sizes[np.isfinite(sizes)])
    ends = np.concatenate([steps[:1], (steps[1:] + steps[:-1]) / 2, steps[-1:]])
    ends = np.concatenate([ends, np.zeros(len(sizes) - len(ends), np.float32)])
    return np.concatenate([ends, ends]).astype(np.float32)


_GAPS = {element: _gaps(values) for element, values in _VALUES.items()}


@dataclass(frozen=True, slots=True)
class FloatGroups:
    """Groups of one tensor or block in an FP4 or FP8 mode.

    Shapes: codes (G, group_size) uint8; scales (G,) uint8. dtype: of the floats that come of them,
    where they are dequantized or promoted.
    """

    codes: Array
    scales: Array
    mode: Mode
    dtype: str

    @property
    def bits(self) -> int:
        return self.mode.bits

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.codes.size

    def values(self) -> Array:
        """`scale * element` in float32, exact, (G, group_size)."""
        elements = _VALUES[self.mode.element][self.codes]
        return np.multiply(elements, self.mode.scale_values(self.scales)[:, None], out=elements)

    def steps(self) -> Array:
        """Mean distance of each weight to the neighbouring values, a mean a group, (G,)."""
        gaps = _GAPS[self.mode.element][self.codes].mean(axis=1)
        return np.multiply(gaps, self.mode.scale_values(self.scales), out=gaps)


def quantize(values: Array, mode: Mode) -> tuple[Array, Array]:
    """What `mx.quantize(values, mode=...)` gives on the CPU device, bit for bit.

    Shapes: values (G, group_size) float32 -> codes (G, group_size) uint8, scales (G,) uint8.
    """
    scales = mode._scales(np.abs(values).max(axis=1))
    codes = mode.element.encode(_scaled(values, mode.scale_values(scales)))
    if mode.bits == 4:
        codes[codes == 8] = 0  # MLX writes no negative zero in FP4
    return codes, scales


def _scaled(values: Array, scales: Array) -> Array:
    """Values in units of their group's scale; 0 where that is 0."""
    return np.divide(values, np.where(scales == 0, np.float32(np.inf), scales)[:, None])


def requantize(groups: FloatGroups, change: Change, policy: str) -> FloatGroups | Groups:
    """New groups for `groups` with `change` in them, by the named policy.

    change.bits: of the affine grid, for promote.
    """
    if policy == "promote":
        return promote(groups, change)
    if policy == "refit":
        return refit(groups, change)
    target = groups.values()
    np.add(target, change.delta, out=target)
    if policy == "stochastic":
        if change.uniform is None:
            raise ValueError("stochastic rounding needs uniform numbers, one per weight")
        return _kept(groups, _drawn(groups, target, change.uniform))
    kept = _kept(groups, _scaled(target, groups.mode.scale_values(groups.scales)))
    if policy == "keep":
        return kept
    if policy == "nearest":
        return _closer(kept, refit(groups, change), target)
    raise ValueError(f"policy is {policy!r}; FP4 and FP8 groups have refit, keep, nearest, "
                     "stochastic and promote")  # fmt: skip


def refit(groups: FloatGroups, change: Change) -> FloatGroups:
    """Quantize W + delta anew, the sum in BF16 as `mlx_lm.fuse` does."""
    rounded = change.rounded_delta
    if rounded is None:
        rounded = round_to(change.delta.copy(), VALUE_DTYPE)
    target = groups.values()
    np.add(target, rounded, out=target)
    codes, scales = quantize(round_to(target, VALUE_DTYPE), groups.mode)
    return replace(groups, codes=codes, scales=scales)


def _kept(groups: FloatGroups, elements: Array) -> FloatGroups:
    """The nearest elements under the old scales; where the value is the old one, the old code: a
    zero has two, and under a scale of 0 all are zeros.
    """
    codes, values = groups.mode.element.encode(elements), _VALUES[groups.mode.element]
    same = values[codes] == values[groups.codes]
    same |= (groups.mode.scale_values(groups.scales) == 0)[:, None]
    return replace(groups, codes=np.where(same, groups.codes, codes))


def _drawn(groups: FloatGroups, target: Array, uniform: Array) -> Array:
    """For each weight one of the two elements around it, the nearer one more often."""
    element = groups.mode.element
    wanted = _scaled(target, groups.mode.scale_values(groups.scales))
    wanted = np.clip(wanted, -np.float32(element.largest), np.float32(element.largest))
    ordered = np.unique(_VALUES[element][np.isfinite(_VALUES[element])])
    below = np.minimum(np.searchsorted(ordered, wanted, side="right") - 1, len(ordered) - 2)
    low, high = ordered[below], ordered[below + 1]
    is_high = (wanted - low) > uniform * (high - low)
    return np.where(is_high, high, low)


def promote(groups: FloatGroups, change: Change) -> Groups:
    """Affine codes of `change.bits` bits in groups of 32 for W + delta.

    Of mxfp4 the grid of half a scale from -6 scales on holds every old value; where a group fitted
    anew is closer, it takes that one. Shapes: G * group_size a multiple of 32.
    """
    bits = change.bits or 0
    target = groups.values()
    np.add(target, change.delta, out=target)
    target = target.reshape(-1, PROMOTED_GROUP_SIZE)
    scales, biases = (round_to(ends, groups.dtype) for ends in fit_grid(target, bits))
    codes = nearest_codes(target, scales, biases, bits)
    if groups.mode.name == "mxfp4":
        steps, ends = _exact_grid(groups, bits)
        finer = nearest_codes(target, steps, ends, bits)
        errors = [
            _squared_error(target, g) for g in ((finer, steps, ends), (codes, scales, biases))
        ]
        exact = round_to(steps.copy(), groups.dtype) == steps
        take = exact & (round_to(ends.copy(), groups.dtype) == ends) & (errors[0] <= errors[1])
        codes[take], scales[take], biases[take] = finer[take], steps[take], ends[take]
    return Groups(codes.astype(np.uint8), scales, biases, bits, groups.dtype)


def _exact_grid(groups: FloatGroups, bits: int) -> tuple[Array, Array]:
    """Scales and biases of affine grids on which all E2M1 elements lie: 25 points of half a scale,
    and between them as many as so many bits have room for.
    """
    values = groups.mode.scale_values(groups.scales)
    finer = ((1 << bits) - 1) // 24
    return values * np.float32(0.5 / (1 << (finer.bit_length() - 1))), values * np.float32(-6)


def _squared_error(target: Array, grid: tuple[Array, Array, Array]) -> Array:
    codes, scales, biases = grid
    difference = codes * scales[:, None] + biases[:, None] - target
    return np.einsum("ij,ij->i", difference, difference)


def _closer(first: FloatGroups, second: FloatGroups, target: Array) -> FloatGroups:
    """Per group whichever is closer to the target; the first where they are equal."""
    errors = []
    for groups in (first, second):
        difference = groups.values() - target
        errors.append(np.einsum("ij,ij->i", difference, difference))
    take = errors[1] < errors[0]
    return replace(
        first,
        codes=np.where(take[:, None], second.codes, first.codes),
        scales=np.where(take, second.scales, first.scales),
    )
