// The low-rank update of one row of a switch layer: result = factor * B[e] (gate * (A[e] hidden)).
//
// hidden   (rows / HIDDEN_SHARE, INPUTS) XT   HIDDEN_SHARE rows in a row read the same values
// down_all (M, RANKS, INPUTS) WT              A of every base expert
// up_all   (M, OUTPUTS, RANKS) WT             B of every base expert
// chosen   (rows) uint                        the base expert of each row
// gates    (rows / GATE_SHARE, EXPERTS) float one per RANKS / EXPERTS neighbouring ranks, if GATED
// factor   (1) float
// result   (rows, OUTPUTS) XT
//
// grid (256 * rows, parts), threadgroup (256): one row each, its outputs shared among the parts.
// Ranks whose gate is exactly zero are left out of `kept`: their A and B are not read.

const uint THREADS = 256u;
const uint EACH = 4u;  // ranks that a SIMD group sums at once: one load of hidden serves them all
const uint PER_GATE = uint(RANKS) / uint(EXPERTS);

SHARED_ARRAY(float, gate_of, EXPERTS);
SHARED_ARRAY(uint, kept, RANKS);
SHARED_ARRAY(uint, kept_total, 1);
SHARED_ARRAY(float, partial, SLICES * RANKS);
SHARED_ARRAY(float, inner, RANKS);

const uint row = threadgroup_position_in_grid.x;
const uint member = thread_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint team = simdgroup_index_in_threadgroup;

for (uint e = member; e < uint(EXPERTS); e += THREADS) {
  const uint at = row / uint(GATE_SHARE) * uint(EXPERTS) + e;
  gate_of[e] = GATED ? static_cast<float>(gates[at]) : 1.0f;
}
BARRIER();
for (uint j = member; j < uint(RANKS); j += THREADS) {
  const uint e = j / PER_GATE;
  uint before = 0u;
  for (uint f = 0u; f < e; ++f) {
    before += gate_of[f] != 0.0f ? PER_GATE : 0u;
  }
  if (gate_of[e] != 0.0f) {
    kept[before + j % PER_GATE] = j;
    before += PER_GATE;
  }
  if (j + 1u == uint(RANKS)) {
    kept_total[0] = before;
  }
}
BARRIER();

// Down: SLICES SIMD groups share a rank, each with every SLICES-th run of 32 inputs.
const uint total = kept_total[0];
const size_t expert = static_cast<size_t>(chosen[row]);
auto inputs = hidden + static_cast<size_t>(row / uint(HIDDEN_SHARE)) * INPUTS;
auto down = down_all + expert * (static_cast<size_t>(RANKS) * INPUTS);
const uint slice = team % uint(SLICES);
for (uint base = team / uint(SLICES) * EACH; base < total; base += 8u / uint(SLICES) * EACH) {
  float sums[EACH];
  size_t starts[EACH];
  for (uint i = 0u; i < EACH; ++i) {
    sums[i] = 0.0f;
    // Past the end: the last rank once more, from the cache, and not stored.
    starts[i] = static_cast<size_t>(kept[base + i < total ? base + i : total - 1u]) * INPUTS;
  }
  for (uint k = slice * 32u + lane; k < uint(INPUTS); k += uint(SLICES) * 32u) {
    const float value = static_cast<float>(inputs[k]);
    for (uint i = 0u; i < EACH; ++i) {
      sums[i] = fma_rn(value, static_cast<float>(down[starts[i] + k]), sums[i]);
    }
  }
  for (uint i = 0u; i < EACH; ++i) {
    const float sum = tree_sum(sums[i], 32u);
    if (lane == 0u && base + i < total) {
      partial[slice * uint(RANKS) + base + i] = sum;
    }
  }
}
BARRIER();
for (uint j = member; j < total; j += THREADS) {
  float sum = partial[j];
  for (uint s = 1u; s < uint(SLICES); ++s) {
    sum = add_rn(sum, partial[s * uint(RANKS) + j]);
  }
  inner[j] = mul_rn(sum, gate_of[kept[j] / PER_GATE]);
}
BARRIER();

// Up: SPAN neighbouring lanes share an output and read neighbouring ranks of its row of B.
auto up = up_all + expert * (static_cast<size_t>(OUTPUTS) * RANKS);
const uint step = THREADS / uint(SPAN);
const uint part = lane % uint(SPAN);
for (uint base = threadgroup_position_in_grid.y * step; base < uint(OUTPUTS);
     base += threadgroups_per_grid.y * step) {
  const uint n = base + member / uint(SPAN);
  float sum = 0.0f;
  if (n < uint(OUTPUTS)) {
    const size_t start = static_cast<size_t>(n) * RANKS;
    for (uint j = part; j < total; j += uint(SPAN)) {
      sum = fma_rn(inner[j], static_cast<float>(up[start + kept[j]]), sum);
    }
  }
  sum = tree_sum(sum, uint(SPAN));
  if (n < uint(OUTPUTS) && part == 0u) {
    result[static_cast<size_t>(row) * OUTPUTS + n] = static_cast<XT>(mul_rn(factor[0], sum));
  }
}
