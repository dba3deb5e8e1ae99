// The checksum's lanes (checksum.h), once for every SIMD target, for kernels that sum numbers in
// their registers. Included after hwy/foreach_target.h.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef EBB_OPTIM_CHECKSUM_CONSTANTS_
#define EBB_OPTIM_CHECKSUM_CONSTANTS_
namespace ebb::optim::checksum {

constexpr int64_t kLanes = 8, kStripe = 64, kStripesPerScramble = 64;
constexpr int kRotation = 29;  // to the left
constexpr uint32_t kPrime = 0x9E3779B1u;

// A bijection in which every bit of x reaches every bit (Stafford's variant 13).
constexpr uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The lanes' first values. Each scramble uses them, too.
constexpr auto kKeys = [] {
  std::array<uint64_t, kLanes> keys{};
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = Mix((i + 1) * 0x9e3779b97f4a7c15u);
  return keys;
}();

}  // namespace ebb::optim::checksum
#endif

// clang-format off
#if defined(EBB_OPTIM_CHECKSUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EBB_OPTIM_CHECKSUM_INL_H_
#undef EBB_OPTIM_CHECKSUM_INL_H_
#else
#define EBB_OPTIM_CHECKSUM_INL_H_
#endif
// clang-format on

#include "ebb/optim/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE::checksum {

using namespace ebb::optim::checksum;  // NOLINT: the constants, under their own names

#if EBB_VECTOR_OPS

// The running sum of one block.
class Lanes {
  using Words = hn::CappedTag<uint64_t, kLanes>;
  using Halves = hn::Repartition<uint32_t, Words>;
  using Bytes = hn::Repartition<uint8_t, Words>;

 public:
  static constexpr int64_t kVectorWords = static_cast<int64_t>(hn::MaxLanes(Words()));
  static constexpr int64_t kVectors = kLanes / kVectorWords;  // of a stripe

  HWY_INLINE Lanes() {
    for (int64_t v = 0; v < kVectors; ++v) sums_[v] = Key(v);
  }

  HWY_INLINE void Add(const std::byte* stripe) {
    constexpr int64_t kVectorBytes = kVectorWords * 8;
    for (int64_t v = 0; v < kVectors; ++v)
      AddVector(v, hn::LoadU(Bytes(), AsBytes(stripe) + v * kVectorBytes));
  }
  // Adds one of the kVectors vectors of a stripe, of any number type.
  template <class Vector>
  HWY_INLINE void AddVector(int64_t v, Vector vector) {
    const auto word = hn::BitCast(Words(), vector);
    sums_[v] = hn::RotateRight<64 - kRotation>(hn::Add(sums_[v], word));
  }

  HWY_INLINE void Scramble() {
    const auto prime = hn::Set(Words(), kPrime);
    for (int64_t v = 0; v < kVectors; ++v) {
      auto x = hn::Xor(sums_[v], hn::ShiftRight<47>(sums_[v]));
      x = hn::Xor(x, Key(v));
      const auto high = Product(hn::ShiftRight<32>(x), prime);
      sums_[v] = hn::Add(Product(x, prime), hn::ShiftLeft<32>(high));
    }
  }

  void Get(uint64_t (&sums)[kLanes]) const {
    for (int64_t v = 0; v < kVectors; ++v) hn::StoreU(sums_[v], Words(), sums + v * kVectorWords);
  }

 private:
  static const uint8_t* AsBytes(const std::byte* bytes) {
    return reinterpret_cast<const uint8_t*>(bytes);
  }
  static HWY_INLINE hn::Vec<Words> Key(int64_t v) {
    return hn::LoadU(Words(), kKeys.data() + v * kVectorWords);
  }
  // Products of the low halves.
  static HWY_INLINE hn::Vec<Words> Product(hn::Vec<Words> a, hn::Vec<Words> b) {
    return hn::MulEven(hn::BitCast(Halves(), a), hn::BitCast(Halves(), b));
  }

  hn::Vec<Words> sums_[kVectors];
};

#else

class Lanes {
 public:
  Lanes() { std::copy_n(kKeys.data(), kLanes, sums_); }

  void Add(const std::byte* stripe) {
    uint64_t words[kLanes];
    std::memcpy(words, stripe, sizeof(words));
    for (int64_t i = 0; i < kLanes; ++i) sums_[i] = std::rotl(sums_[i] + words[i], kRotation);
  }

  void Scramble() {
    for (int64_t i = 0; i < kLanes; ++i) {
      const uint64_t key = kKeys[i];
      sums_[i] = (sums_[i] ^ (sums_[i] >> 47) ^ key) * kPrime;
    }
  }

  void Get(uint64_t (&sums)[kLanes]) const { std::copy_n(sums_, kLanes, sums); }

 private:
  uint64_t sums_[kLanes];
};

#endif

// The sum of a block of `count` bytes, all of which the lanes have taken.
inline uint64_t SumOfLanes(const Lanes& lanes, int64_t count) {
  uint64_t sums[kLanes];
  lanes.Get(sums);
  uint64_t sum = Mix(static_cast<uint64_t>(count));
  for (const uint64_t lane : sums) sum = Mix(sum ^ lane);
  return sum;
}

inline uint64_t BlockSum(const std::byte* bytes, int64_t count) {
  Lanes lanes;
  int64_t i = 0;
  for (; i + kStripesPerScramble * kStripe <= count; i += kStripesPerScramble * kStripe) {
    for (int64_t s = 0; s < kStripesPerScramble; ++s) lanes.Add(bytes + i + s * kStripe);
    lanes.Scramble();
  }
  for (; i + kStripe <= count; i += kStripe) lanes.Add(bytes + i);
  if (i < count) {
    std::byte rest[kStripe] = {};
    std::memcpy(rest, bytes + i, static_cast<size_t>(count - i));
    lanes.Add(rest);
  }
  return SumOfLanes(lanes, count);
}

}  // namespace ebb::optim::HWY_NAMESPACE::checksum
HWY_AFTER_NAMESPACE();

#endif  // EBB_OPTIM_CHECKSUM_INL_H_
