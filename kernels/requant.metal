// Packed codes and a delta in; new packed codes, new scales and biases, and the sums of the
// fidelity report out, in one pass over the weights. The rule is mlxstacks/ops/policies.py, to the
// bit.
//
// old_codes      (rows, K / 8 * BITS bytes) in units of 1, 2 or 4 bytes
// old_scales     (rows, K / GROUP) T, old_biases alike
// pairs_of_a     (E, steps, R, 4, 32) uint64, each two float32 of lora_a: lay_out, ops/requant.py
// scaled_b       (rows, R) float: scale * lora_b
// dense_delta    (rows, K) float instead of both, unless FROM_LORA
// rounded_delta  (rows, K) float if HAS_ROUNDED; uniform_draws (rows, K) float if stochastic
// sizes          (4) uint: rows, rows of an expert, K / 8, R
// new_codes, new_scales, new_biases like the old ones; row_sums (rows, 9) float
//
// grid: 32 threads for every ROWS rows. A SIMD group walks along its rows in steps of 256 weights;
// a lane holds 8 neighbouring weights (an octet: BITS bytes) of each row, so GROUP / 8 lanes hold a
// group. Lanes past the end of a row work on its last octet once more, and neither write nor count.

const int REFIT = 0, NEAREST = 2, PROMOTE = 3, STOCHASTIC = 4;  // keep is 1
const bool MOVES = POLICY != REFIT;
const bool FITS = POLICY == REFIT || POLICY == NEAREST || POLICY == PROMOTE;
const bool COMPARES = MOVES && FITS;
const uint GROUP_LANES = uint(GROUP) / 8u;
const uint UNIT_BITS = BITS % 4 == 0 ? 32u : BITS % 2 == 0 ? 16u : 8u;
const uint NEW_UNIT_BITS = NEW_BITS % 4 == 0 ? 32u : NEW_BITS % 2 == 0 ? 16u : 8u;
const uint UNITS = uint(BITS) * 8u / UNIT_BITS;  // of an octet
const uint NEW_UNITS = uint(NEW_BITS) * 8u / NEW_UNIT_BITS;
const float TOP = static_cast<float>((1 << NEW_BITS) - 1);
const int WIDER = NEW_BITS > BITS ? NEW_BITS - BITS : 0;
const float WIDEN = static_cast<float>(1 << WIDER);
const int SUMS = 9;

const uint octets = sizes[2];
const uint rank = sizes[3];
const uint lane = thread_index_in_simdgroup;
const uint first_row = thread_position_in_grid.x / 32u * uint(ROWS);
if (first_row >= sizes[0]) {
  return;
}
const uint steps = (octets + 31u) / 32u;
auto lora_a = pairs_of_a + static_cast<size_t>(first_row / sizes[1]) * steps * rank * 128u + lane;
auto lora_b = scaled_b + static_cast<size_t>(first_row) * rank;

float total[ROWS][SUMS];
#pragma unroll
for (int row = 0; row < ROWS; ++row) {
  for (int i = 0; i < SUMS; ++i) {
    total[row][i] = 0.0f;
  }
}

