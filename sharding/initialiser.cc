#include <array>
#include <bit>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/philox.h"

namespace ebb {
namespace {

// Logarithm and sine are our own: libm's differ in the last bit between versions and CPUs, and all
// hosts must start from the same model. Only + - * / and sqrt are used, which IEEE 754 defines to
// the bit. Both are good to 1e-13, far below the rounding to fp32.

template <size_t n>
double Polynomial(const std::array<double, n>& coefficients, double x) {  // highest power first
  double sum = coefficients[0];
  for (size_t i = 1; i < n; ++i) sum = sum * x + coefficients[i];
  return sum;
}

// ln(k / 2^53), k in [1, 2^53]. With k = m 2^e, m in [sqrt(1/2), sqrt(2)) and s = (m - 1) / (m + 1)
// it is ln m = 2 atanh(s) = 2 s (1 + s^2/3 + s^4/5 + ...), s^2 < 0.0295.
double LogOfFraction(uint64_t k) {
  constexpr double kLn2 = 0.693147180559945309417;
  constexpr uint64_t kSqrtHalf = std::bit_cast<uint64_t>(0.707106781186547524401);
  constexpr std::array kAtanh = {1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9,
                                 1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
  const uint64_t bits = std::bit_cast<uint64_t>(static_cast<double>(static_cast<int64_t>(k)));
  const uint64_t exponent = (bits - kSqrtHalf) >> 52;  // k >= 1: the difference is not negative
  const double m = std::bit_cast<double>(bits - (exponent << 52));
  const double s = (m - 1) / (m + 1);
  return (static_cast<int>(exponent) - 53) * kLn2 + 2 * s * Polynomial(kAtanh, s * s);
}

struct SineCosine {
  double sine, cosine;
};

// Sine and cosine of the angle 2 pi k / 2^53, k in [0, 2^53): Taylor around the nearest quarter
// turn, at most pi/4 away, then turned by as many quarters.
SineCosine SineCosineOfTurn(uint64_t k) {
  constexpr double kHalfPi = 1.57079632679489661923;
  constexpr std::array kSine = {1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880, -1.0 / 5040,
                                1.0 / 120,        -1.0 / 6,        1.0};
  constexpr std::array kCosine = {-1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320,
                                  -1.0 / 720,         1.0 / 24,        -1.0 / 2,       1.0};
  const uint64_t quarter = (k + (uint64_t{1} << 50)) >> 51;
  const auto rest = static_cast<double>(static_cast<int64_t>(k - (quarter << 51)));
  const double x = rest * (kHalfPi * 0x1p-51), z = x * x;
  const double values[2] = {x * Polynomial(kSine, z), Polynomial(kCosine, z)};
  const auto negative_if = [](uint64_t bit, double value) {
    return std::bit_cast<double>(std::bit_cast<uint64_t>(value) ^ (bit << 63));
  };
  return {.sine = negative_if((quarter >> 1) & 1, values[quarter & 1]),
          .cosine = negative_if(((quarter + 1) >> 1) & 1, values[~quarter & 1])};
}

// Values 2i and 2i + 1 of a stream of Normal(0, 1), by Box and Muller's transform.
class NormalPairs {
 public:
  // Seed and name keep their places in key and counter, so no two seeds meet, and two names only
  // where their 64-bit hashes (FNV-1a) do.
  NormalPairs(uint64_t seed, std::string_view name)
      : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)} {
    for (const char c : name) name_ = (name_ ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }

  std::array<double, 2> operator[](uint64_t pair) const {
    const std::array<uint32_t, 4> bits =
        Philox4x32({static_cast<uint32_t>(pair), static_cast<uint32_t>(pair >> 32),
                    static_cast<uint32_t>(name_), static_cast<uint32_t>(name_ >> 32)},
                   key_);
    const auto top53 = [](uint32_t high, uint32_t low) {
      return ((uint64_t{high} << 32) | low) >> 11;
    };
    // The logarithm needs a value in (0, 1].
    const double radius = std::sqrt(-2 * LogOfFraction(top53(bits[0], bits[1]) + 1));
    const SineCosine angle = SineCosineOfTurn(top53(bits[2], bits[3]));
    return {radius * angle.cosine, radius * angle.sine};
  }

 private:
  PhiloxKey key_;
  uint64_t name_ = 0xcbf29ce484222325;
};

absl::Status CheckSize(const Slice& slice, std::span<float> values) {
  if (slice.begin >= 0 && slice.end - slice.begin == static_cast<int64_t>(values.size())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("parameter \"", std::string(slice.name), "\": ", values.size(),
                   " values were asked for as the slice [", slice.begin, ", ", slice.end, ")"));
}

}  // namespace

Initialiser Constant(float value) {
  return [value](const Slice& slice, std::span<float> values) {
    EBB_RETURN_IF_ERROR(CheckSize(slice, values));
    for (float& v : values) v = value;
    return absl::OkStatus();
  };
}

Initialiser Normal(float stddev, uint64_t seed) {
  return [stddev, seed](const Slice& slice, std::span<float> values) {
    EBB_RETURN_IF_ERROR(CheckSize(slice, values));
    if (!std::isfinite(stddev) || stddev < 0) {
      return absl::InvalidArgumentError(absl::StrCat("parameter \"", std::string(slice.name),
                                                     "\": Normal's standard deviation is ", stddev,
                                                     "; it must be 0 or more"));
    }
    const NormalPairs pairs(seed, slice.name);
    const auto scaled = [stddev](double value) { return static_cast<float>(stddev * value); };
    auto pair = static_cast<uint64_t>(slice.begin) / 2;
    size_t i = 0;
    if (slice.begin % 2 != 0 && !values.empty()) values[i++] = scaled(pairs[pair++][1]);
    for (; i + 1 < values.size(); i += 2, ++pair) {
      const std::array<double, 2> both = pairs[pair];
      values[i] = scaled(both[0]);
      values[i + 1] = scaled(both[1]);
    }
    if (i < values.size()) values[i] = scaled(pairs[pair][0]);
    return absl::OkStatus();
  };
}

}  // namespace ebb
