// half and bfloat: 16-bit floats whose every operation is done in float and rounded once, ties to
// even. That rounding is exact for + - * / and sqrt: float has more than twice their digits.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

namespace emulator {

template <bool, typename T = void>
struct enable {};
template <typename T>
struct enable<true, T> {
  typedef T type;
};
template <typename T>
struct integral {
  static constexpr bool value = false;
};
#define EMULATOR_INTEGRAL(T) \
  template <>                \
  struct integral<T> {       \
    static constexpr bool value = true; \
  };
EMULATOR_INTEGRAL(bool)
EMULATOR_INTEGRAL(char)
EMULATOR_INTEGRAL(signed char)
EMULATOR_INTEGRAL(unsigned char)
EMULATOR_INTEGRAL(short)
EMULATOR_INTEGRAL(unsigned short)
EMULATOR_INTEGRAL(int)
EMULATOR_INTEGRAL(unsigned int)
EMULATOR_INTEGRAL(long)
EMULATOR_INTEGRAL(unsigned long)
EMULATOR_INTEGRAL(long long)
EMULATOR_INTEGRAL(unsigned long long)
#undef EMULATOR_INTEGRAL
template <typename I>
using if_integral = typename enable<integral<I>::value>::type;

template <typename A, typename T>
using if_same = typename enable<__is_same(A, T)>::type;

constexpr ushort half_from_float(float value) {
  uint bits = __builtin_bit_cast(uint, value);
  uint sign = (bits >> 16) & 0x8000u;
  uint size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return ushort(sign | 0x7e00u | ((size >> 13) & 0x1ffu));
  if (size >= 0x477ff000u) return ushort(sign | 0x7c00u);  // 65520 is the tie towards infinity
  if (size < 0x33000000u) return ushort(sign);             // under half of the smallest subnormal
  if (size < 0x38800000u) {                                // subnormal: multiples of 2^-24
    uint shift = 126u - (size >> 23);
    uint digits = (size & 0x7fffffu) | 0x800000u;
    uint kept = digits >> shift;
    uint rest = digits & ((1u << shift) - 1u);
    uint tie = 1u << (shift - 1u);
    kept += (rest > tie || (rest == tie && (kept & 1u))) ? 1u : 0u;
    return ushort(sign | kept);
  }
  size += 0xfffu + ((size >> 13) & 1u);
  return ushort(sign | ((size - 0x38000000u) >> 13));
}

constexpr float float_from_half(ushort bits) {
  uint sign = uint(bits & 0x8000u) << 16;
  uint exponent = (bits >> 10) & 31u;
  uint digits = bits & 0x3ffu;
  if (exponent == 0u) {
    float size = float(int(digits)) * 5.9604644775390625e-8f;  // 2^-24
    return __builtin_bit_cast(float, __builtin_bit_cast(uint, size) | sign);
  }
  uint moved = exponent == 31u ? 255u : exponent + 112u;
  return __builtin_bit_cast(float, sign | (moved << 23) | (digits << 13));
}

constexpr ushort bfloat_from_float(float value) {
  uint bits = __builtin_bit_cast(uint, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return ushort((bits >> 16) | 0x40u);
  return ushort((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

constexpr float float_from_bfloat(ushort bits) {
  return __builtin_bit_cast(float, uint(bits) << 16);
}

}  // namespace emulator

#define EMULATOR_COMPOUND(T, op)                     \
  template <typename X>                              \
  constexpr T& operator op##=(X other) {             \
    return *this = *this op other;                   \
  }
#define EMULATOR_MEMBERS(T)                          \
  constexpr T operator-() const { return make(ushort(bits ^ 0x8000u)); } \
  constexpr T operator+() const { return *this; }    \
  constexpr T& operator++() { return *this = T(float(*this) + 1.0f); }   \
  constexpr T& operator--() { return *this = T(float(*this) - 1.0f); }   \
  constexpr T operator++(int) { T old = *this; ++*this; return old; }    \
  constexpr T operator--(int) { T old = *this; --*this; return old; }    \
  EMULATOR_COMPOUND(T, +)                            \
  EMULATOR_COMPOUND(T, -)                            \
  EMULATOR_COMPOUND(T, *)                            \
  EMULATOR_COMPOUND(T, /)                            \
  static constexpr T make(ushort raw) {              \
    T result = T(0.0f);                              \
    result.bits = raw;                               \
    return result;                                   \
  }

// Converts from and to float without being asked, as in Metal.
struct half {
  ushort bits;
  half() = default;
  constexpr half(float value) : bits(emulator::half_from_float(value)) {}
  template <typename I, typename = emulator::if_integral<I>>
  constexpr half(I value) : bits(emulator::half_from_float(float(value))) {}
  constexpr operator float() const { return emulator::float_from_half(bits); }
  EMULATOR_MEMBERS(half)
};

// Converts to float without being asked; only an explicit conversion makes one.
struct bfloat {
  ushort bits;
  bfloat() = default;
  constexpr explicit bfloat(float value) : bits(emulator::bfloat_from_float(value)) {}
  template <typename I, typename = emulator::if_integral<I>>
  constexpr explicit bfloat(I value) : bits(emulator::bfloat_from_float(float(value))) {}
  constexpr operator float() const { return emulator::float_from_bfloat(bits); }
  EMULATOR_MEMBERS(bfloat)
};

// Both sides have to be T: with a float on one side the built-in operator is left, after a
// conversion that nobody wrote, so that a * b + c may be contracted as Metal's compiler does it.
#define EMULATOR_ARITHMETIC(T, op)                                                        \
  template <typename A, typename = emulator::if_same<A, T>>                               \
  constexpr T operator op(A a, A b) { return T(float(a) op float(b)); }                   \
  template <typename I, typename = emulator::if_integral<I>>                              \
  constexpr T operator op(T a, I b) { return T(float(a) op float(T(b))); }                \
  template <typename I, typename = emulator::if_integral<I>>                              \
  constexpr T operator op(I a, T b) { return T(float(T(a)) op float(b)); }
EMULATOR_ARITHMETIC(half, +)
EMULATOR_ARITHMETIC(half, -)
EMULATOR_ARITHMETIC(half, *)
EMULATOR_ARITHMETIC(half, /)
EMULATOR_ARITHMETIC(bfloat, +)
EMULATOR_ARITHMETIC(bfloat, -)
EMULATOR_ARITHMETIC(bfloat, *)
EMULATOR_ARITHMETIC(bfloat, /)

typedef half float16_t;
typedef bfloat bfloat16_t;
