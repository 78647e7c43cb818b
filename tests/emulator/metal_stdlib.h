// What a Metal kernel may name, for a C++ compiler on a CPU. MLX puts its own helpers in front of
// every kernel too: the ones that custom kernels use are at the end.
#pragma once

#include "runtime.h"
#include "metal_numbers.h"
#include "metal_vectors.h"
#include "metal_math.h"
#include "metal_simd.h"
#include "metal_types.h"

#define device
#define constant
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))
// Declarations of threadgroup arrays are rewritten to EMULATOR_SHARED; what is left are pointers.
#define threadgroup
#define EMULATOR_SHARED(name, extents, ...)                        \
  emulator::array<__VA_ARGS__ extents>& name =                     \
      *static_cast<emulator::array<__VA_ARGS__ extents>*>(         \
          emulator_shared(__COUNTER__, sizeof(__VA_ARGS__ extents)))

using namespace metal;

namespace emulator {
template <typename T>
using array = T;
}

#include "metal_mlx.h"
