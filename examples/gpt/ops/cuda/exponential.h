// Fast exponentials, for kernels that compute one for each number. They take one or two
// instructions on the device. The library's function is exact to the last bit, and takes eight or
// nine.
#pragma once

#include <cmath>

#include "ebb/runtime/device/cuda/number_bits.h"

namespace ebb::gpt::cuda {

inline constexpr float kLog2E = 1.44269504f;

// 2^x, on the device within 2^-22 of it and without subnormals.
EBB_HOST_DEVICE float Exp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}
// e^x.
EBB_HOST_DEVICE float Exp(float x) {
  return Exp2(x * kLog2E);
}

}  // namespace ebb::gpt::cuda
