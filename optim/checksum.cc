#include "ebb/optim/checksum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstring>

#include "ebb/optim/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/checksum.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "ebb/optim/simd-inl.h"
#include "hwy/highway.h"

#ifndef EBB_OPTIM_CHECKSUM_CONSTANTS_
#define EBB_OPTIM_CHECKSUM_CONSTANTS_
namespace ebb::optim {
namespace {

constexpr int64_t kLanes = 8, kStripe = 64, kStripesPerScramble = 16;
constexpr int kRotation = 29;  // to the left
constexpr uint32_t kPrime = 0x9E3779B1u;

// A bijection in which every bit of x reaches every bit (Stafford's variant 13).
constexpr uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// What the lanes start from; each scramble takes them in, too.
constexpr auto kKeys = [] {
  std::array<uint64_t, kLanes> keys{};
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = Mix((i + 1) * 0x9e3779b97f4a7c15u);
  return keys;
}();

}  // namespace
}  // namespace ebb::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

#if EBB_VECTOR_OPS

class Lanes {
 public:
  Lanes() {
    for (int64_t v = 0; v < kVectors; ++v) sums_[v] = Key(v);
  }

  HWY_INLINE void Add(const std::byte* stripe) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const auto word =
          hn::BitCast(Words(), hn::LoadU(Bytes(), AsBytes(stripe) + v * kVectorBytes));
      sums_[v] = hn::RotateRight<64 - kRotation>(hn::Add(sums_[v], word));
    }
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
  using Words = hn::CappedTag<uint64_t, kLanes>;
  using Halves = hn::Repartition<uint32_t, Words>;
  using Bytes = hn::Repartition<uint8_t, Words>;
  static constexpr int64_t kVectorWords = static_cast<int64_t>(hn::MaxLanes(Words()));
  static constexpr int64_t kVectorBytes = kVectorWords * 8, kVectors = kLanes / kVectorWords;

  static const uint8_t* AsBytes(const std::byte* bytes) {
    return reinterpret_cast<const uint8_t*>(bytes);
  }
  static HWY_INLINE hn::Vec<Words> Key(int64_t v) {
    return hn::LoadU(Words(), kKeys.data() + v * kVectorWords);
  }
  // Of the low halves.
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
      const uint64_t key = kKeys[static_cast<size_t>(i)];
      sums_[i] = (sums_[i] ^ (sums_[i] >> 47) ^ key) * kPrime;
    }
  }

  void Get(uint64_t (&sums)[kLanes]) const { std::copy_n(sums_, kLanes, sums); }

 private:
  uint64_t sums_[kLanes];
};

#endif

uint64_t BlockSum(const std::byte* bytes, int64_t count) {
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
  uint64_t sums[kLanes];
  lanes.Get(sums);
  uint64_t sum = Mix(static_cast<uint64_t>(count));
  for (const uint64_t lane : sums) sum = Mix(sum ^ lane);
  return sum;
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {
namespace {

HWY_EXPORT(BlockSum);

constexpr int64_t kGrainBlocks = 4;

// Of the block at `index`.
std::span<const std::byte> BlockAt(std::span<const std::byte> bytes, int64_t index) {
  const size_t begin = static_cast<size_t>(index * kChecksumBlock);
  return bytes.subspan(begin, std::min<size_t>(kChecksumBlock, bytes.size() - begin));
}

}  // namespace

uint64_t ChecksumOfBlock(std::span<const std::byte> block) {
  assert(block.size() <= kChecksumBlock);
  return HWY_DYNAMIC_DISPATCH(BlockSum)(block.data(), static_cast<int64_t>(block.size()));
}

uint64_t ChecksumFromBlocks(std::span<const uint64_t> blocks, int64_t bytes) {
  assert(static_cast<int64_t>(blocks.size()) == ChecksumBlocks(bytes));
  uint64_t sum = Mix(static_cast<uint64_t>(bytes));
  for (const uint64_t block : blocks) sum = Mix(sum ^ block);
  return sum;
}

uint64_t Checksum(std::span<const std::byte> bytes) {
  uint64_t sum = Mix(bytes.size());
  const int64_t blocks = ChecksumBlocks(static_cast<int64_t>(bytes.size()));
  for (int64_t i = 0; i < blocks; ++i) sum = Mix(sum ^ ChecksumOfBlock(BlockAt(bytes, i)));
  return sum;
}

uint64_t Checksum(ThreadTeam& team, std::span<const std::byte> bytes, std::span<uint64_t> blocks) {
  const auto count = static_cast<int64_t>(bytes.size());
  const auto used = blocks.first(static_cast<size_t>(ChecksumBlocks(count)));
  team.Run(ChecksumBlocks(count), kGrainBlocks, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      used[static_cast<size_t>(i)] = ChecksumOfBlock(BlockAt(bytes, i));
    }
  });
  return ChecksumFromBlocks(used, count);
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
