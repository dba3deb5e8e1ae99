#include "ebb/optim/checksum.h"

#include <algorithm>
#include <cassert>

#include "ebb/optim/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/checksum.cc"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/checksum-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

uint64_t SumBlock(const std::byte* bytes, int64_t count) {
  return checksum::BlockSum(bytes, count);
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {
namespace {

using checksum::Mix;

HWY_EXPORT(SumBlock);

constexpr int64_t kGrainBlocks = 4;

// The block at `index`.
std::span<const std::byte> BlockAt(std::span<const std::byte> bytes, int64_t index) {
  const size_t begin = static_cast<size_t>(index * kChecksumBlock);
  return bytes.subspan(begin, std::min<size_t>(kChecksumBlock, bytes.size() - begin));
}

}  // namespace

uint64_t ChecksumOfBlock(std::span<const std::byte> block) {
  assert(block.size() <= kChecksumBlock);
  return HWY_DYNAMIC_DISPATCH(SumBlock)(block.data(), static_cast<int64_t>(block.size()));
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
      used[i] = ChecksumOfBlock(BlockAt(bytes, i));
    }
  });
  return ChecksumFromBlocks(used, count);
}

void RunningChecksum::Append(std::span<const std::byte> bytes) {
  bytes_ += static_cast<int64_t>(bytes.size());
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(bytes.size(), kChecksumBlock - rest_.size()));
    bytes = bytes.subspan(part.size());
    if (part.size() == kChecksumBlock) {
      blocks_.push_back(ChecksumOfBlock(part));
      continue;
    }
    rest_.insert(rest_.end(), part.begin(), part.end());
    if (rest_.size() < kChecksumBlock) continue;
    blocks_.push_back(ChecksumOfBlock(rest_));
    rest_.clear();
  }
}

uint64_t RunningChecksum::Take() {
  if (!rest_.empty()) blocks_.push_back(ChecksumOfBlock(rest_));
  const uint64_t sum = ChecksumFromBlocks(blocks_, bytes_);
  rest_.clear();
  blocks_.clear();
  bytes_ = 0;
  return sum;
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
