// The names of metal_shim.h, and those of Metal that the kernel bodies use, for CUDA.
//
// MLX 0.32.4 hands NVRTC an architecture and include paths and nothing else. So contraction is on
// (a * b + c may become one fused operation), denormals are kept, division and square root are
// rounded correctly, and fast-math is off. The intrinsics below are never contracted: every float
// operation whose bits matter goes through them. bfloat16 is __nv_bfloat16, half is __half; an
// expression that mixes them with float is ambiguous, so bodies cast on load and on store.
#define MLXSTACKS_CUDA 1

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;

#define HELPER __device__ __forceinline__
#define SHARED_ARRAY(type, name, size) __shared__ type name[size]
#define BARRIER() __syncthreads()

HELPER float mul_rn(float a, float b) { return __fmul_rn(a, b); }
HELPER float add_rn(float a, float b) { return __fadd_rn(a, b); }
HELPER float sub_rn(float a, float b) { return __fsub_rn(a, b); }
HELPER float div_rn(float a, float b) { return __fdiv_rn(a, b); }
HELPER float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
HELPER float rint_even(float a) { return rintf(a); }
HELPER float floor_whole(float a) { return floorf(a); }
HELPER float magnitude(float a) { return fabsf(a); }
HELPER float smaller(float a, float b) { return fminf(a, b); }
HELPER float larger(float a, float b) { return fmaxf(a, b); }

// All 32 lanes take part: the bodies call it in uniform control flow only.
HELPER float xor_lane(float a, uint mask) { return __shfl_xor_sync(0xffffffffu, a, mask); }
