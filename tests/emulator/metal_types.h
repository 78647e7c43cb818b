// The parts of Metal's library that are about types: limits, traits, atomics, constants.
#pragma once

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 0x1.fffffep127f
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1.0p-126f
#define FLT_EPSILON 0x1.0p-23f
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(0x1.0p-14f)
#define HALF_EPSILON half(0x1.0p-10f)
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define CHAR_BIT 8
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define UCHAR_MAX 255

namespace metal {

template <bool B, typename T = void>
using enable_if = emulator::enable<B, T>;
template <bool B, typename T = void>
using enable_if_t = typename emulator::enable<B, T>::type;
template <typename T, T V>
struct integral_constant {
  static constexpr T value = V;
  constexpr operator T() const { return V; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <bool B>
using bool_constant = integral_constant<bool, B>;

template <typename T, typename U>
constexpr bool is_same_v = __is_same(T, U);
template <typename T, typename U>
struct is_same : bool_constant<__is_same(T, U)> {};
template <typename T>
constexpr bool is_integral_v = emulator::integral<T>::value;
template <typename T>
struct is_integral : bool_constant<is_integral_v<T>> {};
template <typename T>
constexpr bool is_floating_point_v =
    __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat);
template <typename T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <typename T>
constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <typename T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <typename T, bool = is_integral_v<T>>
struct is_unsigned : bool_constant<(T(0) < T(-1))> {};
template <typename T>
struct is_unsigned<T, false> : false_type {};
template <typename T>
constexpr bool is_unsigned_v = is_unsigned<T>::value;
template <typename T>
constexpr bool is_signed_v = is_arithmetic_v<T> && !is_unsigned_v<T>;
template <bool B, typename T, typename U>
struct conditional { typedef T type; };
template <typename T, typename U>
struct conditional<false, T, U> { typedef U type; };
template <bool B, typename T, typename U>
using conditional_t = typename conditional<B, T, U>::type;
template <typename T> struct remove_reference { typedef T type; };
template <typename T> struct remove_reference<T&> { typedef T type; };
template <typename T> struct remove_const { typedef T type; };
template <typename T> struct remove_const<const T> { typedef T type; };
template <typename T>
using remove_cv_t = typename remove_const<T>::type;
template <typename T>
using remove_reference_t = typename remove_reference<T>::type;
template <typename T> struct remove_pointer { typedef T type; };
template <typename T> struct remove_pointer<T*> { typedef T type; };
template <typename T> struct remove_pointer<T* const> { typedef T type; };
template <typename T>
using remove_pointer_t = typename remove_pointer<T>::type;

template <typename T>
struct numeric_limits {
  static constexpr int bits = 8 * sizeof(T);
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr int digits = bits - (is_signed ? 1 : 0);
  static constexpr T max() { return T(~0ul >> (64 - digits)); }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
template <>
struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
};
#define EMULATOR_LIMITS(T, largest, smallest, step)                                   \
  template <>                                                                         \
  struct numeric_limits<T> {                                                          \
    static constexpr T max() { return T(largest); }                                   \
    static constexpr T min() { return T(smallest); }                                  \
    static constexpr T lowest() { return T(-(largest)); }                             \
    static constexpr T epsilon() { return T(step); }                                  \
    static constexpr T infinity() { return T(__builtin_inff()); }                     \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }                  \
  };
EMULATOR_LIMITS(float, 0x1.fffffep127f, 0x1.0p-126f, 0x1.0p-23f)
EMULATOR_LIMITS(half, 65504.0f, 0x1.0p-14f, 0x1.0p-10f)
EMULATOR_LIMITS(bfloat, 0x1.fep127f, 0x1.0p-126f, 0x1.0p-7f)

// Threads run one after the other here: an atomic is a value.
enum memory_order { memory_order_relaxed };
template <typename T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
template <typename T>
inline T atomic_load_explicit(const volatile atomic<T>* at, memory_order) {
  return const_cast<const atomic<T>*>(at)->value;
}
template <typename T>
inline void atomic_store_explicit(volatile atomic<T>* at, itself<T> with, memory_order) {
  const_cast<atomic<T>*>(at)->value = with;
}
#define EMULATOR_ATOMIC(name, expression)                                             \
  template <typename T>                                                               \
  inline T name(volatile atomic<T>* at, itself<T> with, memory_order) {               \
    T old = const_cast<atomic<T>*>(at)->value;                                        \
    const_cast<atomic<T>*>(at)->value = T(expression);                                \
    return old;                                                                       \
  }
EMULATOR_ATOMIC(atomic_exchange_explicit, with)
EMULATOR_ATOMIC(atomic_fetch_add_explicit, old + with)
EMULATOR_ATOMIC(atomic_fetch_sub_explicit, old - with)
EMULATOR_ATOMIC(atomic_fetch_max_explicit, max(old, with))
EMULATOR_ATOMIC(atomic_fetch_min_explicit, min(old, with))
EMULATOR_ATOMIC(atomic_fetch_and_explicit, old & with)
EMULATOR_ATOMIC(atomic_fetch_or_explicit, old | with)
EMULATOR_ATOMIC(atomic_fetch_xor_explicit, old ^ with)
template <typename T>
inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* at, T* expected,
                                                  itself<T> with, memory_order, memory_order) {
  atomic<T>* here = const_cast<atomic<T>*>(at);
  if (here->value == *expected) {
    here->value = with;
    return true;
  }
  *expected = here->value;
  return false;
}

}  // namespace metal
