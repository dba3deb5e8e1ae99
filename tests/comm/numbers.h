// Arrays of any number type for tests of collectives: what ranks send, and the scalar reference of
// the results.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/comm/communicator.h"

namespace ebb::testing {

inline uint64_t Mix(uint64_t value) {
  value = (value ^ (value >> 33)) * 0xff51afd7ed558ccd;
  value = (value ^ (value >> 33)) * 0xc4ceb9fe1a85ec53;
  return value ^ (value >> 33);
}

class Numbers {
 public:
  Numbers(DType dtype, int64_t count)
      : dtype_(dtype), bytes_(static_cast<size_t>(count * SizeOf(dtype)), std::byte{0x5a}) {}

  DType dtype() const { return dtype_; }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()) / SizeOf(dtype_); }
  std::byte* at(int64_t i) { return bytes_.data() + i * SizeOf(dtype_); }
  const std::byte* at(int64_t i) const { return bytes_.data() + i * SizeOf(dtype_); }

  float Get(int64_t i) const {
    switch (dtype_) {
      case DType::kFloat32:
        return Read<float>(i);
      case DType::kBFloat16:
        return static_cast<float>(Read<BFloat16>(i));
      case DType::kFloat16:
        return static_cast<float>(Read<Float16>(i));
      case DType::kInt8:
        return static_cast<float>(Read<int8_t>(i));
    }
    return 0;
  }
  // Rounds to nearest even. NaN becomes the NaN that reduce.h names.
  void Set(int64_t i, float value) {
    const float v = std::isnan(value) ? std::bit_cast<float>(0x7fc00000u) : value;
    switch (dtype_) {
      case DType::kFloat32:
        return Write(i, v);
      case DType::kBFloat16:
        return Write(i, BFloat16(v));
      case DType::kFloat16:
        return Write(i, Float16(v));
      case DType::kInt8:
        return Write(i, static_cast<int8_t>(std::nearbyint(std::clamp(v, -128.0f, 127.0f))));
    }
  }
  void CopyFrom(const Numbers& source, int64_t from, int64_t to, int64_t count) {
    if (count > 0)
      std::memcpy(at(to), source.at(from), static_cast<size_t>(count * SizeOf(dtype_)));
  }

  // Values of many magnitudes with sums that round, some infinite, subnormal or NaN. The seed
  // decides them.
  void Fill(uint64_t seed) {
    for (int64_t i = 0; i < size(); ++i) {
      const uint64_t bits = Mix(seed * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(i));
      switch (dtype_) {
        case DType::kFloat32:
          Write(i, Wild(bits));
          break;
        case DType::kBFloat16:
          Write(i, BFloat16(Wild(bits)));
          break;
        case DType::kFloat16:
          Write(i, Float16(Wild(bits)));
          break;
        case DType::kInt8:
          Write(i, static_cast<int8_t>(bits));
          break;
      }
    }
  }

  // From -4 to 4: sums of 64 of them are exact in every number type, in any order.
  void FillWithSmallIntegers(uint64_t seed) {
    for (int64_t i = 0; i < size(); ++i) {
      const uint64_t bits = Mix(seed * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(i));
      Set(i, static_cast<float>(static_cast<int>(bits % 9) - 4));
    }
  }

  friend bool operator==(const Numbers&, const Numbers&) = default;

 private:
  static float Wild(uint64_t bits) {
    const uint64_t kind = bits >> 56;
    if (kind == 0) return std::bit_cast<float>(static_cast<uint32_t>(bits));  // any bit pattern
    if (kind < 8) return bits % 2 == 0 ? 0.0f : -0.0f;
    return std::ldexp(static_cast<float>(static_cast<int32_t>(bits)),
                      static_cast<int>(kind % 24) - 44);
  }
  template <class T>
  T Read(int64_t i) const {
    T value;
    std::memcpy(&value, at(i), sizeof(T));
    return value;
  }
  template <class T>
  void Write(int64_t i, T value) {
    std::memcpy(at(i), &value, sizeof(T));
  }

  DType dtype_;
  std::vector<std::byte> bytes_;
};

// The order of sums in communicator.h, written again.
inline float ReduceReference(const std::vector<float>& inputs, ReduceOp op, int group,
                             float scale) {
  const auto combine = [op](float so_far, float next) {
    if (op == ReduceOp::kSum) return so_far + next;
    if (std::isnan(so_far) || std::isnan(next)) return std::bit_cast<float>(0x7fc00000u);
    if (op == ReduceOp::kMax) return next > so_far ? next : so_far;
    return next < so_far ? next : so_far;
  };
  const size_t group_size = group == 0 ? inputs.size() : static_cast<size_t>(group);
  std::vector<float> partials;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (i % group_size == 0) {
      partials.push_back(inputs[i]);
    } else {
      partials.back() = combine(partials.back(), inputs[i]);
    }
  }
  float total = partials[0];
  for (size_t i = 1; i < partials.size(); ++i) total = combine(total, partials[i]);
  return total * scale;
}

}  // namespace ebb::testing
