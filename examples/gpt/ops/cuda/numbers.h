// Functions by which kernels store results of any type at any address, and which find out whether
// an array can be read in the groups of runtime/device/cuda/numbers.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ebb/runtime/device/cuda/number_bits.h"
#include "ebb/runtime/device/cuda/numbers.h"
#include "ops/ops.h"

namespace ebb::gpt::cuda {

using kernel::Aligned;
using kernel::Group;
using kernel::kGroup;
using kernel::Load;
using kernel::Pack;
using kernel::Store;
using kernel::Unpack;

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

// Calls body(T()) with the dtype's T. Nothing is computed in int8: cudaErrorInvalidValue.
template <class Body>
cudaError_t WithType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float());
    case DType::kBFloat16:
      return body(BFloat16());
    case DType::kFloat16:
      return body(Float16());
    case DType::kInt8:
      break;
  }
  return cudaErrorInvalidValue;
}

// Whether rows of `width` numbers of T can be walked in groups, in all given arrays (null: not
// given).
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

// Fast exponentials, for kernels that compute one for each number. They take one or two
// instructions on the device. The library's function is exact to the last bit, and takes eight or
// nine.
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

// Sums over the threads that share a row: a warp, or a whole block of kThreads. Each of the numbers is summed over its threads, in a fixed order; all of them get the same bits.
// `shared`: memory of the block for kCount * kThreads / 32 numbers, which may be used again only
// after all threads have left this function; unused for a warp.
template <int kThreads, class Thread, class T, int kCount>
EBB_HOST_DEVICE void SumOverThreads(Thread& thread, T (&numbers)[kCount], T* shared) {
  constexpr int kWarps = kThreads / kernel::kWarp;
  for (T& number : numbers) number = kernel::WarpSum(thread, number);
  if constexpr (kWarps > 1) {
    if (thread.lane() == 0) {
      for (int i = 0; i < kCount; ++i) shared[i * kWarps + thread.warp()] = numbers[i];
    }
    thread.Sync();
    for (int i = 0; i < kCount; ++i) {
      numbers[i] = shared[i * kWarps];
      for (int w = 1; w < kWarps; ++w) numbers[i] += shared[i * kWarps + w];
    }
  }
}

}  // namespace ebb::gpt::cuda
