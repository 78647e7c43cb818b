// The helpers that MLX puts in front of every custom kernel and that kernels call.
#pragma once

struct complex64_t {
  float real;
  float imag;
  complex64_t() = default;
  constexpr complex64_t(float r, float i = 0.0f) : real(r), imag(i) {}
};
constexpr complex64_t operator+(complex64_t a, complex64_t b) {
  return {a.real + b.real, a.imag + b.imag};
}
constexpr complex64_t operator-(complex64_t a, complex64_t b) {
  return {a.real - b.real, a.imag - b.imag};
}
constexpr complex64_t operator*(complex64_t a, complex64_t b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}

template <typename T, bool = is_floating_point_v<T>>
struct Limits {
  static constexpr T max = numeric_limits<T>::max();
  static constexpr T min = numeric_limits<T>::min();
  static constexpr T finite_max = max;
  static constexpr T finite_min = min;
};
template <typename T>
struct Limits<T, true> {
  static constexpr T max = numeric_limits<T>::infinity();
  static constexpr T min = -numeric_limits<T>::infinity();
  static constexpr T finite_max = numeric_limits<T>::max();
  static constexpr T finite_min = -numeric_limits<T>::max();
};

template <typename T, typename U>
inline T ceildiv(T n, U m) { return (n + m - 1) / m; }

// Offset of element `elem`, counted in row-major order, in an array of any strides.
template <typename IdxT = int64_t>
inline IdxT elem_to_loc(IdxT elem, const int* shape, const int64_t* strides, int ndim) {
  IdxT loc = 0;
  for (int axis = ndim - 1; axis >= 0; axis--) {
    loc += IdxT(elem % shape[axis]) * IdxT(strides[axis]);
    elem /= shape[axis];
  }
  return loc;
}
