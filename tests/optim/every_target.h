// Runs a test body once for every SIMD target that this machine can run and the kernels were
// compiled for, the one without vectors included; and the numbers such bodies compare.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>

#include "ebb/optim/simd_targets.h"
#include "ebb/runtime/config/dtype.h"
#include "gtest/gtest.h"
#include "hwy/highway.h"
#include "hwy/targets.h"

namespace ebb::optim {

template <class Body>
void ForEveryTarget(Body body) {
  const int64_t supported = (hwy::SupportedTargets() | HWY_STATIC_TARGET) & HWY_TARGETS;
  for (int64_t rest = supported; rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// The bits of a number; those of one NaN for all NaNs, as which of two NaNs an operation returns is
// the instruction's choice.
inline uint32_t Bits(float value) {
  return std::isnan(value) ? 0x7fc00000u : std::bit_cast<uint32_t>(value);
}
inline uint32_t Bits(BFloat16 value) {
  return std::isnan(static_cast<float>(value)) ? 0x7fc0u : value.bits;
}
inline uint32_t Bits(Float16 value) {
  return std::isnan(static_cast<float>(value)) ? 0x7e00u : value.bits;
}

enum class Range {
  kAll,       // every magnitude, subnormals and zeros of both signs among them; mostly near 1
  kPositive,  // the same, without signs
  kNearOne    // so close to each other that each shows in a sum
};

// Finite numbers.
template <class T>
std::vector<T> Numbers(int64_t count, uint64_t seed, Range range = Range::kAll) {
  constexpr int kLowest = -150, kHighest = std::is_same_v<T, Float16> ? 14 : 60;
  std::mt19937_64 random(seed);
  std::vector<T> numbers(static_cast<size_t>(count));
  for (T& number : numbers) {
    const uint64_t r = random();
    const float fraction = static_cast<float>(r >> 40) * 0x1p-24f;
    const bool anywhere = range != Range::kNearOne && r % 4 == 0;
    const int exponent = static_cast<int>((r >> 8) % (anywhere ? kHighest - kLowest : 8));
    const float magnitude = std::ldexp(1 + fraction, exponent + (anywhere ? kLowest : -6));
    number = T(range != Range::kPositive && (r & 0x80) != 0 ? -magnitude : magnitude);
  }
  return numbers;
}

}  // namespace ebb::optim
