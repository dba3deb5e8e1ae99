// Arithmetic of the optimizer's kernels, and how they round parameters. The rest is in
// runtime/device/cuda/numbers.h.
//
// Functions marked EBB_HOST_DEVICE are also compiled for the host, where tests run them on every
// number. The instructions differ there, but the results are the same.
#pragma once

#include <cmath>

#include "ebb/optim/cast.h"
#include "ebb/optim/split_master.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/cuda/numbers.h"

namespace ebb::optim::cuda {

using kernel::Load;
using kernel::Packed;
using kernel::Store;
using kernel::Unpack;

// update_element.inc's operations: each rounds once, to nearest, and keeps subnormals.
struct Ops {
  using Number = float;
  static EBB_HOST_DEVICE float Set(float value) { return value; }
  static EBB_HOST_DEVICE float Sign(float a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a; }
  static EBB_HOST_DEVICE float ZeroIfNegative(float a) { return a < 0 ? 0.0f : a; }
#if defined(__CUDA_ARCH__)
  static EBB_HOST_DEVICE float Add(float a, float b) {
    return __fadd_rn(a, b);
  }
  static EBB_HOST_DEVICE float Sub(float a, float b) {
    return __fsub_rn(a, b);
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
  static EBB_HOST_DEVICE float Sub(float a, float b) {
    return a - b;
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

template <int kWidth>
EBB_HOST_DEVICE Packed<kWidth> Pack(const float (&numbers)[kWidth], DType dtype,
                                    Rounding rounding) {
  if (dtype != DType::kBFloat16 || rounding == Rounding::kNearest)
    return kernel::Pack(numbers, dtype);
  Packed<kWidth> packed = {};
  for (int i = 0; i < kWidth; ++i) packed.SetHalf(i, RoundHalfAway(numbers[i]).bits);
  return packed;
}

}  // namespace ebb::optim::cuda
