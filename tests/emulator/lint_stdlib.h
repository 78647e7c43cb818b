// Declarations of Metal's library for the lint: OpenCL C++ without its generic address space has
// Metal's rules for pointers. Nothing here is ever run, and one overload a type is given where Metal
// gives one, so that a call with mixed types is as ambiguous as it is there.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define threadgroup __local
#define thread __private
// Words that OpenCL reserves and Metal does not.
#define local local_
#define global global_
#define generic generic_
#define pipe pipe_

#define METAL_FUNC inline __attribute__((__always_inline__))
#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef half float16_t;

#define VECTORS(type)                                           \
  typedef __attribute__((ext_vector_type(2))) type type##2;     \
  typedef __attribute__((ext_vector_type(3))) type type##3;     \
  typedef __attribute__((ext_vector_type(4))) type type##4;     \
  type##2 make_##type##2(type);                                 \
  type##2 make_##type##2(type, type);                           \
  type##3 make_##type##3(type);                                 \
  type##3 make_##type##3(type, type, type);                     \
  type##4 make_##type##4(type);                                 \
  type##4 make_##type##4(type, type, type, type);               \
  type##4 make_##type##4(type##2, type##2);                     \
  template <typename U> type##2 make_##type##2(const U& other); \
  template <typename U> type##3 make_##type##3(const U& other); \
  template <typename U> type##4 make_##type##4(const U& other);
VECTORS(float) VECTORS(half) VECTORS(char) VECTORS(uchar) VECTORS(short) VECTORS(ushort)
VECTORS(int) VECTORS(uint) VECTORS(long) VECTORS(ulong)
#define float2(...) make_float2(__VA_ARGS__)
#define float3(...) make_float3(__VA_ARGS__)
#define float4(...) make_float4(__VA_ARGS__)
#define half2(...) make_half2(__VA_ARGS__)
#define half4(...) make_half4(__VA_ARGS__)
#define short2(...) make_short2(__VA_ARGS__)
#define int2(...) make_int2(__VA_ARGS__)
#define int3(...) make_int3(__VA_ARGS__)
#define int4(...) make_int4(__VA_ARGS__)
#define uint2(...) make_uint2(__VA_ARGS__)
#define uint3(...) make_uint3(__VA_ARGS__)
#define uint4(...) make_uint4(__VA_ARGS__)
#define uchar4(...) make_uchar4(__VA_ARGS__)

