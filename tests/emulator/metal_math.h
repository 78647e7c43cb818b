// Metal's mathematical functions on one value: one overload for each type, so that a call with
// mixed types stays ambiguous. Accuracy is that of the C library, not of a GPU.
#pragma once

namespace emulator {

// a * b + c for 16-bit floats: the sum in double, rounded to odd, so that the last rounding, to
// the 16-bit type, is the only one that counts.
constexpr float fused(float a, float b, float c) {
  double product = double(a) * double(b);
  double sum = product + double(c);
  double part = sum - product;
  double lost = (product - (sum - part)) + (double(c) - part);
  ulong bits = __builtin_bit_cast(ulong, sum);
  if (lost != 0.0 && sum - sum == 0.0 && (bits & 1u) == 0u) {
    bits += (lost > 0.0) == (sum > 0.0) ? 1u : -1ul;
  }
  // To float, rounded to odd again: cut, and let the last bit tell that something was cut.
  sum = __builtin_bit_cast(double, bits);
  float cut = float(sum);
  if (double(cut) != sum && cut - cut == 0.0f) {
    uint small = __builtin_bit_cast(uint, cut);
    bool above = (double(cut) > sum) == (sum > 0.0);
    if (above) small -= 1u;
    cut = __builtin_bit_cast(float, small | 1u);
  }
  return cut;
}

inline float fract(float x) {
  float part = x - __builtin_floorf(x);
  return part < 0x1.fffffep-1f ? part : 0x1.fffffep-1f;
}
constexpr float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f; }
constexpr float saturate(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float sinpi(float x) { return float(__builtin_sin(double(x) * 3.14159265358979323846L)); }
inline float cospi(float x) { return float(__builtin_cos(double(x) * 3.14159265358979323846L)); }
inline float exp10(float x) { return float(__builtin_pow(double(10), double(x))); }
inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }

}  // namespace emulator

#define EMULATOR_UNARY_FUNCTIONS(F)                                                        \
  F(abs, __builtin_fabsf) F(fabs, __builtin_fabsf) F(acos, __builtin_acosf)                \
  F(acosh, __builtin_acoshf) F(asin, __builtin_asinf) F(asinh, __builtin_asinhf)           \
  F(atan, __builtin_atanf) F(atanh, __builtin_atanhf) F(ceil, __builtin_ceilf)             \
  F(cos, __builtin_cosf) F(cosh, __builtin_coshf) F(cospi, emulator::cospi)                \
  F(exp, __builtin_expf) F(exp10, emulator::exp10) F(exp2, __builtin_exp2f)                \
  F(floor, __builtin_floorf) F(fract, emulator::fract) F(log, __builtin_logf)              \
  F(log10, __builtin_log10f) F(log2, __builtin_log2f) F(rint, __builtin_rintf)             \
  F(round, __builtin_roundf) F(rsqrt, emulator::rsqrt) F(saturate, emulator::saturate)     \
  F(sign, emulator::sign) F(sin, __builtin_sinf) F(sinh, __builtin_sinhf)                  \
  F(sinpi, emulator::sinpi) F(sqrt, __builtin_sqrtf) F(tan, __builtin_tanf)                \
  F(tanh, __builtin_tanhf) F(trunc, __builtin_truncf)
#define EMULATOR_BINARY_FUNCTIONS(F)                                                       \
  F(atan2, __builtin_atan2f) F(copysign, __builtin_copysignf) F(fdim, __builtin_fdimf)     \
  F(fmax, __builtin_fmaxf) F(fmin, __builtin_fminf) F(fmod, __builtin_fmodf)               \
  F(max, __builtin_fmaxf) F(min, __builtin_fminf) F(pow, __builtin_powf)                   \
  F(powr, __builtin_powf)

#define EMULATOR_UNARY(name, f)                                       \
  inline float name(float x) { return f(x); }                         \
  inline half name(half x) { return half(f(float(x))); }              \
  inline bfloat name(bfloat x) { return bfloat(f(float(x))); }        \
  template <typename T, int N>                                        \
  inline vec<T, N> name(vec<T, N> x) {                                \
    return each<T>(x, [](T u) { return T(name(u)); });                \
  }
#define EMULATOR_BINARY(name, f)                                                        \
  inline float name(float x, float y) { return f(x, y); }                               \
  inline half name(half x, half y) { return half(f(float(x), float(y))); }              \
  inline bfloat name(bfloat x, bfloat y) { return bfloat(f(float(x), float(y))); }      \
  template <typename T, int N>                                                          \
  inline vec<T, N> name(vec<T, N> x, vec<T, N> y) {                                     \
    return each<T>(x, y, [](T u, T v) { return T(name(u, v)); });                       \
  }                                                                                     \
  template <typename T, int N>                                                          \
  inline vec<T, N> name(vec<T, N> x, itself<T> y) { return name(x, vec<T, N>(y)); }

namespace metal {

EMULATOR_UNARY_FUNCTIONS(EMULATOR_UNARY)
EMULATOR_BINARY_FUNCTIONS(EMULATOR_BINARY)

// With several roundings these could differ by the target; here they are what they say.
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(emulator::fused(a, b, c)); }
inline bfloat fma(bfloat a, bfloat b, bfloat c) { return bfloat(emulator::fused(a, b, c)); }
inline float divide(float a, float b) { return a / b; }
inline half divide(half a, half b) { return a / b; }
inline float ldexp(float x, int power) { return __builtin_ldexpf(x, power); }
inline float nextafter(float x, float y) { return __builtin_nextafterf(x, y); }
inline float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
inline float smoothstep(float low, float high, float x) {
  float t = emulator::saturate((x - low) / (high - low));
  return t * t * (3.0f - 2.0f * t);
}
inline float frexp(float x, int& power) { return __builtin_frexpf(x, &power); }
inline float modf(float x, float& whole) { return __builtin_modff(x, &whole); }

