// Numbers of one type, known when a kernel is compiled, as its threads load, convert and store them:
// in groups of kGroup, 16 bytes in one access, where the addresses allow it, else one by one.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "ebb/optim/cuda/numbers.h"
#include "ebb/runtime/config/dtype.h"
#include "ebb/runtime/device/cuda/number_bits.h"
#include "ops/ops.h"

namespace ebb::gpt::cuda {

// T: float, BFloat16 or Float16.
template <class T>
inline constexpr int kGroup = 16 / static_cast<int>(sizeof(T));

// Consecutive numbers as they lie in memory.
template <class T, int kWidth>
struct Group {
  static constexpr int kBytes = kWidth * static_cast<int>(sizeof(T));
  uint32_t words[(kBytes + 3) / 4];
};

// The address is a multiple of the group's bytes, or of 16 if they are more.
template <class T, int kWidth>
EBB_HOST_DEVICE Group<T, kWidth> Load(const void* array, int64_t at) {
  constexpr int kBytes = Group<T, kWidth>::kBytes;
  const T* const from = static_cast<const T*>(array) + at;
  Group<T, kWidth> group;
  if constexpr (kBytes > 16) {
    EBB_UNROLL
    for (int i = 0; i < kBytes / 16; ++i)
      optim::cuda::Read<16>(from + i * kGroup<T>, group.words + 4 * i);
  } else {
    optim::cuda::Read<kBytes>(from, group.words);
  }
  return group;
}
template <class T, int kWidth>
EBB_HOST_DEVICE void Store(const Group<T, kWidth>& group, void* array, int64_t at) {
  constexpr int kBytes = Group<T, kWidth>::kBytes;
  T* const to = static_cast<T*>(array) + at;
  if constexpr (kBytes > 16) {
    EBB_UNROLL
    for (int i = 0; i < kBytes / 16; ++i)
      optim::cuda::Write<16>(group.words + 4 * i, to + i * kGroup<T>);
  } else {
    optim::cuda::Write<kBytes>(group.words, to);
  }
}

template <class T, int kWidth>
EBB_HOST_DEVICE void Unpack(const Group<T, kWidth>& group, float (&numbers)[kWidth]) {
  EBB_UNROLL
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      numbers[i] = kernel::NumberOf(group.words[i]);
    } else {
      const uint32_t word = group.words[i / 2];
      if constexpr (std::is_same_v<T, BFloat16>) {
        numbers[i] = kernel::NumberOf(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
      } else {
        numbers[i] = kernel::FromFloat16(static_cast<uint16_t>(word >> (16 * (i % 2))));
      }
    }
  }
}

template <class T, int kWidth>
EBB_HOST_DEVICE Group<T, kWidth> Pack(const float (&numbers)[kWidth]) {
  Group<T, kWidth> group;
  if constexpr (std::is_same_v<T, float>) {
    EBB_UNROLL
    for (int i = 0; i < kWidth; ++i) group.words[i] = kernel::BitsOf(numbers[i]);
  } else if constexpr (kWidth == 1) {
    group.words[0] = kernel::PackPair<T>(numbers[0], 0.0f);
  } else {
    EBB_UNROLL
    for (int i = 0; i < kWidth / 2; ++i)
      group.words[i] = kernel::PackPair<T>(numbers[2 * i], numbers[2 * i + 1]);
  }
  return group;
}

// Where nothing is known of the address: in one access if it happens to be aligned.
template <class T, int kWidth>
EBB_HOST_DEVICE bool Aligned(const void* array, int64_t at) {
  constexpr int kBytes = Group<T, kWidth>::kBytes < 16 ? Group<T, kWidth>::kBytes : 16;
  return reinterpret_cast<uintptr_t>(static_cast<const T*>(array) + at) % kBytes == 0;
}
template <class T, int kWidth>
EBB_HOST_DEVICE void StoreAnywhere(const float (&numbers)[kWidth], void* array, int64_t at) {
  if (Aligned<T, kWidth>(array, at)) return Store(Pack<T>(numbers), array, at);
  EBB_UNROLL
  for (int i = 0; i < kWidth; ++i) {
    const float number[1] = {numbers[i]};
    Store(Pack<T>(number), array, at + i);
  }
}

// data[at ...] = beta * data[at ...] + numbers
template <class T, int kWidth>
EBB_HOST_DEVICE void StoreTargetOf(float (&numbers)[kWidth], const Target& target, int64_t at) {
  if (target.beta != 0) {
    float present[kWidth];
    if (Aligned<T, kWidth>(target.data, at)) {
      Unpack(Load<T, kWidth>(target.data, at), present);
    } else {
      EBB_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        float number[1];
        Unpack(Load<T, 1>(target.data, at + i), number);
        present[i] = number[0];
      }
    }
    EBB_UNROLL
    for (int i = 0; i < kWidth; ++i) numbers[i] += present[i];
  }
  StoreAnywhere<T>(numbers, target.data, at);
}
template <int kWidth>
EBB_HOST_DEVICE void StoreTarget(float (&numbers)[kWidth], const Target& target, int64_t at) {
  if (target.dtype == DType::kBFloat16) {
    StoreTargetOf<BFloat16>(numbers, target, at);
  } else if (target.dtype == DType::kFloat16) {
    StoreTargetOf<Float16>(numbers, target, at);
  } else {
    StoreTargetOf<float>(numbers, target, at);
  }
}

// Calls body(T()) with the dtype's T. Not int8, which nobody computes in.
template <class Body>
auto WithType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kBFloat16:
      return body(BFloat16());
    case DType::kFloat16:
      return body(Float16());
    default:
      return body(float());
  }
}

// Whether rows of `width` numbers of T can be walked in groups: all that are there (null: is not).
template <class T>
bool RowsAreAligned(int64_t width, std::initializer_list<const void*> arrays) {
  if (width % kGroup<T> != 0) return false;
  for (const void* array : arrays) {
    if (!Aligned<T, kGroup<T>>(array, 0)) return false;
  }
  return true;
}

inline int64_t Ceil(int64_t count, int64_t of) {
  return (count + of - 1) / of;
}

}  // namespace ebb::gpt::cuda
