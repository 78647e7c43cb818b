// What the kernel bodies of this folder use beside Metal itself; cuda_shim.h spells the same names
// for CUDA. Every float operation whose bits matter goes through these, one rounding each.
#pragma METAL fp contract(off)

#define HELPER inline
#define SHARED_ARRAY(type, name, size) threadgroup type name[size]
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)

HELPER float mul_rn(float a, float b) { return a * b; }
HELPER float add_rn(float a, float b) { return a + b; }
HELPER float sub_rn(float a, float b) { return a - b; }
HELPER float div_rn(float a, float b) { return a / b; }
HELPER float fma_rn(float a, float b, float c) { return fma(a, b, c); }
HELPER float rint_even(float a) { return rint(a); }
HELPER float floor_whole(float a) { return floor(a); }
HELPER float magnitude(float a) { return abs(a); }
HELPER float smaller(float a, float b) { return min(a, b); }
HELPER float larger(float a, float b) { return max(a, b); }

// The value of the lane whose index differs in the bits of `mask`.
HELPER float xor_lane(float a, uint mask) { return simd_shuffle_xor(a, ushort(mask)); }
