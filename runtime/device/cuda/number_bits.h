// The bits of numbers in functions of kernels. Functions marked EBB_HOST_DEVICE are compiled for the
// host too, where tests run them; what differs there is the instruction, not the result. Names no
// header of CUDA, so that those tests need none.
#pragma once

#include <bit>
#include <cstdint>

#include "ebb/runtime/config/dtype.h"

#if defined(__CUDACC__)
#define EBB_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EBB_HOST_DEVICE inline
#endif

namespace ebb::kernel {

EBB_HOST_DEVICE float NumberOf(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}
EBB_HOST_DEVICE uint32_t BitsOf(float number) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(number);
#else
  return std::bit_cast<uint32_t>(number);
#endif
}

// dtype.h's conversions of fp16, in one instruction each.
EBB_HOST_DEVICE float FromFloat16(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  Float16 half;
  half.bits = bits;
  return static_cast<float>(half);
#endif
}
EBB_HOST_DEVICE uint16_t ToFloat16(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  return Float16(value).bits;
#endif
}

}  // namespace ebb::kernel
