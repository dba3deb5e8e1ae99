// Numbers as kernels load, convert and store them, several in one access of up to 16 bytes:
//
//   Group<T, kWidth>   of a type that is known when the kernel is compiled
//   Packed<kWidth>     of one that is known when it runs: the branches on it are the same for all
//                      threads and cost nothing beside the memory
//
// As in number_bits.h, all of it is also compiled for the host: with other instructions, and the
// same results but for the payload of a NaN that Group's Pack rounds.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/cuda/number_bits.h"

namespace ebb::kernel {

// In one access. The address must be aligned to it.
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

// T: float, BFloat16 or Float16.
template <class T>
inline constexpr int kGroup = 16 / static_cast<int>(sizeof(T));

// Consecutive numbers as they lie in memory.
template <class T, int kWidth>
struct Group {
  static constexpr int kBytes = kWidth * static_cast<int>(sizeof(T));
  uint32_t words[(kBytes + 3) / 4];
};

// The address is a multiple of the group's bytes, or of 16 if the group is larger.
template <class T, int kWidth>
EBB_HOST_DEVICE Group<T, kWidth> Load(const void* array, int64_t at) {
  constexpr int kBytes = Group<T, kWidth>::kBytes;
  const T* const from = static_cast<const T*>(array) + at;
  Group<T, kWidth> group;
  if constexpr (kBytes > 16) {
    EBB_UNROLL
    for (int i = 0; i < kBytes / 16; ++i) Read<16>(from + i * kGroup<T>, group.words + 4 * i);
  } else {
    Read<kBytes>(from, group.words);
  }
  return group;
}
template <class T, int kWidth>
EBB_HOST_DEVICE void Store(const Group<T, kWidth>& group, void* array, int64_t at) {
  constexpr int kBytes = Group<T, kWidth>::kBytes;
  T* const to = static_cast<T*>(array) + at;
  if constexpr (kBytes > 16) {
    EBB_UNROLL
    for (int i = 0; i < kBytes / 16; ++i) Write<16>(group.words + 4 * i, to + i * kGroup<T>);
  } else {
    Write<kBytes>(group.words, to);
  }
}

template <class T, int kWidth>
EBB_HOST_DEVICE void Unpack(const Group<T, kWidth>& group, float (&numbers)[kWidth]) {
  EBB_UNROLL
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      numbers[i] = NumberOf(group.words[i]);
    } else {
      const uint32_t word = group.words[i / 2];
      if constexpr (std::is_same_v<T, BFloat16>) {
        numbers[i] = NumberOf(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
      } else {
        numbers[i] = FromFloat16(static_cast<uint16_t>(word >> (16 * (i % 2))));
      }
    }
  }
}

template <class T, int kWidth>
EBB_HOST_DEVICE Group<T, kWidth> Pack(const float (&numbers)[kWidth]) {
  Group<T, kWidth> group;
  if constexpr (std::is_same_v<T, float>) {
    EBB_UNROLL
    for (int i = 0; i < kWidth; ++i) group.words[i] = BitsOf(numbers[i]);
  } else if constexpr (kWidth == 1) {
    group.words[0] = PackPair<T>(numbers[0], 0.0f);
  } else {
    EBB_UNROLL
    for (int i = 0; i < kWidth / 2; ++i)
      group.words[i] = PackPair<T>(numbers[2 * i], numbers[2 * i + 1]);
  }
  return group;
}

// For any address: in one access if it happens to be aligned.
template <class T, int kWidth>
EBB_HOST_DEVICE bool Aligned(const void* array, int64_t at) {
  constexpr int kBytes = Group<T, kWidth>::kBytes < 16 ? Group<T, kWidth>::kBytes : 16;
  return reinterpret_cast<uintptr_t>(static_cast<const T*>(array) + at) % kBytes == 0;
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

// Numbers [at, at + kWidth) of an array. `size`: bytes of one number, 2 or 4.
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

// Rounded to nearest, ties to even; a NaN stays a NaN.
template <int kWidth>
EBB_HOST_DEVICE Packed<kWidth> Pack(const float (&numbers)[kWidth], DType dtype) {
  Packed<kWidth> packed = {};
  if (dtype == DType::kFloat32) {
    for (int i = 0; i < kWidth; ++i) packed.words[i] = BitsOf(numbers[i]);
  } else if (dtype == DType::kFloat16) {
    for (int i = 0; i < kWidth; ++i) packed.SetHalf(i, ToFloat16(numbers[i]));
  } else {
    for (int i = 0; i < kWidth; ++i) packed.SetHalf(i, BFloat16(numbers[i]).bits);
  }
  return packed;
}

}  // namespace ebb::kernel