#define EMULATOR_FLOATING(T)                                                             \
  inline bool isnan(T x) { return float(x) != float(x); }                                \
  inline bool isinf(T x) { return __builtin_fabsf(float(x)) == __builtin_inff(); }       \
  inline bool isfinite(T x) { return __builtin_fabsf(float(x)) < __builtin_inff(); }     \
  inline bool signbit(T x) { return __builtin_signbit(float(x)) != 0; }                  \
  inline T mix(T x, T y, T a) { return T(x + T(T(y - x) * a)); }                         \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }                  \
  inline T fmin3(T a, T b, T c) { return min(min(a, b), c); }                            \
  inline T fmax3(T a, T b, T c) { return max(max(a, b), c); }
EMULATOR_FLOATING(float)
EMULATOR_FLOATING(half)
EMULATOR_FLOATING(bfloat)

#define EMULATOR_WHOLE(T)                                                                \
  inline T max(T x, T y) { return x < y ? y : x; }                                       \
  inline T min(T x, T y) { return y < x ? y : x; }                                       \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }                  \
  inline T popcount(T x) {                                                               \
    return T(__builtin_popcountl(ulong(x) & (~0ul >> (64 - 8 * sizeof(T)))));            \
  }                                                                                      \
  inline T clz(T x) {                                                                    \
    ulong wide = ulong(x) & (~0ul >> (64 - 8 * sizeof(T)));                              \
    return T(wide == 0 ? 8 * sizeof(T) : __builtin_clzl(wide) - (64 - 8 * sizeof(T)));   \
  }                                                                                      \
  inline T ctz(T x) { return T(x == 0 ? 8 * sizeof(T) : __builtin_ctzl(ulong(x))); }     \
  inline T reverse_bits(T x) {                                                           \
    ulong from = ulong(x), to = 0;                                                       \
    for (uint i = 0; i < 8 * sizeof(T); i++) to = (to << 1) | ((from >> i) & 1ul);       \
    return T(to);                                                                        \
  }
EMULATOR_WHOLE(char)
EMULATOR_WHOLE(int8_t)
EMULATOR_WHOLE(uchar)
EMULATOR_WHOLE(short)
EMULATOR_WHOLE(ushort)
EMULATOR_WHOLE(int)
EMULATOR_WHOLE(uint)
EMULATOR_WHOLE(long)
EMULATOR_WHOLE(ulong)

inline uint abs(uint x) { return x; }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline int mulhi(int a, int b) { return int((long(a) * long(b)) >> 32); }
inline uint mulhi(uint a, uint b) { return uint((ulong(a) * ulong(b)) >> 32); }
inline uint rotate(uint x, uint n) { return (x << (n & 31u)) | (x >> ((32u - n) & 31u)); }
inline uint absdiff(uint a, uint b) { return a < b ? b - a : a - b; }
inline uint absdiff(int a, int b) { return a < b ? uint(b) - uint(a) : uint(a) - uint(b); }
inline uint extract_bits(uint x, uint offset, uint count) {
  return count == 0 ? 0u : (x >> offset) & (~0u >> (32u - count));
}
inline uint insert_bits(uint base, uint bits, uint offset, uint count) {
  uint mask = count == 0 ? 0u : (~0u >> (32u - count)) << offset;
  return (base & ~mask) | ((bits << offset) & mask);
}

// `b` where `condition` holds, else `a`.
template <typename T>
constexpr T select(T a, T b, bool condition) { return condition ? b : a; }
template <typename T, int N>
constexpr vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> condition) {
  for (int i = 0; i < N; i++) a[i] = condition[i] ? b[i] : a[i];
  return a;
}
template <int N>
constexpr bool any(vec<bool, N> v) {
  for (int i = 0; i < N; i++) if (v[i]) return true;
  return false;
}
template <int N>
constexpr bool all(vec<bool, N> v) {
  for (int i = 0; i < N; i++) if (!v[i]) return false;
  return true;
}
template <typename T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum = sum + a[i] * b[i];
  return sum;
}
template <typename T, int N>
inline T length_squared(vec<T, N> a) { return dot(a, a); }
template <typename T, int N>
inline T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <typename T, int N>
inline T distance(vec<T, N> a, vec<T, N> b) { return length(a - b); }
template <typename T, int N>
inline vec<T, N> normalize(vec<T, N> a) { return a * rsqrt(dot(a, a)); }
template <typename T, int N>
inline vec<T, N> clamp(vec<T, N> x, itself<vec<T, N>> low, itself<vec<T, N>> high) {
  return min(max(x, low), high);
}
template <typename T, int N>
inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; i++) a[i] = fma(a[i], b[i], c[i]);
  return a;
}
template <typename T, int N>
inline vec<T, N> mix(vec<T, N> a, vec<T, N> b, itself<vec<T, N>> t) { return a + (b - a) * t; }

// Both name the same functions: no relaxed math is modelled.
namespace precise { using namespace metal; }
namespace fast { using namespace metal; }

}  // namespace metal
