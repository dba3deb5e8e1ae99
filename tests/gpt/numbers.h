// Arrays of any dtype with fp64 views of the values they hold, and the comparison of all kernel
// tests. Their memory comes from std::pmr's default, which a test may replace by a device's.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <random>
#include <string>
#include <vector>

#include "ebb/runtime/base/dtype.h"
#include "gtest/gtest.h"

namespace ebb::gpt {

// Relative error of one rounding to the dtype.
inline double Rounding(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
}

class Array {
 public:
  // NaN in every dtype, so that reads of unwritten numbers show.
  Array(DType dtype, int64_t count)
      : dtype_(dtype), bytes_(static_cast<size_t>(count * SizeOf(dtype)), std::byte{0xff}) {}
  // Normal numbers of the given deviation, rounded to the dtype.
  static Array Random(DType dtype, int64_t count, uint64_t seed, double deviation = 1) {
    Array array(dtype, count);
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal(0, deviation);
    for (int64_t i = 0; i < count; ++i) array.Set(i, normal(random));
    return array;
  }

  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  DType dtype() const { return dtype_; }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()) / SizeOf(dtype_); }
  bool operator==(const Array&) const = default;

  double operator[](int64_t i) const {
    switch (dtype_) {
      case DType::kBFloat16:
        return static_cast<float>(At<BFloat16>(i));
      case DType::kFloat16:
        return static_cast<float>(At<Float16>(i));
      default:
        return At<float>(i);
    }
  }
  void Set(int64_t i, double value) {
    switch (dtype_) {
      case DType::kBFloat16:
        At<BFloat16>(i) = BFloat16(static_cast<float>(value));
        break;
      case DType::kFloat16:
        At<Float16>(i) = Float16(static_cast<float>(value));
        break;
      default:
        At<float>(i) = static_cast<float>(value);
    }
  }
  std::vector<double> Values() const {
    std::vector<double> values(static_cast<size_t>(size()));
    for (int64_t i = 0; i < size(); ++i) values[static_cast<size_t>(i)] = (*this)[i];
    return values;
  }

 private:
  template <class T>
  T& At(int64_t i) {
    return reinterpret_cast<T*>(bytes_.data())[i];
  }
  template <class T>
  const T& At(int64_t i) const {
    return reinterpret_cast<const T*>(bytes_.data())[i];
  }
  DType dtype_;
  std::pmr::vector<std::byte> bytes_;
};

// got[i] within one rounding of its dtype plus `relative` times the largest magnitude in
// `expected`, which sums of that many terms of that size may have lost. `rounded`: for each element
// the magnitudes of what may have been rounded to that dtype on the way, summed; or empty.
inline void ExpectClose(const Array& got, const std::vector<double>& expected, double relative,
                        const std::string& what, const std::vector<double>& rounded = {}) {
  ASSERT_EQ(got.size(), static_cast<int64_t>(expected.size())) << what;
  double largest = 0;
  for (double e : expected) largest = std::max(largest, std::abs(e));
  // fp16 below 2^-14 has a fixed grid.
  const double grid = got.dtype() == DType::kFloat16 ? 0x1p-25 : 0;
  for (int64_t i = 0; i < got.size(); ++i) {
    const double e = expected[static_cast<size_t>(i)];
    const double magnitudes = std::abs(e) + (rounded.empty() ? 0 : rounded[static_cast<size_t>(i)]);
    ASSERT_NEAR(got[i], e, Rounding(got.dtype()) * magnitudes + relative * largest + grid)
        << what << " at " << i;
  }
}

}  // namespace ebb::gpt
