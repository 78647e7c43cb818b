// Operations between the 32 lanes of a SIMD group: every lane brings a value to a meeting and
// leaves with what the operation gives it. Lanes that do not exist bring poison.
#pragma once

// Where an operation is called; shown in reports.
#define EMULATOR_SITE const char* file = __builtin_FILE(), uint line = __builtin_LINE()

namespace emulator {

template <typename T>
inline __attribute__((always_inline)) EmulatorMeeting* meet(EmulatorOperation operation,
                                                            const char* what, uint key, T value,
                                                            const char* file, uint line) {
  static_assert(sizeof(T) <= EMULATOR_SLOT, "a lane hands over 16 bytes at most");
  alignas(16) unsigned char box[EMULATOR_SLOT] = {};
  __builtin_memcpy(box, &value, sizeof(T));
  return emulator_meet(operation, what, file, line, key, box);
}
template <typename T>
inline T open(const unsigned char* slot) {
  T value;
  __builtin_memcpy(&value, slot, sizeof(T));
  return value;
}
template <typename T>
inline T brought(const EmulatorMeeting* m, uint lane) { return open<T>(m->slot[lane]); }

// The value of all present lanes together, in the order that the launch asks for.
template <typename T, typename F>
inline T reduce(const char* what, T value, F join, const char* file, uint line) {
  EmulatorMeeting* m = meet(EMULATOR_REDUCE, what, 0u, value, file, line);
  if (!m->done) {
    T part[EMULATOR_LANES];
    bool full[EMULATOR_LANES];
    for (uint i = 0; i < EMULATOR_LANES; i++) {
      part[i] = brought<T>(m, i);
      full[i] = (m->present >> i) & 1u;
    }
    // Joins lane `from` into lane `to`, where an absent lane leaves the other as it is.
    auto take = [&](uint to, uint from) {
      if (full[to] && full[from]) part[to] = T(join(part[to], part[from]));
      if (!full[to]) part[to] = part[from];
      full[to] = full[to] || full[from];
    };
    if (m->reduction == EMULATOR_SEQUENCE) {
      for (uint i = 1; i < EMULATOR_LANES; i++) take(0, i);
    } else if (m->reduction == EMULATOR_HALVES) {
      for (uint apart = 16; apart > 0; apart >>= 1)
        for (uint i = 0; i < apart; i++) take(i, i + apart);
    } else {
      for (uint apart = 1; apart < EMULATOR_LANES; apart <<= 1)
        for (uint i = 0; i < EMULATOR_LANES; i += 2 * apart) take(i, i + apart);
    }
    __builtin_memcpy(m->result[0], &part[0], sizeof(T));
    m->done = 1;
  }
  return open<T>(m->result[0]);
}

// Lane i gets lanes 0..i together (inclusive), or 0..i-1 and `start` for lane 0.
template <typename T, typename F>
inline T scan(const char* what, T value, F join, bool inclusive, T start, const char* file,
              uint line) {
  EmulatorMeeting* m = meet(EMULATOR_SCAN, what, inclusive, value, file, line);
  if (!m->done) {
    T part[EMULATOR_LANES];
    for (uint i = 0; i < EMULATOR_LANES; i++) part[i] = brought<T>(m, i);
    if (m->reduction == EMULATOR_SEQUENCE) {
      for (uint i = 1; i < EMULATOR_LANES; i++) part[i] = T(join(part[i - 1], part[i]));
    } else {
      for (uint apart = 1; apart < EMULATOR_LANES; apart <<= 1)
        for (uint i = EMULATOR_LANES - 1; i >= apart; i--)
          part[i] = T(join(part[i - apart], part[i]));
    }
    for (uint i = 0; i < EMULATOR_LANES; i++)
      __builtin_memcpy(m->result[i], &part[i], sizeof(T));
    m->done = 1;
  }
  if (inclusive) return open<T>(m->result[m->lane]);
  return m->lane == 0 ? start : open<T>(m->result[m->lane - 1]);
}

}  // namespace emulator

