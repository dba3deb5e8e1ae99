// States in other encodings, by a reference of their own: the published map and its nearest numbers
// in plain doubles, one number at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "ebb/optim/stochastic_rounding.h"
#include "ebb/optim/update_arrays.h"
#include "numbers.h"

namespace ebb::optim {

// bitsandbytes' create_dynamic_map(signed, max_exponent_bits=7, total_bits=8), line by line.
inline std::vector<double> PublishedMap(bool has_signs) {
  constexpr int kExponentBits = 7, kNonSignBits = 7;
  std::vector<double> data;
  for (int i = 0; i < kExponentBits; ++i) {
    const int fractions = (1 << (i + kNonSignBits - kExponentBits + (has_signs ? 0 : 1))) + 1;
    std::vector<double> boundaries(static_cast<size_t>(fractions));
    for (int k = 0; k < fractions; ++k)
      boundaries[static_cast<size_t>(k)] = 0.1 + 0.9 * k / (fractions - 1);
    for (size_t k = 0; k + 1 < boundaries.size(); ++k) {
      const double mean = (boundaries[k] + boundaries[k + 1]) / 2;
      data.push_back(std::pow(10.0, i - (kExponentBits - 1)) * mean);
      if (has_signs) data.push_back(-data.back());
    }
  }
  data.push_back(0);
  data.push_back(1);
  std::sort(data.begin(), data.end());
  return data;
}

// The map's fp32 numbers.
inline const std::vector<float>& NumbersOfMap(bool has_signs) {
  static const auto* const maps = [] {
    auto* const made = new std::vector<float>[2];
    for (const bool signs : {false, true}) {
      for (const double number : PublishedMap(signs))
        made[signs].push_back(static_cast<float>(number));
    }
    return made;
  }();
  return maps[has_signs];
}

// The byte of a number of the map, by its index there: codes count from 0 on, and go on behind the
// largest with the most negative.
inline uint8_t StoredCode(const std::vector<float>& map, size_t index) {
  const auto zero = std::lower_bound(map.begin(), map.end(), 0.0f) - map.begin();
  return static_cast<uint8_t>(index - static_cast<size_t>(zero));
}
inline size_t IndexOf(const std::vector<float>& map, uint8_t code) {
  const auto zero = std::lower_bound(map.begin(), map.end(), 0.0f) - map.begin();
  return (code + static_cast<size_t>(zero)) % 256;
}

// In a tie the one nearer to zero.
inline uint8_t NearestCode(const std::vector<float>& map, float number) {
  const auto above = std::lower_bound(map.begin(), map.end(), number);
  if (above == map.begin()) return StoredCode(map, 0);
  const auto below = static_cast<size_t>(above - map.begin() - 1);
  if (above == map.end()) return StoredCode(map, below);
  const double to_below = double{number} - double{above[-1]},
               to_above = double{*above} - double{number};
  const bool up = to_above == to_below ? number < 0 : to_above < to_below;
  return StoredCode(map, below + (up ? 1 : 0));
}

// A state with its memory.
struct HostState {
  Encoding encoding = DType::kFloat32;
  std::vector<std::byte> codes;
  std::vector<float> scales;

  HostState() = default;
  HostState(const Encoding& of, int64_t count)
      : encoding(of),
        codes(static_cast<size_t>(count * of.code_bytes())),
        scales(static_cast<size_t>(of.block == 0 ? 0 : (count + of.block - 1) / of.block)) {}

  StateArray array() {
    return {.codes = codes.data(),
            .scales = scales.empty() ? nullptr : scales.data(),
            .encoding = encoding};
  }
  bool has_signs() const { return encoding == kDynamic8; }
  uint8_t code(size_t i) const { return static_cast<uint8_t>(codes[i]); }
  // Whatever the payload of a NaN.
  friend bool operator==(const HostState& a, const HostState& b) {
    const auto bits = [](const HostState& of) {
      std::vector<uint32_t> all;
      for (const float scale : of.scales) all.push_back(Bits(scale));
      if (of.encoding.code_bytes() != 1) {
        for (const float number : of.Values()) all.push_back(Bits(number));
      }
      return all;
    };
    if (a.encoding != b.encoding || bits(a) != bits(b)) return false;
    return a.encoding.code_bytes() != 1 || a.codes == b.codes;
  }

  std::vector<float> Values() const {
    std::vector<float> values(codes.size() / static_cast<size_t>(encoding.code_bytes()));
    const std::vector<float>& map = NumbersOfMap(has_signs());
    for (size_t i = 0; i < values.size(); ++i) {
      if (encoding == Encoding(DType::kFloat32)) {
        std::memcpy(&values[i], &codes[4 * i], 4);
      } else if (encoding == Encoding(DType::kBFloat16)) {
        BFloat16 number;
        std::memcpy(&number.bits, &codes[2 * i], 2);
        values[i] = static_cast<float>(number);
      } else {
        values[i] = map[IndexOf(map, code(i))] * scales[i / 256];
      }
    }
    return values;
  }

  // `rounding`: null for the nearest.
  void Set(const std::vector<float>& values, const RoundingKey* rounding = nullptr,
           int64_t first_index = 0) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (encoding == Encoding(DType::kFloat32)) {
        std::memcpy(&codes[4 * i], &values[i], 4);
      } else if (encoding == Encoding(DType::kBFloat16)) {
        const auto index = static_cast<uint32_t>(first_index + static_cast<int64_t>(i));
        const BFloat16 number(rounding == nullptr
                                  ? values[i]
                                  : RoundStochastically(values[i], RandomBits(*rounding, index)));
        std::memcpy(&codes[2 * i], &number.bits, 2);
      } else if (i % 256 == 0) {
        SetBlock(i, std::span(values).subspan(i, std::min<size_t>(256, values.size() - i)));
      }
    }
  }

 private:
  void SetBlock(size_t begin, std::span<const float> values) {
    float highest = 0, lowest = 0;
    bool finite = true;
    for (const float value : values) {
      finite = finite && std::isfinite(value);
      highest = std::max(highest, value);
      lowest = std::min(lowest, value);
    }
    float scale = highest;
    if (has_signs() && -lowest > highest) scale = lowest;
    if (std::abs(scale) < std::numeric_limits<float>::min()) scale = 0;
    if (!finite) scale = std::numeric_limits<float>::quiet_NaN();
    scales[begin / 256] = scale;
    const std::vector<float>& map = NumbersOfMap(has_signs());
    for (size_t i = 0; i < values.size(); ++i) {
      const bool has_code = finite && scale != 0;
      const float number = has_code ? values[i] * (1 / scale) : 0;
      codes[begin + i] = static_cast<std::byte>(NearestCode(map, number));
    }
  }
};

}  // namespace ebb::optim
