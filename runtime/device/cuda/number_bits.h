// The bits of numbers in functions of kernels. Functions marked EBB_HOST_DEVICE are also compiled
// for the host, where tests run them: with other instructions, and the same results. This file
// includes no header of CUDA, so that those tests need none.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "ebb/runtime/base/dtype.h"

#if defined(__CUDACC__)
#define EBB_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EBB_HOST_DEVICE inline
#endif

// Unrolls the loop that follows, because arrays stay in registers only if their indices are
// constant.
#if defined(__CUDA_ARCH__)
#define EBB_UNROLL _Pragma("unroll")
#else
#define EBB_UNROLL
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

// Two numbers of T, BFloat16 or Float16, as one word and back: the first in the lower half, each
// rounded to nearest, ties to even.
template <class T>
EBB_HOST_DEVICE uint32_t PackPair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
#else
  return T(low).bits | static_cast<uint32_t>(T(high).bits) << 16;
#endif
}
template <class T>
EBB_HOST_DEVICE void UnpackPair(uint32_t word, float& low, float& high) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    low = NumberOf(word << 16);
    high = NumberOf(word & 0xffff0000u);
  } else {
    low = FromFloat16(static_cast<uint16_t>(word));
    high = FromFloat16(static_cast<uint16_t>(word >> 16));
  }
}

}  // namespace ebb::kernel
