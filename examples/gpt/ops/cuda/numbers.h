// Functions by which kernels store results of any type at any address, and which find out whether
// an array can be read in the groups of runtime/device/cuda/numbers.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "ebb/runtime/base/dtype.h"
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

}  // namespace ebb::gpt::cuda