namespace metal {

enum class mem_flags : uint {
  mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4,
  mem_threadgroup_imageblock = 8, mem_object_data = 16,
};
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

inline void threadgroup_barrier(mem_flags flags, EMULATOR_SITE) {
  emulator::meet(EMULATOR_THREADGROUP_BARRIER, "threadgroup_barrier", uint(flags), 0, file, line);
}
inline void simdgroup_barrier(mem_flags flags, EMULATOR_SITE) {
  emulator::meet(EMULATOR_SIMDGROUP_BARRIER, "simdgroup_barrier", uint(flags), 0, file, line);
}

#define EMULATOR_REDUCTION(name, expression)                                           \
  template <typename T>                                                                \
  inline T name(T value, EMULATOR_SITE) {                                              \
    return emulator::reduce(#name, value, [](T a, T b) { return expression; }, file, line); \
  }
EMULATOR_REDUCTION(simd_sum, a + b)
EMULATOR_REDUCTION(simd_product, a * b)
EMULATOR_REDUCTION(simd_max, max(a, b))
EMULATOR_REDUCTION(simd_min, min(a, b))
EMULATOR_REDUCTION(simd_and, a & b)
EMULATOR_REDUCTION(simd_or, a | b)
EMULATOR_REDUCTION(simd_xor, a ^ b)

#define EMULATOR_PREFIX(name, expression, inclusive, start)                            \
  template <typename T>                                                                \
  inline T name(T value, EMULATOR_SITE) {                                              \
    return emulator::scan(#name, value, [](T a, T b) { return expression; }, inclusive, \
                          T(start), file, line);                                       \
  }
EMULATOR_PREFIX(simd_prefix_inclusive_sum, a + b, true, 0)
EMULATOR_PREFIX(simd_prefix_exclusive_sum, a + b, false, 0)
EMULATOR_PREFIX(simd_prefix_inclusive_product, a * b, true, 1)
EMULATOR_PREFIX(simd_prefix_exclusive_product, a * b, false, 1)

// Lane numbers wrap at 32, where Metal leaves them undefined; a lane that is absent gives poison.
template <typename T>
inline T simd_shuffle(T value, ushort lane, EMULATOR_SITE) {
  EmulatorMeeting* m = emulator::meet(EMULATOR_SHUFFLE, "simd_shuffle", 0u, value, file, line);
  return emulator::brought<T>(m, lane & 31u);
}
template <typename T>
inline T simd_shuffle_xor(T value, ushort mask, EMULATOR_SITE) {
  EmulatorMeeting* m =
      emulator::meet(EMULATOR_SHUFFLE_XOR, "simd_shuffle_xor", mask, value, file, line);
  return emulator::brought<T>(m, (m->lane ^ mask) & 31u);
}
template <typename T>
inline T simd_shuffle_and_fill_down(T value, T filling, ushort delta, EMULATOR_SITE) {
  EmulatorMeeting* m = emulator::meet(EMULATOR_SHUFFLE_DOWN, "simd_shuffle_and_fill_down", delta,
                                      value, file, line);
  return m->lane + delta < 32u ? emulator::brought<T>(m, m->lane + delta) : filling;
}
template <typename T>
inline T simd_shuffle_and_fill_up(T value, T filling, ushort delta, EMULATOR_SITE) {
  EmulatorMeeting* m =
      emulator::meet(EMULATOR_SHUFFLE_UP, "simd_shuffle_and_fill_up", delta, value, file, line);
  return m->lane >= delta ? emulator::brought<T>(m, m->lane - delta) : filling;
}
// The lanes at the end keep their own value.
template <typename T>
inline T simd_shuffle_down(T value, ushort delta, EMULATOR_SITE) {
  EmulatorMeeting* m =
      emulator::meet(EMULATOR_SHUFFLE_DOWN, "simd_shuffle_down", delta, value, file, line);
  return emulator::brought<T>(m, m->lane + delta < 32u ? m->lane + delta : m->lane);
}
template <typename T>
inline T simd_shuffle_up(T value, ushort delta, EMULATOR_SITE) {
  EmulatorMeeting* m =
      emulator::meet(EMULATOR_SHUFFLE_UP, "simd_shuffle_up", delta, value, file, line);
  return emulator::brought<T>(m, m->lane >= delta ? m->lane - delta : m->lane);
}
template <typename T>
inline T simd_shuffle_rotate_down(T value, ushort delta, EMULATOR_SITE) {
  EmulatorMeeting* m =
      emulator::meet(EMULATOR_ROTATE, "simd_shuffle_rotate_down", delta, value, file, line);
  return emulator::brought<T>(m, (m->lane + delta) & 31u);
}
template <typename T>
inline T simd_shuffle_rotate_up(T value, ushort delta, EMULATOR_SITE) {
  EmulatorMeeting* m =
      emulator::meet(EMULATOR_ROTATE, "simd_shuffle_rotate_up", delta, value, file, line);
  return emulator::brought<T>(m, (m->lane - delta) & 31u);
}
template <typename T>
inline T simd_broadcast(T value, ushort lane, EMULATOR_SITE) {
  EmulatorMeeting* m =
      emulator::meet(EMULATOR_BROADCAST, "simd_broadcast", lane, value, file, line);
  return emulator::brought<T>(m, lane & 31u);
}
template <typename T>
inline T simd_broadcast_first(T value, EMULATOR_SITE) {
  EmulatorMeeting* m =
      emulator::meet(EMULATOR_BROADCAST, "simd_broadcast_first", 0u, value, file, line);
  return emulator::brought<T>(m, uint(__builtin_ctz(m->present)));
}

// Which lanes hold something to be true, lane i as bit i.
struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  uint present;
  explicit operator vote_t() const { return votes; }
  bool all() const { return uint(votes) == present; }
  bool any() const { return votes != 0; }
};
inline simd_vote simd_ballot(bool value, EMULATOR_SITE) {
  EmulatorMeeting* m = emulator::meet(EMULATOR_VOTE, "simd_ballot", 0u, value, file, line);
  ulong votes = 0;
  for (uint i = 0; i < EMULATOR_LANES; i++)
    if (((m->present >> i) & 1u) && m->slot[i][0] != 0) votes |= 1ul << i;
  return simd_vote{votes, m->present};
}
inline bool simd_all(bool value, EMULATOR_SITE) { return simd_ballot(value, file, line).all(); }
inline bool simd_any(bool value, EMULATOR_SITE) { return simd_ballot(value, file, line).any(); }
inline simd_vote simd_active_threads_mask(EMULATOR_SITE) { return simd_ballot(true, file, line); }
inline bool simd_is_first(EMULATOR_SITE) {
  EmulatorMeeting* m = emulator::meet(EMULATOR_VOTE, "simd_is_first", 0u, true, file, line);
  return m->lane == uint(__builtin_ctz(m->present));
}

// Operations of four neighbouring lanes; here all lanes of the SIMD group have to come.
template <typename T>
inline T quad_shuffle(T value, ushort lane, EMULATOR_SITE) {
  EmulatorMeeting* m = emulator::meet(EMULATOR_SHUFFLE, "quad_shuffle", 0u, value, file, line);
  return emulator::brought<T>(m, (m->lane & ~3u) | (lane & 3u));
}
template <typename T>
inline T quad_shuffle_xor(T value, ushort mask, EMULATOR_SITE) {
  EmulatorMeeting* m =
      emulator::meet(EMULATOR_SHUFFLE_XOR, "quad_shuffle_xor", mask, value, file, line);
  return emulator::brought<T>(m, m->lane ^ (mask & 3u));
}
template <typename T>
inline T quad_broadcast(T value, ushort lane, EMULATOR_SITE) {
  return quad_shuffle(value, lane, file, line);
}
template <typename T>
inline T quad_sum(T value, EMULATOR_SITE) {
  EmulatorMeeting* m = emulator::meet(EMULATOR_REDUCE, "quad_sum", 0u, value, file, line);
  uint first = m->lane & ~3u;
  T a = emulator::brought<T>(m, first), b = emulator::brought<T>(m, first + 1u);
  T c = emulator::brought<T>(m, first + 2u), d = emulator::brought<T>(m, first + 3u);
  if (m->reduction == EMULATOR_SEQUENCE) return ((a + b) + c) + d;
  return m->reduction == EMULATOR_HALVES ? (a + c) + (b + d) : (a + b) + (c + d);
}

}  // namespace metal
