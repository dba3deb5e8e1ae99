#include "ebb/optim/exact_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ebb::optim {

PackedSum Pack(const ExactSum& sum) {
  PackedSum packed;
  uint64_t carry = 0;
  for (int i = 0; i < ExactSum::kDigits; ++i) {
    carry += sum.limbs[i];
    packed.digits[i] = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
  packed.digits[ExactSum::kDigits] = static_cast<uint32_t>(carry);
  packed.not_finite = sum.limbs[ExactSum::kNotFinite] > 0 ? 1 : 0;
  return packed;
}

void Add(const PackedSum& packed, ExactSum& sum) {
  for (int i = 0; i < ExactSum::kDigits; ++i) sum.limbs[i] += packed.digits[i];
  sum.limbs[ExactSum::kDigits - 1] += uint64_t{packed.digits[ExactSum::kDigits]} << 32;
  sum.limbs[ExactSum::kNotFinite] += packed.not_finite;
}

double Rounded(const ExactSum& sum) {
  const PackedSum packed = Pack(sum);
  if (packed.not_finite > 0) return std::numeric_limits<double>::quiet_NaN();
  int top = PackedSum::kDigits - 1;
  while (top >= 0 && packed.digits[top] == 0) --top;
  if (top < 0) return 0;
  // The 64 highest bits; the last of them also says whether any lower bit is set.
  const int highest = 32 * top + std::bit_width(packed.digits[top]) - 1;
  const int lowest = std::max(highest - 63, 0);
  uint64_t window = 0;
  bool below = false;
  for (int i = top; i >= 0; --i) {
    const int at = 32 * i - lowest;
    const uint64_t digit = packed.digits[i];
    if (at >= 0) {
      window |= digit << at;
    } else if (at > -32) {
      window |= digit >> -at;
      below |= (digit & ((uint64_t{1} << -at) - 1)) != 0;
    } else {
      below |= digit != 0;
    }
  }
  if (below) window |= 1;
  return std::ldexp(static_cast<double>(window), lowest + ExactSum::kLowest);
}

}  // namespace ebb::optim