namespace metal {

// A floating type below half and float. That it must not come from a float by itself, as in Metal, is
// left to the emulator's own header.
typedef _Float16 bfloat;

#define SMALL_INTEGERS(X) X(char) X(uchar) X(short) X(ushort) X(int) X(uint)
#define INTEGERS(X) SMALL_INTEGERS(X) X(long) X(ulong)
#define FLOATS(X) X(float) X(half) X(bfloat)
#define FLOAT_VECTORS(X) X(float2) X(float3) X(float4) X(half2) X(half3) X(half4)
#define INTEGER_VECTORS(X) X(int2) X(int3) X(int4) X(uint2) X(uint3) X(uint4)

// --- mathematics ---------------------------------------------------------------------------------
#define FLOAT_FUNCTIONS(T) \
  T acos(T); T acosh(T); T asin(T); T asinh(T); T atan(T); T atan2(T, T); T atanh(T); T ceil(T); \
  T copysign(T, T); T cos(T); T cosh(T); T cospi(T); T divide(T, T); T exp(T); T exp10(T); T exp2(T); \
  T fabs(T); T fdim(T, T); T floor(T); T fma(T, T, T); T fmax(T, T); T fmin(T, T); T fmod(T, T); \
  T fract(T); T log(T); T log10(T); T log2(T); T mix(T, T, T); T pow(T, T); T powr(T, T); T rint(T); \
  T round(T); T rsqrt(T); T saturate(T); T sign(T); T sin(T); T sinh(T); T sinpi(T); T smoothstep(T, T, T); \
  T sqrt(T); T step(T, T); T tan(T); T tanh(T); T tanpi(T); T trunc(T);
namespace fast { FLOATS(FLOAT_FUNCTIONS) FLOAT_VECTORS(FLOAT_FUNCTIONS) }
namespace precise { FLOATS(FLOAT_FUNCTIONS) FLOAT_VECTORS(FLOAT_FUNCTIONS) }
FLOATS(FLOAT_FUNCTIONS) FLOAT_VECTORS(FLOAT_FUNCTIONS)

#define FLOAT_TESTS(T) \
  bool isfinite(T); bool isinf(T); bool isnan(T); bool isnormal(T); bool signbit(T); \
  T ldexp(T, int); T frexp(T, thread int&); T modf(T, thread T&); int ilogb(T);
FLOATS(FLOAT_TESTS)

#define ORDER_FUNCTIONS(T) T abs(T); T min(T, T); T max(T, T); T clamp(T, T, T);
FLOATS(ORDER_FUNCTIONS) FLOAT_VECTORS(ORDER_FUNCTIONS)
INTEGERS(ORDER_FUNCTIONS) INTEGER_VECTORS(ORDER_FUNCTIONS)

#define INTEGER_FUNCTIONS(T) \
  T absdiff(T, T); T addsat(T, T); T clz(T); T ctz(T); T mad24(T, T, T); T mul24(T, T); T mulhi(T, T); \
  T popcount(T); T reverse_bits(T); T rotate(T, T); T subsat(T, T); \
  T extract_bits(T, uint, uint); T insert_bits(T, T, uint, uint);
INTEGERS(INTEGER_FUNCTIONS)

template <typename T> T select(T, T, bool);
#define GEOMETRY(T, S) S dot(T, T); S length(T); S distance(T, T); T normalize(T);
GEOMETRY(float2, float) GEOMETRY(float3, float) GEOMETRY(float4, float)

template <typename U, typename T> U as_type(T);

// --- lanes of a SIMD group -----------------------------------------------------------------------
#define ANY_LANE_FUNCTIONS(T) \
  T simd_broadcast(T, ushort); T simd_broadcast_first(T); T simd_shuffle(T, ushort); \
  T simd_shuffle_down(T, ushort); T simd_shuffle_up(T, ushort); T simd_shuffle_xor(T, ushort); \
  T simd_shuffle_rotate_down(T, ushort); T simd_shuffle_rotate_up(T, ushort); \
  T simd_shuffle_and_fill_down(T, T, ushort); T simd_shuffle_and_fill_up(T, T, ushort); \
  T quad_broadcast(T, ushort); T quad_shuffle(T, ushort); T quad_shuffle_xor(T, ushort);
#define LANE_FUNCTIONS(T) \
  ANY_LANE_FUNCTIONS(T) \
  T simd_sum(T); T simd_product(T); T simd_max(T); T simd_min(T); \
  T simd_prefix_exclusive_sum(T); T simd_prefix_inclusive_sum(T); \
  T simd_prefix_exclusive_product(T); T simd_prefix_inclusive_product(T); \
  T quad_sum(T); T quad_max(T); T quad_min(T);
#define LANE_BITS(T) T simd_and(T); T simd_or(T); T simd_xor(T);
FLOATS(LANE_FUNCTIONS) SMALL_INTEGERS(LANE_FUNCTIONS) SMALL_INTEGERS(LANE_BITS)
ANY_LANE_FUNCTIONS(float2) ANY_LANE_FUNCTIONS(float4) ANY_LANE_FUNCTIONS(uint2) ANY_LANE_FUNCTIONS(uint4)
struct simd_vote { explicit operator ulong() const; bool all() const; bool any() const; };
simd_vote simd_ballot(bool);
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();

// --- barriers and atomics ------------------------------------------------------------------------
enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };
inline mem_flags operator|(mem_flags a, mem_flags) { return a; }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