for (uint step = 0u; step < steps; ++step) {
  const bool inside = step * 32u + lane < octets;
  const uint octet = inside ? step * 32u + lane : octets - 1u;

  float delta[ROWS][8];
  #pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const size_t start = (static_cast<size_t>(first_row + uint(row)) * octets + octet) * 8u;
    for (uint j = 0u; j < 8u; ++j) {
      delta[row][j] = FROM_LORA ? 0.0f : dense_delta[FROM_LORA ? 0u : start + j];
    }
  }
  if (FROM_LORA) {
    auto pairs = lora_a + static_cast<size_t>(step) * rank * 128u;
    auto lefts = lora_b;
    for (uint r = 0u; r < rank; ++r, pairs += 128u, ++lefts) {
      float right[8];
      for (uint j = 0u; j < 4u; ++j) {
        const auto pair = pairs[j * 32u];
        right[2u * j] = bits_float(static_cast<uint>(pair));
        right[2u * j + 1u] = bits_float(static_cast<uint>(pair >> 32));
      }
      #pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        const float left = lefts[uint(row) * rank];
        for (int j = 0; j < 8; ++j) {
          delta[row][j] = fma_rn(left, right[j], delta[row][j]);
        }
      }
    }
  }

  #pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const size_t place = static_cast<size_t>(first_row + uint(row)) * octets + octet;
    const size_t group = place / GROUP_LANES;
    const float scale = static_cast<float>(old_scales[group]);
    const float bias = static_cast<float>(old_biases[group]);
    uint low = 0u, high = 0u;
    for (uint i = 0u; i < UNITS; ++i) {
      const uint at = i * UNIT_BITS;
      const uint unit = static_cast<uint>(old_codes[place * UNITS + i]);
      low |= at < 32u ? unit << at % 32u : 0u;
      high |= at < 32u ? 0u : unit << at % 32u;
    }
    float code[8];
    float delta_delta = 0.0f;
    for (int j = 0; j < 8; ++j) {
      code[j] = octet_code<BITS>(low, high, j);
      delta_delta = fma_rn(delta[row][j], delta[row][j], delta_delta);
    }

    // The codes moved by round(delta / scale) from where they are; promote refines the grid first,
    // as far as the finer scale is exact in T.
    float chosen[8];
    float new_scale = scale, new_bias = bias;
    if (MOVES) {
      int shift = POLICY == PROMOTE ? WIDER : 0;
      while (shift > 0) {
        new_scale = mul_rn(scale, bits_float(uint(127 - shift) << 23));
        if (round_to<T>(new_scale) == new_scale) {
          break;
        }
        --shift;
      }
      new_scale = shift > 0 ? new_scale : scale;
      const float finer = static_cast<float>(1 << shift);
      if (POLICY == STOCHASTIC) {
        for (uint j = 0u; j < 8u; ++j) {
          const float moved = scale == 0.0f ? 0.0f : div_rn(delta[row][j], scale);
          const float draw = uniform_draws[POLICY == STOCHASTIC ? place * 8u + j : 0u];
          chosen[j] = floor_whole(add_rn(moved, draw));
        }
      } else {
        const float reciprocal = new_scale == 0.0f ? 0.0f : div_rn(1.0f, new_scale);
        // Below 2^40 no quotient of the octet reaches 2^20.
        const bool small = mul_rn(mul_rn(delta_delta, reciprocal), reciprocal) < 1.09951163e12f;
        if (small && (new_scale == 0.0f || divides_quickly(new_scale))) {
          for (int j = 0; j < 8; ++j) {
            chosen[j] = rounded_quotient(delta[row][j], new_scale, reciprocal);
          }
        } else {
          for (int j = 0; j < 8; ++j) {
            chosen[j] = new_scale == 0.0f ? 0.0f : rint_even(div_rn(delta[row][j], new_scale));
          }
        }
      }
      for (int j = 0; j < 8; ++j) {
        chosen[j] = smaller(larger(fma_rn(code[j], finer, chosen[j]), 0.0f), TOP);
      }
    }

    // A grid fitted anew to each group of target values. Refit works in T with a rounding after
    // each operation; promote in float32, its codes chosen for the scale as stored. The first pass
    // of a controlled refit has a delta of zero.
    float fitted[8];
    float fitted_scale = 0.0f, fitted_bias = 0.0f;
    float zero_zero = 0.0f, changed_at_zero = 0.0f;
    if (FITS) {
      for (int pass = CONTROL && POLICY == REFIT ? 0 : 1; pass < 2; ++pass) {
        float target[8];
        for (uint j = 0u; j < 8u; ++j) {
          const float product = mul_rn(scale, code[j]);
          if (POLICY == PROMOTE) {
            target[j] = add_rn(add_rn(product, bias), delta[row][j]);
          } else {
            const float change = HAS_ROUNDED ? rounded_delta[HAS_ROUNDED ? place * 8u + j : 0u]
                                             : round_to<T>(delta[row][j]);
            const float base = round_to<T>(add_rn(round_to<T>(product), bias));
            target[j] = pass == 0 ? base : round_to<T>(add_rn(base, change));
          }
        }
        float lowest = target[0], highest = target[0];
        for (int j = 1; j < 8; ++j) {
          lowest = smaller(lowest, target[j]);
          highest = larger(highest, target[j]);
        }
        for (uint mask = 1u; mask < GROUP_LANES; mask <<= 1u) {
          lowest = smaller(lowest, xor_lane(lowest, mask));
          highest = larger(highest, xor_lane(highest, mask));
        }
        const Grid grid = fit_grid(lowest, highest, TOP);
        fitted_scale = round_to<T>(grid.scale);
        fitted_bias = round_to<T>(grid.bias);
        const float divisor = POLICY == PROMOTE ? fitted_scale : grid.scale;
        const float origin = POLICY == PROMOTE ? fitted_bias : grid.bias;
        // A target is at most about 2^NEW_BITS steps from the bias of its grid, but may be any
        // number of them from promote's, which is rounded to T: such a code is clipped either way.
        if (divides_quickly(divisor)) {
          const float reciprocal = div_rn(1.0f, divisor);
          for (int j = 0; j < 8; ++j) {
            fitted[j] = rounded_quotient(sub_rn(target[j], origin), divisor, reciprocal);
          }
        } else {
          for (int j = 0; j < 8; ++j) {
            fitted[j] = rint_even(div_rn(sub_rn(target[j], origin), divisor));
          }
        }
        for (int j = 0; j < 8; ++j) {
          fitted[j] = smaller(larger(fitted[j], 0.0f), TOP);
          if (pass == 0) {
            const float before = add_rn(mul_rn(scale, code[j]), bias);
            const float after = add_rn(mul_rn(fitted_scale, fitted[j]), fitted_bias);
            const float drift = sub_rn(after, before);
            zero_zero = fma_rn(drift, drift, zero_zero);
            changed_at_zero += mul_rn(code[j], WIDEN) != fitted[j] ? 1.0f : 0.0f;
          }
        }
      }
    }

    // Per group whichever is closer to W + delta: squares rounded once each, then a tree over
    // neighbours, first inside the lane.
    float group_error = 0.0f;
    if (COMPARES) {
      float moved_error[8], fitted_error[8];
      for (int j = 0; j < 8; ++j) {
        const float target = add_rn(add_rn(mul_rn(scale, code[j]), bias), delta[row][j]);
        const float moved = sub_rn(add_rn(mul_rn(new_scale, chosen[j]), new_bias), target);
        const float fresh = sub_rn(add_rn(mul_rn(fitted_scale, fitted[j]), fitted_bias), target);
        moved_error[j] = mul_rn(moved, moved);
        fitted_error[j] = mul_rn(fresh, fresh);
      }
      for (int width = 4; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) {
          moved_error[j] = add_rn(moved_error[2 * j], moved_error[2 * j + 1]);
          fitted_error[j] = add_rn(fitted_error[2 * j], fitted_error[2 * j + 1]);
        }
      }
      const float moved_total = tree_sum(moved_error[0], GROUP_LANES);
      const float fitted_total = tree_sum(fitted_error[0], GROUP_LANES);
      const bool take = fitted_total < moved_total;
      group_error = take ? fitted_total : moved_total;
      for (int j = 0; j < 8; ++j) {
        chosen[j] = take ? fitted[j] : chosen[j];
      }
      new_scale = take ? fitted_scale : new_scale;
      new_bias = take ? fitted_bias : new_bias;
    } else if (FITS) {
      for (int j = 0; j < 8; ++j) {
        chosen[j] = fitted[j];
      }
      new_scale = fitted_scale;
      new_bias = fitted_bias;
    }

    if (inside) {
      const bool leads_group = octet % GROUP_LANES == 0u;
      const uint front = pack_four<NEW_BITS>(chosen[0], chosen[1], chosen[2], chosen[3]);
      const uint back = pack_four<NEW_BITS>(chosen[4], chosen[5], chosen[6], chosen[7]);
      const uint new_low = NEW_BITS == 8 ? front : front | back << 4 * NEW_BITS % 32;
      const uint new_high = back >> (32 - 4 * NEW_BITS) % 32;
      for (uint i = 0u; i < NEW_UNITS; ++i) {
        const uint at = i * NEW_UNIT_BITS;
        new_codes[place * NEW_UNITS + i] = (at < 32u ? new_low : new_high) >> at % 32u;
      }
      if (FITS && leads_group) {
        new_scales[group] = static_cast<T>(new_scale);
        new_biases[group] = static_cast<T>(new_bias);
      }

      // Where scales stay, F is whole steps, and the sums of the octet are multiplied once: twice
      // by the scale, since its square can leave float32 where no code moved.
      float fused_delta = 0.0f, fused_fused = 0.0f, error_error = 0.0f;
      float weight_weight = 0.0f, changed = 0.0f;
      for (int j = 0; j < 8; ++j) {
        if (FITS) {
          const float before = add_rn(mul_rn(scale, code[j]), bias);
          const float after = add_rn(mul_rn(new_scale, chosen[j]), new_bias);
          const float fused = sub_rn(after, before);
          const float error = sub_rn(fused, delta[row][j]);
          fused_delta = fma_rn(fused, delta[row][j], fused_delta);
          fused_fused = fma_rn(fused, fused, fused_fused);
          error_error = fma_rn(error, error, error_error);
          weight_weight = fma_rn(before, before, weight_weight);
          changed += mul_rn(code[j], WIDEN) != chosen[j] ? 1.0f : 0.0f;
        } else {
          const float before = fma_rn(scale, code[j], bias);
          const float moved = sub_rn(chosen[j], code[j]);
          const float error = fma_rn(scale, moved, -delta[row][j]);
          fused_delta = fma_rn(moved, delta[row][j], fused_delta);
          fused_fused = fma_rn(moved, moved, fused_fused);
          error_error = fma_rn(error, error, error_error);
          weight_weight = fma_rn(before, before, weight_weight);
          changed = add_rn(changed, smaller(magnitude(moved), 1.0f));
        }
      }
      total[row][0] += FITS ? fused_delta : mul_rn(scale, fused_delta);
      total[row][1] += delta_delta;
      // The comparison has the squared error of the whole group already.
      total[row][2] += COMPARES ? (leads_group ? group_error : 0.0f) : error_error;
      total[row][3] += FITS ? fused_fused : mul_rn(scale, mul_rn(scale, fused_fused));
      total[row][4] += weight_weight;
      if (CONTROL) {
        total[row][5] += zero_zero;
        total[row][7] += changed_at_zero;
      }
      total[row][6] += changed;
      total[row][8] += leads_group ? magnitude(scale) : 0.0f;
    }
  }
}

// Row by row, the sums of all lanes; neighbouring lanes store neighbouring ones.
const int ALL = ROWS * SUMS;
const int FRONT = ALL < 32 ? ALL : 32;
const int BACK = ALL > 32 ? ALL - 32 : 1;
Floats<FRONT> front;
#pragma unroll
for (int i = 0; i < FRONT; ++i) {
  front.at[i] = total[i / SUMS][i % SUMS];
}
const size_t first_sum = static_cast<size_t>(first_row) * uint(SUMS);
const float front_sum = sum_for_lane(front, lane);
if (lane < uint(FRONT)) {
  row_sums[first_sum + lane] = front_sum;
}
if (ALL > 32) {
  Floats<BACK> back;
  #pragma unroll
  for (int i = 0; i < BACK; ++i) {
    const int at = ALL > 32 ? 32 + i : 0;
    back.at[i] = total[at / SUMS][at % SUMS];
  }
  const float back_sum = sum_for_lane(back, lane);
  if (lane < uint(BACK)) {
    row_sums[first_sum + 32u + lane] = back_sum;
  }
}
