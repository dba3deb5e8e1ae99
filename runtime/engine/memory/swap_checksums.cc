#include "ebb/runtime/engine/memory/swap_checksums.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/optim/checksum.h"

namespace ebb {

using sharding::SwapExtent;
using sharding::SwapFiles;

namespace {

uint64_t ChecksumOfZeros(int64_t bytes) {
  static const std::vector<std::byte> zeros(optim::kChecksumBlock);
  std::vector<uint64_t> blocks(static_cast<size_t>(optim::ChecksumBlocks(bytes)),
                               optim::ChecksumOfBlock(zeros));
  if (const int64_t rest = bytes % optim::kChecksumBlock; rest > 0)
    blocks.back() = optim::ChecksumOfBlock(std::span(zeros).first(static_cast<size_t>(rest)));
  return optim::ChecksumFromBlocks(blocks, bytes);
}

bool HasSum(VerifySwap verify, const SwapExtent& extent) {
  return verify == VerifySwap::kAll || (verify == VerifySwap::kStates && extent.is_state);
}

}  // namespace

ClassBytes BytesWithoutChecksum(const SwapFiles& files, VerifySwap verify) {
  ClassBytes left = {};
  for (const SwapExtent& extent : files.extents)
    if (!HasSum(verify, extent)) left[static_cast<size_t>(extent.what)] += extent.bytes;
  return left;
}

std::string ClassesWithoutChecksum(const SwapFiles& files, VerifySwap verify) {
  const ClassBytes left = BytesWithoutChecksum(files, verify);
  const bool trained_have =
      verify == VerifySwap::kStates &&
      std::none_of(files.extents.begin(), files.extents.end(), [](const SwapExtent& extent) {
        return extent.what == StateClass::kParameter && extent.trainable && !extent.is_state;
      });
  std::vector<std::string> classes;
  for (const auto& [what, name] :
       {std::pair(StateClass::kParameter, trained_have ? "frozen parameters" : "parameters"),
        std::pair(StateClass::kMaster, "masters"),
        std::pair(StateClass::kOptimizer, "optimizer states"),
        std::pair(StateClass::kGradient, "gradients"),
        std::pair(StateClass::kActivation, "boundary activations")}) {
    if (left[static_cast<size_t>(what)] > 0) classes.push_back(name);
  }
  if (classes.size() < 2) return absl::StrJoin(classes, "");
  const std::string last = std::move(classes.back());
  classes.pop_back();
  return absl::StrCat(absl::StrJoin(classes, ", "), " and ", last);
}

SwapChecksums::SwapChecksums(const SwapFiles& files, VerifySwap verify) {
  for (const SwapExtent& extent : files.extents) {
    if (!HasSum(verify, extent)) continue;
    std::vector<Extent>& file = extent.what == StateClass::kParameter ? parameters_ : states_;
    file.emplace_back(extent);
    if (extent.what == StateClass::kOptimizer) file.back().Set(ChecksumOfZeros(extent.bytes));
  }
  const auto by_offset = [](const Extent& a, const Extent& b) { return a.offset() < b.offset(); };
  std::sort(states_.begin(), states_.end(), by_offset);
  std::sort(parameters_.begin(), parameters_.end(), by_offset);
}

void SwapChecksums::KeepOf(SwapChecksums& before) {
  for (std::vector<Extent>* extents : {&states_, &parameters_}) {
    for (Extent& extent : *extents) {
      const sharding::SwapExtent of = extent.of();
      if (of.what == StateClass::kGradient || of.what == StateClass::kActivation) continue;
      for (Extent& known : before.In(of.place, of.bytes)) extent = std::move(known);
    }
  }
}

void SwapChecksums::KeepStatesOnly() {
  for (std::vector<Extent>* extents : {&states_, &parameters_})
    std::erase_if(*extents, [](const Extent& extent) { return !extent.of().is_state; });
}

std::span<SwapChecksums::Extent> SwapChecksums::In(const sharding::Place& place, int64_t bytes) {
  std::vector<Extent>& extents = place.pool == StateClass::kParameter ? parameters_ : states_;
  const auto first = std::partition_point(
      extents.begin(), extents.end(),
      [&](const Extent& extent) { return extent.offset() + extent.bytes() <= place.offset; });
  const auto last = std::partition_point(first, extents.end(), [&](const Extent& extent) {
    return extent.offset() < place.offset + bytes;
  });
  return {first, last};
}

}  // namespace ebb