enum memory_order { memory_order_relaxed };
template <typename T> struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
template <typename T> T atomic_load_explicit(const device atomic<T>*, memory_order);
template <typename T> T atomic_load_explicit(const threadgroup atomic<T>*, memory_order);
#define ATOMIC_FUNCTION(space, name) template <typename T, typename U> T name(space atomic<T>*, U, memory_order);
#define ATOMIC_FUNCTIONS(space) \
  ATOMIC_FUNCTION(space, atomic_store_explicit) ATOMIC_FUNCTION(space, atomic_exchange_explicit) \
  ATOMIC_FUNCTION(space, atomic_fetch_add_explicit) ATOMIC_FUNCTION(space, atomic_fetch_sub_explicit) \
  ATOMIC_FUNCTION(space, atomic_fetch_max_explicit) ATOMIC_FUNCTION(space, atomic_fetch_min_explicit) \
  ATOMIC_FUNCTION(space, atomic_fetch_or_explicit) ATOMIC_FUNCTION(space, atomic_fetch_and_explicit) \
  ATOMIC_FUNCTION(space, atomic_fetch_xor_explicit)
ATOMIC_FUNCTIONS(device) ATOMIC_FUNCTIONS(threadgroup)

// --- types ---------------------------------------------------------------------------------------
template <typename T> struct numeric_limits;
#define LIMITS(T, low, high, smallest, infinite, not_a_number) \
  template <> struct numeric_limits<T> { \
    static constexpr T lowest() { return T(low); } \
    static constexpr T max() { return T(high); } \
    static constexpr T min() { return T(smallest); } \
    static constexpr T infinity() { return T(infinite); } \
    static constexpr T quiet_NaN() { return T(not_a_number); } \
  };
LIMITS(float, -FLT_MAX, FLT_MAX, FLT_MIN, INFINITY, NAN)
LIMITS(half, -65504.0f, 65504.0f, 0x1p-14f, INFINITY, NAN)
LIMITS(bfloat, -FLT_MAX, FLT_MAX, FLT_MIN, INFINITY, NAN)
LIMITS(int, -2147483647 - 1, 2147483647, -2147483647 - 1, 0, 0)
LIMITS(uint, 0, 4294967295u, 0, 0, 0)
LIMITS(long, -9223372036854775807L - 1, 9223372036854775807L, -9223372036854775807L - 1, 0, 0)
LIMITS(ulong, 0, 18446744073709551615UL, 0, 0, 0)
LIMITS(char, -128, 127, -128, 0, 0)
LIMITS(short, -32768, 32767, -32768, 0, 0)
LIMITS(uchar, 0, 255, 0, 0, 0)
LIMITS(ushort, 0, 65535, 0, 0, 0)

template <bool B, typename T, typename U> struct conditional { typedef T type; };
template <typename T, typename U> struct conditional<false, T, U> { typedef U type; };
template <bool B, typename T, typename U> using conditional_t = typename conditional<B, T, U>::type;
template <typename T, typename U> struct is_same { static constexpr constant bool value = false; };
template <typename T> struct is_same<T, T> { static constexpr constant bool value = true; };
template <typename T, typename U> constexpr constant bool is_same_v = is_same<T, U>::value;

}  // namespace metal

using namespace metal;
typedef bfloat bfloat16_t;

// --- what MLX puts in front of every custom kernel -----------------------------------------------
template <typename T> struct Limits {
  static constexpr constant T max = T(0);
  static constexpr constant T min = T(0);
  static constexpr constant T finite_max = T(0);
  static constexpr constant T finite_min = T(0);
};
template <typename T, typename U> T ceildiv(T, U);
template <typename T = int64_t>
T elem_to_loc(T, const constant int* shape, const constant int64_t* strides, int ndim);
template <typename T = int64_t>
T elem_to_loc(uint3, const constant int* shape, const constant int64_t* strides, int ndim);
