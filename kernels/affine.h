// Affine grids, common to all targets: MLX's packing and rounding for single values and lanes.
// Only names of metal_shim.h / cuda_shim.h are used; helpers take values, never pointers.

// `value` rounded to T and back: one rounding to the storage dtype, ties to even.
template <typename T>
HELPER float round_to(float value) {
  return static_cast<float>(static_cast<T>(value));
}

// Sum over runs of `lanes` neighbouring lanes (a power of two up to 32), the same bits in every
// lane and on every device: a binary tree over neighbours.
HELPER float tree_sum(float value, uint lanes) {
  for (uint mask = 1u; mask < lanes; mask <<= 1u) {
    value = add_rn(value, xor_lane(value, mask));
  }
  return value;
}

// COUNT floats of a lane: helpers take values, and an array is none.
template <int COUNT>
struct Floats {
  float at[COUNT];
};

// The lanes that differ in the bit `mask` add up their values and share out the sums: the lane
// without the bit keeps those of even index, the other one those of odd index.
template <int COUNT>
HELPER Floats<(COUNT + 1) / 2> share_sums(Floats<COUNT> values, uint lane, uint mask) {
  const bool odd = (lane & mask) != 0u;
  Floats<(COUNT + 1) / 2> shared;
  #pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    const float first = values.at[i];
    const float second = i + 1 < COUNT ? values.at[i + 1 < COUNT ? i + 1 : 0] : 0.0f;
    const float sent = odd ? first : second;
    shared.at[i / 2] = add_rn(odd ? second : first, xor_lane(sent, mask));
  }
  return shared;
}

// Sums over all 32 lanes of up to 32 values: lane i returns that of values.at[i], in the bits of
// tree_sum. An exchange serves two values, so 32 sums take 31 of them instead of 160.
template <int COUNT>
HELPER float sum_for_lane(Floats<COUNT> values, uint lane) {
  const auto pairs = share_sums(values, lane, 1u);
  const auto fours = share_sums(pairs, lane, 2u);
  const auto eights = share_sums(fours, lane, 4u);
  const auto halves = share_sums(eights, lane, 8u);
  return share_sums(halves, lane, 16u).at[0];
}

// The bits of a float as a number, and back; and the bits of `value` as stored in T.
#ifdef MLXSTACKS_CUDA
HELPER uint float_bits(float value) { return __float_as_uint(value); }
HELPER float bits_float(uint bits) { return __uint_as_float(bits); }
template <typename T>
HELPER uint storage_bits(float value) {
  const T stored = static_cast<T>(value);
  return *reinterpret_cast<const ushort*>(&stored);
}
#else
HELPER uint float_bits(float value) { return as_type<uint>(value); }
HELPER float bits_float(uint bits) { return as_type<float>(bits); }
template <typename T>
HELPER uint storage_bits(float value) {
  return as_type<ushort>(static_cast<T>(value));
}
#endif
template <>
HELPER uint storage_bits<float>(float value) {
  return float_bits(value);
}

// Floats from 2^23 to 2^24 are the whole numbers: their low 23 bits are the number itself. So codes
// become floats and floats codes without a conversion, which runs at a fraction of the rate of an
// addition on GPUs.
#define TWO_TO_23 8388608.0f

// Code number `position` of an octet of B-bit codes, as a float. The octet is 8 * B bits, lowest
// first, in (low, high).
template <int B>
HELPER float octet_code(uint low, uint high, int position) {
  const int first = position * B;
  uint code = first < 32 ? low >> first % 32 : high >> first % 32;
  if (first < 32 && first + B > 32) {
    code |= high << (32 - first);
  }
  return sub_rn(bits_float(float_bits(TWO_TO_23) | (code & ((1u << B) - 1u))), TWO_TO_23);
}

// Four whole numbers below 2^B as 4 * B bits.
template <int B>
HELPER uint pack_four(float a, float b, float c, float d) {
  const float width = static_cast<float>(1 << B);
  const uint front = float_bits(fma_rn(b, width, add_rn(a, TWO_TO_23))) & 0x7FFFFFu;
  const uint back = float_bits(fma_rn(d, width, add_rn(c, TWO_TO_23))) & 0x7FFFFFu;
  return front | back << 2 * B;
}

// Whether `quotient` may divide by this number: 2^-60 to 2^60, far from all ends of float32.
HELPER bool divides_quickly(float divisor) {
  return magnitude(divisor) >= 8.67361738e-19f && magnitude(divisor) <= 1.15292150e18f;
}

// value / divisor, rounded as a division rounds it; `reciprocal` is div_rn(1, divisor), one for a
// whole group. For divides_quickly(divisor) and quotients from 2^-20 to 2^20. A smaller one may be
// off in its last bits: where the remainder underflows on devices that flush subnormal numbers, and
// below 2^-126 on all. Why: kernels/README.md, "Division".
HELPER float quotient(float value, float divisor, float reciprocal) {
  const float near = mul_rn(value, reciprocal);
  return fma_rn(fma_rn(-divisor, near, value), reciprocal, near);
}

// rint(value / divisor), ties to even, under the same conditions.
HELPER float rounded_quotient(float value, float divisor, float reciprocal) {
  // 1.5 * 2^23: the sum has no bits below one, so the addition itself rounds.
  return sub_rn(add_rn(quotient(value, divisor, reciprocal), 12582912.0f), 12582912.0f);
}

struct Grid {
  float scale;
  float bias;
};

// Scale and bias that mx.quantize gives on the CPU device, before any cast: fit_grid in
// mlxstacks/ops/affine.py. bins is 2^bits - 1.
HELPER Grid fit_grid(float low, float high, float bins) {
  const float width = larger(div_rn(sub_rn(high, low), bins), 1e-7f);
  const bool low_is_edge = magnitude(low) > magnitude(high);
  const float edge = low_is_edge ? low : high;
  Grid grid;
  grid.scale = low_is_edge ? width : -width;
  grid.bias = 0.0f;
  const float steps = rint_even(div_rn(edge, grid.scale));
  if (steps != 0.0f) {
    grid.scale = div_rn(edge, steps);
    grid.bias = edge;
  }
  return grid;
}
