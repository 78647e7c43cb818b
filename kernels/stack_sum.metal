// Packed stacks for a tile of tokens, in two launches of this text:
//   PHASE 0 (down)  result[t, row] = gate[t, row's expert] * sum over c of left[t, c] right[row, c]
//   PHASE 1 (up)    result[t, row] = factor * sum over c of left[t, c] right[row, c]
// down has left = x, right = A (rows are ranks); up has left = down's result, right = B (columns
// are ranks). Two launches, since every output needs all ranks of its token.
//
// left   (tiles * TILE, COLUMNS) LT
// right  (ROWS, COLUMNS) WT
// gates  (tiles * TILE, EXPERTS) float    one per rank count / EXPERTS neighbouring ranks
// factor (1) float
// result (tiles * TILE, ROWS) OT
//
// grid (threads * tiles, blocks of rows), threadgroup (threads), a multiple of 32. SPAN
// neighbouring lanes share EACH rows of `right`. An expert that no token of the tile uses is not
// read, neither its rows nor its columns. Neighbouring threadgroups take neighbouring tiles, the
// same weights.

const uint PER_GATE = uint(PHASE == 0 ? ROWS : COLUMNS) / uint(EXPERTS);

SHARED_ARRAY(uint, used, PHASE == 1 ? EXPERTS : 1);
SHARED_ARRAY(ushort, kept, PHASE == 1 ? COLUMNS : 1);
SHARED_ARRAY(uint, kept_total, 1);

const uint member = thread_index_in_threadgroup;
const uint threads = threads_per_threadgroup.x;
const uint part = thread_index_in_simdgroup % uint(SPAN);
const uint first_token = threadgroup_position_in_grid.x * uint(TILE);

// EACH divides PER_GATE in phase 0, so that the rows of a lane have one expert.
const uint row = (threadgroup_position_in_grid.y * threads + member) / uint(SPAN) * uint(EACH);
uint count = 0u;

if (PHASE == 0) {
  if (row < uint(ROWS)) {
    for (uint t = 0u; t < uint(TILE); ++t) {
      if (gates[(first_token + t) * uint(EXPERTS) + row / PER_GATE] != 0.0f) {
        count = uint(COLUMNS);
      }
    }
  }
} else {
  for (uint e = member; e < uint(EXPERTS); e += threads) {
    uint any = 0u;
    for (uint t = 0u; t < uint(TILE); ++t) {
      any |= gates[(first_token + t) * uint(EXPERTS) + e] != 0.0f ? 1u : 0u;
    }
    used[e] = any;
  }
  BARRIER();
  for (uint j = member; j < uint(COLUMNS); j += threads) {
    const uint e = j / PER_GATE;
    uint before = 0u;
    for (uint f = 0u; f < e; ++f) {
      before += used[f] * PER_GATE;
    }
    if (used[e] != 0u) {
      kept[before + j % PER_GATE] = static_cast<ushort>(j);
      before += PER_GATE;
    }
    if (j + 1u == uint(COLUMNS)) {
      kept_total[0] = before;
    }
  }
  BARRIER();
  count = kept_total[0];
}

float sums[EACH * TILE];
size_t starts[EACH];
for (uint i = 0u; i < uint(EACH); ++i) {
  // Past the end: the last row once more, not stored.
  const uint inside = row + i < uint(ROWS) ? row + i : uint(ROWS) - 1u;
  starts[i] = static_cast<size_t>(inside) * COLUMNS;
  for (uint t = 0u; t < uint(TILE); ++t) {
    sums[i * uint(TILE) + t] = 0.0f;
  }
}
const size_t tile_start = static_cast<size_t>(first_token) * COLUMNS;
for (uint j = part; j < count; j += uint(SPAN)) {
  const uint c = PHASE == 1 ? static_cast<uint>(kept[j]) : j;
  float values[TILE];
  for (uint t = 0u; t < uint(TILE); ++t) {
    values[t] = static_cast<float>(left[tile_start + t * uint(COLUMNS) + c]);
  }
  for (uint i = 0u; i < uint(EACH); ++i) {
    const float weight = static_cast<float>(right[starts[i] + c]);
    for (uint t = 0u; t < uint(TILE); ++t) {
      sums[i * uint(TILE) + t] = fma_rn(values[t], weight, sums[i * uint(TILE) + t]);
    }
  }
}
for (uint i = 0u; i < uint(EACH); ++i) {
  for (uint t = 0u; t < uint(TILE); ++t) {
    const float sum = tree_sum(sums[i * uint(TILE) + t], uint(SPAN));
    if (part == 0u && row + i < uint(ROWS)) {
      const uint token = first_token + t;
      float multiplier = factor[0];
      if (PHASE == 0) {
        multiplier = gates[token * uint(EXPERTS) + (row + i) / PER_GATE];
      }
      const size_t at = static_cast<size_t>(token) * ROWS + row + i;
      result[at] = static_cast<OT>(mul_rn(multiplier, sum));
    }
  }
}
