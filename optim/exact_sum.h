// Sums of non-negative numbers without rounding, so that the order of additions does not change the
// bits. A sum is an integer of 576 bits, in pieces of 32 bits with deferred carries.
//
//   limbs   [ 0 | 1 | 2 | ... | 17 ]   limb i counts 2^(32 i - 298); a number adds to three of them
//
// The lowest bit is the square of fp32's smallest number. The highest bit is beyond 64 times the
// square of its largest number. A limb holds the pieces of 2^30 numbers.
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

// The form of a sum between ranks: its digits after the carries, and the count of infinities and
// NaNs.
struct PackedSum {
  static constexpr int kDigits = ExactSum::kDigits + 1;  // one more for the last carry

  uint32_t digits[kDigits];
  uint32_t not_finite;
};

// Calls add(limb, increment) for each limb to which `value`, a multiple of 2^ExactSum::kLowest,
// adds.
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
// To nearest, ties to even. NaN if the sum has an infinity or a NaN.
double Rounded(const ExactSum& sum);

}  // namespace ebb::optim
