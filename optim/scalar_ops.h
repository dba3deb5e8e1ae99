// One number at a time: for elements that fill no vector, and for all elements on a machine without
// fused multiply-add. Each operation rounds once, like its vector form.
#pragma once

#include <cmath>

#include "ebb/optim/cast.h"
#include "ebb/optim/split_master.h"
#include "ebb/optim/stochastic_rounding.h"
#include "ebb/runtime/base/dtype.h"

namespace ebb::optim {

struct ScalarOps {
  using Number = float;
  static Number Set(float value) { return value; }
  static Number Add(Number a, Number b) { return a + b; }
  static Number Sub(Number a, Number b) { return a - b; }
  static Number Mul(Number a, Number b) { return a * b; }
  static Number Fma(Number a, Number b, Number c) { return std::fma(a, b, c); }
  static Number Div(Number a, Number b) { return a / b; }
  static Number Sqrt(Number a) { return std::sqrt(a); }
  // 1 or -1; a zero or NaN stays as it is.
  static Number Sign(Number a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a; }
  // A NaN stays a NaN.
  static Number ZeroIfNegative(Number a) { return a < 0 ? 0.0f : a; }

  template <class T>
  static Number Load(const T* from) {
    return static_cast<float>(*from);
  }
  template <Rounding kRounding, class T>
  static void Store(Number value, T* to) {
    *to = T(value);
  }
  template <Rounding kRounding>
  static void Store(Number value, BFloat16* to) {
    *to = kRounding == Rounding::kParameter ? RoundHalfAway(value) : BFloat16(value);
  }

  // A split master (split_master.h).
  static Number LoadSplit(const BFloat16* parameter, const uint16_t* low) {
    return JoinMaster(*parameter, *low);
  }
  static void StoreLow(Number value, uint16_t* low) { *low = LowHalf(value); }

  // For the element with this index (stochastic_rounding.h).
  static Number RoundAtRandom(Number value, const RoundingKey& key, uint32_t index) {
    return RoundStochastically(value, RandomBits(key, index));
  }
};

}  // namespace ebb::optim
