// Numbers as a kernel of CUDA loads, converts and stores them, with the types only known when it
// runs: the branches on them are the same for all threads and cost nothing beside the memory.
//
// Functions marked EBB_HOST_DEVICE are compiled for the host too, where tests run them on every
// number; what is different there is the instruction, not the result.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "ebb/optim/cast.h"
#include "ebb/optim/split_master.h"
#include "ebb/runtime/config/dtype.h"
#include "ebb/runtime/device/cuda/number_bits.h"

namespace ebb::optim::cuda {

using kernel::BitsOf;
using kernel::FromFloat16;
using kernel::NumberOf;
using kernel::ToFloat16;

// update_element.inc's operations: each rounds once, to nearest, and keeps subnormals.
struct Ops {
  using Number = float;
  static EBB_HOST_DEVICE float Set(float value) { return value; }
#if defined(__CUDA_ARCH__)
  static EBB_HOST_DEVICE float Add(float a, float b) {
    return __fadd_rn(a, b);
  }
  static EBB_HOST_DEVICE float Mul(float a, float b) {
    return __fmul_rn(a, b);
  }
  static EBB_HOST_DEVICE float Fma(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
  }
  static EBB_HOST_DEVICE float Div(float a, float b) {
    return __fdiv_rn(a, b);
  }
  static EBB_HOST_DEVICE float Sqrt(float a) {
    return __fsqrt_rn(a);
  }
#else
  static EBB_HOST_DEVICE float Add(float a, float b) {
    return a + b;
  }
  static EBB_HOST_DEVICE float Mul(float a, float b) {
    return a * b;
  }
  static EBB_HOST_DEVICE float Fma(float a, float b, float c) {
    return std::fma(a, b, c);
  }
  static EBB_HOST_DEVICE float Div(float a, float b) {
    return a / b;
  }
  static EBB_HOST_DEVICE float Sqrt(float a) {
    return std::sqrt(a);
  }
#endif
};

// sum + value * value, rounded once.
EBB_HOST_DEVICE double AddSquare(double sum, double value) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(value, value, sum);
#else
  return std::fma(value, value, sum);
#endif
}

// Consecutive numbers as they lie in memory: 4 bytes each, or two of 16 bits in a word.
template <int kWidth>
struct Packed {
  uint32_t words[kWidth];

  EBB_HOST_DEVICE uint16_t Half(int i) const {
    return static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
  }
  EBB_HOST_DEVICE void SetHalf(int i, uint16_t half) {
    words[i / 2] = i % 2 == 0 ? half : words[i / 2] | static_cast<uint32_t>(half) << 16;
  }
};

// In one access, to which the address is aligned.
template <int kBytes>
EBB_HOST_DEVICE void Read(const void* from, uint32_t* words) {
#if defined(__CUDA_ARCH__)
  if constexpr (kBytes == 16) {
    const uint4 value = *static_cast<const uint4*>(from);
    words[0] = value.x;
    words[1] = value.y;
    words[2] = value.z;
    words[3] = value.w;
  } else if constexpr (kBytes == 8) {
    const uint2 value = *static_cast<const uint2*>(from);
    words[0] = value.x;
    words[1] = value.y;
  } else if constexpr (kBytes == 4) {
    words[0] = *static_cast<const uint32_t*>(from);
  } else {
    static_assert(kBytes == 2);
    words[0] = *static_cast<const uint16_t*>(from);
  }
#else
  words[0] = 0;
  std::memcpy(words, from, kBytes);
#endif
}
template <int kBytes>
EBB_HOST_DEVICE void Write(const uint32_t* words, void* to) {
#if defined(__CUDA_ARCH__)
  if constexpr (kBytes == 16) {
    *static_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else if constexpr (kBytes == 4) {
    *static_cast<uint32_t*>(to) = words[0];
  } else {
    static_assert(kBytes == 2);
    *static_cast<uint16_t*>(to) = static_cast<uint16_t>(words[0]);
  }
#else
  std::memcpy(to, words, kBytes);
#endif
}

// Numbers [at, at + kWidth) of an array; `size`: of one, 2 or 4 bytes.
template <int kWidth>
EBB_HOST_DEVICE Packed<kWidth> Load(const void* array, int64_t size, int64_t at) {
  Packed<kWidth> packed = {};
  const void* const from = static_cast<const char*>(array) + at * size;
  if (size == 4) {
    Read<4 * kWidth>(from, packed.words);
  } else {
    Read<2 * kWidth>(from, packed.words);
  }
  return packed;
}
template <int kWidth>
EBB_HOST_DEVICE void Store(const Packed<kWidth>& packed, void* array, int64_t size, int64_t at) {
  void* const to = static_cast<char*>(array) + at * size;
  if (size == 4) {
    Write<4 * kWidth>(packed.words, to);
  } else {
    Write<2 * kWidth>(packed.words, to);
  }
}

template <int kWidth>
EBB_HOST_DEVICE void Unpack(const Packed<kWidth>& packed, DType dtype, float (&numbers)[kWidth]) {
  if (dtype == DType::kBFloat16) {
    for (int i = 0; i < kWidth; ++i) numbers[i] = NumberOf(uint32_t{packed.Half(i)} << 16);
  } else if (dtype == DType::kFloat16) {
    for (int i = 0; i < kWidth; ++i) numbers[i] = FromFloat16(packed.Half(i));
  } else {
    for (int i = 0; i < kWidth; ++i) numbers[i] = NumberOf(packed.words[i]);
  }
}

template <int kWidth>
EBB_HOST_DEVICE Packed<kWidth> Pack(const float (&numbers)[kWidth], DType dtype,
                                    Rounding rounding) {
  Packed<kWidth> packed = {};
  if (dtype == DType::kFloat32) {
    for (int i = 0; i < kWidth; ++i) packed.words[i] = BitsOf(numbers[i]);
  } else if (dtype == DType::kFloat16) {
    for (int i = 0; i < kWidth; ++i) packed.SetHalf(i, ToFloat16(numbers[i]));
  } else if (rounding == Rounding::kParameter) {
    for (int i = 0; i < kWidth; ++i) packed.SetHalf(i, RoundHalfAway(numbers[i]).bits);
  } else {
    for (int i = 0; i < kWidth; ++i) packed.SetHalf(i, BFloat16(numbers[i]).bits);
  }
  return packed;
}

}  // namespace ebb::optim::cuda
