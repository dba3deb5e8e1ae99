// Sums of numbers that are not negative without any rounding, so that they are the same bits whatever is
// added to what first: integers of 576 bits, kept in pieces of 32 bits whose carries wait.
//
//   limbs   [ 0 | 1 | 2 | ... | 17 ]   limb i counts 2^(32 i - 298); a number adds to three of them
//
// The lowest bit is the square of fp32's smallest number, the highest is beyond 64 times the square of its
// largest. A limb holds the pieces of 2^30 numbers.
#pragma once

#include <bit>
#include <cstdint>

namespace ebb::optim {

struct ExactSum {
  static constexpr int kLowest = -298, kDigits = 18;
  static constexpr int kNotFinite = kDigits;  // the limb that counts infinities and NaNs
  static constexpr int kLimbs = kDigits + 1;

  uint64_t limbs[kLimbs];
};

// What a sum is between ranks: its digits with their carries, the count of what is not finite behind them.
struct PackedSum {
  static constexpr int kDigits = ExactSum::kDigits + 1;  // and the last one's carry

  uint32_t digits[kDigits];
  uint32_t not_finite;
};

// add(limb, what it is to grow by) for what a multiple of 2^ExactSum::kLowest adds.
template <class AddLimb>
constexpr void ForEachLimbOf(double value, AddLimb add) {
  const auto bits = std::bit_cast<uint64_t>(value);
  const auto exponent = static_cast<int>(bits >> 52 & 0x7ffu);
  uint64_t mantissa = bits & ((uint64_t{1} << 52) - 1);
  if (exponent > 0) mantissa |= uint64_t{1} << 52;
  int at = (exponent > 0 ? exponent : 1) - 1075 - ExactSum::kLowest;
  if (at < 0) {
    mantissa = at > -64 ? mantissa >> -at : 0;
    at = 0;
  }
  if (mantissa == 0) return;
  const int limb = at / 32, shift = at % 32;
  if (limb + 2 >= ExactSum::kDigits) return add(ExactSum::kNotFinite, uint64_t{1});
  const uint64_t low = (mantissa & 0xffffffffu) << shift, high = (mantissa >> 32) << shift;
  add(limb, low & 0xffffffffu);
  add(limb + 1, (low >> 32) + (high & 0xffffffffu));
  add(limb + 2, high >> 32);
}

inline void Add(double value, ExactSum& sum) {
  ForEachLimbOf(value, [&](int limb, uint64_t piece) { sum.limbs[limb] += piece; });
}
PackedSum Pack(const ExactSum& sum);
void Add(const PackedSum& packed, ExactSum& sum);
// To nearest, ties to even. What is not finite: a NaN.
double Rounded(const ExactSum& sum);

}  // namespace ebb::optim
