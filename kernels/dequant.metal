// Packed codes to values of T: scale * code + bias with a rounding to T after each operation, which
// is mx.dequantize on the CPU device to the bit.
//
// old_codes    the bit stream of all codes, in units of UNIT_BITS (8, or the codes of a word)
// old_scales   (weights / GROUP) T, old_biases alike
// word_total   (1) uint: weights / VALUES
// words        (word_total) uint64: VALUES neighbouring values each, 4 of 16 bits or 2 of 32
//
// grid: 32 threads for every 32 * WORDS words. Rows and groups are whole multiples of a word, so
// the whole tensor is one stream. Neighbouring lanes store neighbouring words; a lane's WORDS words
// are 32 apart and independent of each other, so that their loads overlap.

const uint VALUES = 64u / uint(VALUE_BITS);
const uint FIELD = VALUES * uint(BITS);  // bits of the codes of one word
const uint LOWEST_ONE = FIELD & (~FIELD + 1u);
// Fields start at multiples of LOWEST_ONE bits, so this is the farthest start inside a unit of 8.
const uint LATEST_START = LOWEST_ONE < 8u ? 8u - LOWEST_ONE : 0u;
const uint LOADS = UNIT_BITS == 8 ? (FIELD + LATEST_START + 7u) / 8u : 1u;
const uint LAST_UNIT = uint(BITS) * 8u / uint(UNIT_BITS) - 1u;  // of eight codes

const size_t block = thread_position_in_grid.x / 32u;
const uint lane = thread_index_in_simdgroup;
const size_t first_word = block * (32u * uint(WORDS)) + lane;

for (uint i = 0u; i < uint(WORDS); ++i) {
  const size_t word = first_word + i * 32u;
  if (word < word_total[0]) {
    const size_t weight = word * VALUES;
    const float scale = static_cast<float>(old_scales[weight / uint(GROUP)]);
    const float bias = static_cast<float>(old_biases[weight / uint(GROUP)]);
    const uint start = static_cast<uint>(weight % 8u) * uint(BITS);
    auto octet = old_codes + weight / 8u * (LAST_UNIT + 1u);
    uint field = 0u;
    for (uint load = 0u; load < LOADS; ++load) {
      // A field that ends early needs no further unit: never read one past its octet.
      const uint unit = start / uint(UNIT_BITS) + load;
      field |= static_cast<uint>(octet[unit < LAST_UNIT ? unit : LAST_UNIT]) << load * 8u;
    }
    field >>= start % uint(UNIT_BITS);

    uint bits[2] = {0u, 0u};
    for (uint j = 0u; j < VALUES; ++j) {
      const float code = octet_code<BITS>(field, 0u, int(j));
      const float value = add_rn(round_to<T>(mul_rn(scale, code)), bias);
      const uint at = j * uint(VALUE_BITS);
      bits[at / 32u] |= storage_bits<T>(value) << at % 32u;
    }
    words[word] = static_cast<uint64_t>(bits[1]) << 32 | bits[0];
  }
}
