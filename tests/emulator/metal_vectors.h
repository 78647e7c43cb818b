// vec<T, N> with N of 2, 3 or 4: components, construction from parts, arithmetic by component.
// With clang any two components and the first or last three can be named together (v.xy, v.zx,
// v.xyz); g++ knows single components only.
#pragma once

namespace metal {

template <typename T, int N>
struct vec;

#if defined(__clang__)
#define EMULATOR_PAIR(a, b)                                        \
  constexpr vec<T, 2> get_##a##b() const { return vec<T, 2>(a, b); } \
  constexpr void put_##a##b(vec<T, 2> v) { a = v.x; b = v.y; }     \
  __declspec(property(get = get_##a##b, put = put_##a##b)) vec<T, 2> a##b;
#define EMULATOR_TRIPLE(a, b, c)                                   \
  constexpr vec<T, 3> get_##a##b##c() const { return vec<T, 3>(a, b, c); } \
  constexpr void put_##a##b##c(vec<T, 3> v) { a = v.x; b = v.y; c = v.z; } \
  __declspec(property(get = get_##a##b##c, put = put_##a##b##c)) vec<T, 3> a##b##c;
#else
#define EMULATOR_PAIR(a, b)
#define EMULATOR_TRIPLE(a, b, c)
#endif

template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  constexpr vec(T all) : x(all), y(all) {}
  constexpr vec(T a, T b) : x(a), y(b) {}
  template <typename U>
  constexpr explicit vec(vec<U, 2> v) : x(T(v.x)), y(T(v.y)) {}
  constexpr T& operator[](size_t i) { return i == 0 ? x : y; }
  constexpr const T& operator[](size_t i) const { return i == 0 ? x : y; }
  EMULATOR_PAIR(x, y)
  EMULATOR_PAIR(y, x)
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  constexpr vec(T all) : x(all), y(all), z(all) {}
  constexpr vec(T a, T b, T c) : x(a), y(b), z(c) {}
  constexpr vec(vec<T, 2> v, T c) : x(v.x), y(v.y), z(c) {}
  constexpr vec(T a, vec<T, 2> v) : x(a), y(v.x), z(v.y) {}
  template <typename U>
  constexpr explicit vec(vec<U, 3> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
  constexpr T& operator[](size_t i) { return i == 0 ? x : i == 1 ? y : z; }
  constexpr const T& operator[](size_t i) const { return i == 0 ? x : i == 1 ? y : z; }
  EMULATOR_PAIR(x, y)
  EMULATOR_PAIR(x, z)
  EMULATOR_PAIR(y, z)
  EMULATOR_PAIR(y, x)
  EMULATOR_PAIR(z, x)
  EMULATOR_PAIR(z, y)
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  constexpr vec(T all) : x(all), y(all), z(all), w(all) {}
  constexpr vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  constexpr vec(vec<T, 2> u, vec<T, 2> v) : x(u.x), y(u.y), z(v.x), w(v.y) {}
  constexpr vec(vec<T, 2> v, T c, T d) : x(v.x), y(v.y), z(c), w(d) {}
  constexpr vec(T a, T b, vec<T, 2> v) : x(a), y(b), z(v.x), w(v.y) {}
  constexpr vec(vec<T, 3> v, T d) : x(v.x), y(v.y), z(v.z), w(d) {}
  constexpr vec(T a, vec<T, 3> v) : x(a), y(v.x), z(v.y), w(v.z) {}
  template <typename U>
  constexpr explicit vec(vec<U, 4> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  constexpr T& operator[](size_t i) { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
  constexpr const T& operator[](size_t i) const {
    return i == 0 ? x : i == 1 ? y : i == 2 ? z : w;
  }
  EMULATOR_PAIR(x, y)
  EMULATOR_PAIR(x, z)
  EMULATOR_PAIR(x, w)
  EMULATOR_PAIR(y, z)
  EMULATOR_PAIR(y, w)
  EMULATOR_PAIR(z, w)
  EMULATOR_PAIR(y, x)
  EMULATOR_PAIR(w, z)
  EMULATOR_TRIPLE(x, y, z)
  EMULATOR_TRIPLE(y, z, w)
};

// Three values without padding.
template <typename T>
struct packed3 {
  T x, y, z;
  packed3() = default;
  constexpr packed3(T a, T b, T c) : x(a), y(b), z(c) {}
  constexpr packed3(vec<T, 3> v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator vec<T, 3>() const { return vec<T, 3>(x, y, z); }
  constexpr T& operator[](size_t i) { return i == 0 ? x : i == 1 ? y : z; }
};
typedef packed3<float> packed_float3;
typedef packed3<half> packed_half3;
typedef packed3<uint> packed_uint3;

// A parameter of type itself<T> takes no part in finding T: `v * 2` multiplies by T(2).
template <typename T>
struct itself_ {
  typedef T type;
};
template <typename T>
using itself = typename itself_<T>::type;

// f(component of a) and f(component of a, component of b), as vectors of what f returns.
template <typename R, typename T, int N, typename F>
constexpr vec<R, N> each(vec<T, N> a, F f) {
  vec<R, N> r = vec<R, N>(R(0));
  for (int i = 0; i < N; i++) r[i] = f(a[i]);
  return r;
}
template <typename R, typename T, typename U, int N, typename F>
constexpr vec<R, N> each(vec<T, N> a, vec<U, N> b, F f) {
  vec<R, N> r = vec<R, N>(R(0));
  for (int i = 0; i < N; i++) r[i] = f(a[i], b[i]);
  return r;
}

#define EMULATOR_VECTOR(R, op)                                                          \
  template <typename T, int N>                                                          \
  constexpr vec<R, N> operator op(vec<T, N> a, vec<T, N> b) {                           \
    return each<R>(a, b, [](T u, T v) { return R(u op v); });                           \
  }                                                                                     \
  template <typename T, int N>                                                          \
  constexpr vec<R, N> operator op(vec<T, N> a, itself<T> b) { return a op vec<T, N>(b); } \
  template <typename T, int N>                                                          \
  constexpr vec<R, N> operator op(itself<T> a, vec<T, N> b) { return vec<T, N>(a) op b; }
#define EMULATOR_VECTOR_ASSIGN(op)                                                      \
  EMULATOR_VECTOR(T, op)                                                                \
  template <typename T, int N>                                                          \
  constexpr vec<T, N>& operator op##=(vec<T, N>& a, itself<vec<T, N>> b) { return a = a op b; }
EMULATOR_VECTOR_ASSIGN(+)
EMULATOR_VECTOR_ASSIGN(-)
EMULATOR_VECTOR_ASSIGN(*)
EMULATOR_VECTOR_ASSIGN(/)
EMULATOR_VECTOR_ASSIGN(%)
EMULATOR_VECTOR_ASSIGN(&)
EMULATOR_VECTOR_ASSIGN(|)
EMULATOR_VECTOR_ASSIGN(^)
EMULATOR_VECTOR_ASSIGN(<<)
EMULATOR_VECTOR_ASSIGN(>>)
EMULATOR_VECTOR(bool, ==)
EMULATOR_VECTOR(bool, !=)
EMULATOR_VECTOR(bool, <)
EMULATOR_VECTOR(bool, <=)
EMULATOR_VECTOR(bool, >)
EMULATOR_VECTOR(bool, >=)
EMULATOR_VECTOR(bool, &&)
EMULATOR_VECTOR(bool, ||)

template <typename T, int N>
constexpr vec<T, N> operator-(vec<T, N> a) {
  return each<T>(a, [](T u) { return T(-u); });
}
template <typename T, int N>
constexpr vec<T, N> operator~(vec<T, N> a) {
  return each<T>(a, [](T u) { return T(~u); });
}
template <int N>
constexpr vec<bool, N> operator!(vec<bool, N> a) {
  return each<bool>(a, [](bool u) { return !u; });
}

#define EMULATOR_NAMES(T)    \
  typedef vec<T, 2> T##2;    \
  typedef vec<T, 3> T##3;    \
  typedef vec<T, 4> T##4;
EMULATOR_NAMES(bool)
EMULATOR_NAMES(char)
EMULATOR_NAMES(uchar)
EMULATOR_NAMES(short)
EMULATOR_NAMES(ushort)
EMULATOR_NAMES(int)
EMULATOR_NAMES(uint)
EMULATOR_NAMES(long)
EMULATOR_NAMES(ulong)
EMULATOR_NAMES(half)
EMULATOR_NAMES(bfloat)
EMULATOR_NAMES(float)
#undef EMULATOR_NAMES

}  // namespace metal

// The bits of a value as another type of the same size.
template <typename To, typename From>
constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  return __builtin_bit_cast(To, value);
}
