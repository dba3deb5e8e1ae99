// The work of one thread of the reduction kernels: the arithmetic of reduce.cc in its order, with
// the same operations on every element. It also compiles for the host, with other instructions and
// the same results, where tests compare it with Reduce.
//
//   elements   | head |  packs of 16 bytes, each thread's `threads` apart  | tail |
//
// Head and tail are the unaligned elements, or all elements if the arrays are aligned differently.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/cuda/number_bits.h"
#include "ebb/runtime/kernels/reduce_launch.h"

namespace ebb::reduce_work {

inline constexpr int kPackBytes = 16;
template <class T>
inline constexpr int kPack = kPackBytes / static_cast<int>(sizeof(T));  // elements

using Combine = ReduceArrays::Combine;

EBB_HOST_DEVICE float Widened(float value) {
  return value;
}
EBB_HOST_DEVICE float Widened(BFloat16 value) {
  return kernel::NumberOf(uint32_t{value.bits} << 16);
}
EBB_HOST_DEVICE float Widened(Float16 value) {
  return kernel::FromFloat16(value.bits);
}
EBB_HOST_DEVICE float Widened(int8_t value) {
  return static_cast<float>(value);
}

// One rounding, to nearest even; every NaN becomes the positive quiet one without payload.
template <class T>
EBB_HOST_DEVICE T Rounded(float value) {
  T result;
  if constexpr (std::is_same_v<T, int8_t>) {
    result = static_cast<int8_t>(rintf(fminf(fmaxf(value, -128.0f), 127.0f)));
  } else {
    const uint32_t bits = value != value ? 0x7fc00000u : kernel::BitsOf(value);
    if constexpr (std::is_same_v<T, float>) {
      result = kernel::NumberOf(bits);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      // Nothing carries out of a quiet NaN: its low half is zero.
      result.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    } else {
      result.bits = value != value ? uint16_t{0x7e00} : kernel::ToFloat16(value);
    }
  }
  return result;
}

EBB_HOST_DEVICE float Sum(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
EBB_HOST_DEVICE float Product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// Max and min keep the first of equal values (-0 and +0). A NaN remains NaN.
template <Combine kCombine>
EBB_HOST_DEVICE float Combined(float so_far, float next) {
  if constexpr (kCombine == Combine::kSum) {
    return Sum(so_far, next);
  } else {
    const bool better = kCombine == Combine::kMax ? next > so_far : next < so_far;
    return better || next != next ? next : so_far;
  }
}

EBB_HOST_DEVICE const void* InputOf(const ReduceArrays& arrays, int input) {
  return arrays.stride == 0 ? arrays.inputs[input]
                            : static_cast<const char*>(arrays.inputs[0]) + input * arrays.stride;
}

// Loaded and stored as a whole.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

template <class T, int kCount>
EBB_HOST_DEVICE Pack<T, kCount> Load(const void* array, int64_t at) {
  const T* const from = static_cast<const T*>(array) + at;
#if defined(__CUDA_ARCH__)
  return *reinterpret_cast<const Pack<T, kCount>*>(from);
#else
  Pack<T, kCount> pack;
  std::memcpy(pack.values, from, sizeof(pack));
  return pack;
#endif
}

template <class T, int kCount>
EBB_HOST_DEVICE void Store(void* array, int64_t at, const Pack<T, kCount>& pack) {
  T* const to = static_cast<T*>(array) + at;
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(pack) == kPackBytes) {
    uint4 whole;
    memcpy(&whole, &pack, sizeof(whole));
    __stwb(reinterpret_cast<uint4*>(to), whole);  // an assignment would become several stores
  } else {
    *to = pack.values[0];
  }
#else
  std::memcpy(static_cast<void*>(to), pack.values, sizeof(pack));
#endif
}

// Elements [at, at + kCount).
template <class T, Combine kCombine, int kCount>
EBB_HOST_DEVICE void ReduceElements(const ReduceArrays& arrays, int64_t at) {
  float total[kCount] = {};
  for (int first = 0; first < arrays.inputs_count; first += arrays.group) {
    float partial[kCount];
    const auto begin = Load<T, kCount>(InputOf(arrays, first), at);
    for (int i = 0; i < kCount; ++i) partial[i] = Widened(begin.values[i]);
#if defined(__CUDA_ARCH__)
#pragma unroll 4
#endif
    for (int input = first + 1; input < first + arrays.group; ++input) {
      const auto next = Load<T, kCount>(InputOf(arrays, input), at);
      for (int i = 0; i < kCount; ++i)
        partial[i] = Combined<kCombine>(partial[i], Widened(next.values[i]));
    }
    for (int i = 0; i < kCount; ++i)
      total[i] = first == 0 ? partial[i] : Combined<kCombine>(total[i], partial[i]);
  }
  Pack<T, kCount> result;
  for (int i = 0; i < kCount; ++i) result.values[i] = Rounded<T>(Product(total[i], arrays.scale));
  Store<T, kCount>(arrays.destination, at, result);
}

// For `count` elements of `bytes`: how many come before the first pack. All of them if there is no
// pack.
EBB_HOST_DEVICE int64_t HeadOf(const void* array, int64_t count, int bytes) {
  const uintptr_t place = reinterpret_cast<uintptr_t>(array) % kPackBytes;
  if (place % static_cast<uintptr_t>(bytes) != 0) return count;
  const auto head = static_cast<int64_t>((kPackBytes - place) % kPackBytes) / bytes;
  return head < count ? head : count;
}
inline int64_t HeadOf(const ReduceArrays& arrays, int bytes) {
  const auto misplaced = [](const void* array) {
    return reinterpret_cast<uintptr_t>(array) % kPackBytes;
  };
  const uintptr_t place = misplaced(arrays.destination);
  for (int i = 0; i < arrays.inputs_count; ++i) {
    if (misplaced(InputOf(arrays, i)) != place) return arrays.count;
  }
  return HeadOf(arrays.destination, arrays.count, bytes);
}

// The work of thread `thread` of `threads`, with `head` elements before the first pack.
template <class T, Combine kCombine>
EBB_HOST_DEVICE void ReduceAsThread(const ReduceArrays& arrays, int64_t head, int64_t thread,
                                    int64_t threads) {
  const int64_t packs = (arrays.count - head) / kPack<T>;
  for (int64_t pack = thread; pack < packs; pack += threads)
    ReduceElements<T, kCombine, kPack<T>>(arrays, head + pack * kPack<T>);
  const int64_t packed = packs * kPack<T>;
  for (int64_t i = thread; i < arrays.count - packed; i += threads)
    ReduceElements<T, kCombine, 1>(arrays, i < head ? i : i + packed);
}

// Elements [at, at + kCount).
template <class T, int kCount>
EBB_HOST_DEVICE void ScaleElements(void* array, int64_t at, float factor) {
  auto pack = Load<T, kCount>(array, at);
  for (int i = 0; i < kCount; ++i)
    pack.values[i] = Rounded<T>(Product(Widened(pack.values[i]), factor));
  Store<T, kCount>(array, at, pack);
}

// The work of thread `thread` of `threads` in one span.
template <class T>
EBB_HOST_DEVICE void ScaleAsThread(const ScaleArrays::Span& span, float factor, int64_t thread,
                                   int64_t threads) {
  const int64_t head = HeadOf(span.data, span.count, sizeof(T));
  const int64_t packs = (span.count - head) / kPack<T>, packed = packs * kPack<T>;
  for (int64_t pack = thread; pack < packs; pack += threads)
    ScaleElements<T, kPack<T>>(span.data, head + pack * kPack<T>, factor);
  for (int64_t i = thread; i < span.count - packed; i += threads)
    ScaleElements<T, 1>(span.data, i < head ? i : i + packed, factor);
}

// Calls body(T()) for the type that `dtype` names.
template <class Body>
void WithType(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float());
    case DType::kBFloat16:
      return body(BFloat16());
    case DType::kFloat16:
      return body(Float16());
    case DType::kInt8:
      return body(int8_t());
  }
}

// Calls body(T(), constant of a Combine) for the types of `arrays`.
template <class Body>
void WithTypes(const ReduceArrays& arrays, Body body) {
  const auto with_combine = [&](auto number) {
    switch (arrays.combine) {
      case Combine::kSum:
        return body(number, std::integral_constant<Combine, Combine::kSum>());
      case Combine::kMax:
        return body(number, std::integral_constant<Combine, Combine::kMax>());
      case Combine::kMin:
        return body(number, std::integral_constant<Combine, Combine::kMin>());
    }
  };
  WithType(arrays.dtype, with_combine);
}

}  // namespace ebb::reduce_work
