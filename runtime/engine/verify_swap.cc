// Whether what is read of the swap files is what was written (ebb.verify_swap), and whether the files
// are still this run's.
#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/executor.h"

namespace ebb {

using sharding::Place;
using Extent = SwapChecksums::Extent;

// Others are told the beginning and the end (ExchangeRecord).
absl::Status Executor::SwapDiffers(const Extent& extent, const ShardFile& file) const {
  return absl::DataLossError(absl::StrCat(
      "the engine has failed: the ", std::string(Name(extent.what)), " of unit '",
      model_.units[static_cast<size_t>(extent.unit)].name,
      "' came back from the disk with other bytes than were written; reload the model. Another "
      "program has changed ",
      file.paths(), " at offset ", extent.offset, " to ", extent.offset + extent.bytes,
      ", or the disk returns wrong data (\"ebb.verify_swap\": \"off\" turns this check off)"));
}

// Once a step, and before values are shown: who truncates, replaces or links a swap file changes what
// is in it, and our own writes may make it as long again.
bool Executor::SwapFilesAreOurs() {
  const absl::Status changed = storage_->CheckFiles();
  if (changed.ok()) return true;
  Fail(absl::Status(changed.code(), absl::StrCat("the engine has failed: ", changed.message(),
                                                 "; reload the model")));
  return false;
}

// For who calls for state, and waits for the disk anyway.
absl::Status Executor::CheckSwapFiles() {
  return SwapFilesAreOurs() ? absl::OkStatus() : StuckError();
}

// At the end of a step or evaluation. Reading from a busy disk takes its time: on a thread for it alone,
// as those that end transfers also wait for updates, and beside what is still to be reduced. What is
// found sticks. `before_exchange`: and is part of the verdict, which waits for it.
void Executor::CheckSwapFilesInOrder(bool before_exchange) {
  if (!check_) return;
  check_->Enqueue([this] { SwapFilesAreOurs(); });
  if (!before_exchange) return;
  check_->Record(*checked_);
  reduce_->Wait(*checked_);
}

bool Executor::VerifiesStates(const sharding::SubGroup& group) const {
  return group.tier == Tier::kNvme && config_.ebb.verify_swap != VerifySwap::kOff;
}

namespace {

// Array 0 of a sub-group is the master or its low half, if either is kept, 1 + k state k.
int FirstArray(const sharding::Decisions& decisions) {
  return decisions.master_size() > 0 ? 0 : 1;
}

}  // namespace

Place Executor::HomeOf(const sharding::SubGroup& group, int array) const {
  return array == 0 ? group.master : group.states.Plus((array - 1) * group.states_stride);
}

// What an update has read. Says no, and fails the engine, where that is not what is known.
bool Executor::AgreeStates(const sharding::SubGroup& group, std::span<const uint64_t> checksums) {
  const sharding::Decisions& decisions = plan().decisions;
  for (int array = FirstArray(decisions); array <= decisions.optimizer_states; ++array) {
    const Place home = HomeOf(group, array);
    const Extent& extent = swap_checksums_->In(home, 1).front();
    if (extent.Agrees(checksums[static_cast<size_t>(array)])) continue;
    Fail(SwapDiffers(extent, storage_->File(home)));
    return false;
  }
  return true;
}

void Executor::SetStates(const sharding::SubGroup& group, std::span<const uint64_t> checksums) {
  const sharding::Decisions& decisions = plan().decisions;
  for (int array = FirstArray(decisions); array <= decisions.optimizer_states; ++array) {
    swap_checksums_->In(HomeOf(group, array), 1).front().Set(checksums[static_cast<size_t>(array)]);
  }
}

// Of what is in the slot, in a pass of its own: where one update does not cover a sub-group, or does
// not happen.
std::span<const uint64_t> Executor::SumStates(const sharding::UpdateWork& work, ThreadTeam& team) {
  const sharding::Decisions& decisions = plan().decisions;
  const int64_t count = plan().pools.homes.sub_groups[static_cast<size_t>(work.sub_group)].count();
  for (int array = FirstArray(decisions); array <= decisions.optimizer_states; ++array) {
    const Place place =
        array == 0 ? work.master : work.states.Plus((array - 1) * work.states_stride);
    const int64_t bytes = count * (array == 0 ? decisions.master_size() : 4);
    state_checksums_[static_cast<size_t>(array)] =
        optim::Checksum(team, {storage_->At(place), static_cast<size_t>(bytes)}, checksum_scratch_);
  }
  return state_checksums_;
}

// Updates sum what they read and write of masters and states. All else is summed where it is moved.
bool Executor::SumsWhenMoved(StateClass what) {
  return what != StateClass::kMaster && what != StateClass::kOptimizer;
}

// `data`: what came of the file from `place` on, whole extents.
void Executor::VerifyRead(const Place& place, std::span<const std::byte> data) {
  for (Extent& extent : swap_checksums_->In(place, static_cast<int64_t>(data.size()))) {
    const uint64_t checksum = optim::Checksum(data.subspan(
        static_cast<size_t>(extent.offset - place.offset), static_cast<size_t>(extent.bytes)));
    if (!extent.Agrees(checksum)) return Fail(SwapDiffers(extent, storage_->File(place)));
    extent.Set(checksum);
  }
}

// `data`: what goes into the file from `place` on. Of an extent that it holds a part of, nobody knows
// the sum.
void Executor::NoteWrite(const Place& place, std::span<const std::byte> data) {
  const auto bytes = static_cast<int64_t>(data.size());
  for (Extent& extent : swap_checksums_->In(place, bytes)) {
    const int64_t at = extent.offset - place.offset;
    if (at < 0 || at + extent.bytes > bytes) {
      extent.Forget();
      continue;
    }
    extent.Set(
        optim::Checksum(data.subspan(static_cast<size_t>(at), static_cast<size_t>(extent.bytes))));
  }
}

// Of what lies in the file, which is read for it alone: ahead of reads in smaller pieces.
absl::Status Executor::VerifyPlace(const Place& place, int64_t bytes) {
  if (place.tier != Tier::kNvme) return absl::OkStatus();
  constexpr int64_t kRunBlocks = 16;
  for (const Extent& extent : swap_checksums_->In(place, bytes)) {
    if (!extent.is_known()) continue;
    std::vector<uint64_t> blocks;
    for (int64_t at = 0; at < extent.bytes;) {
      const int64_t run = std::min(extent.bytes - at, kRunBlocks * optim::kChecksumBlock);
      Place from = place;
      from.offset = extent.offset + at;
      EBB_RETURN_IF_ERROR(VisitPlace(from, run, Access::kRead, [&](std::byte* data) {
        for (int64_t i = 0; i < run; i += optim::kChecksumBlock) {
          blocks.push_back(optim::ChecksumOfBlock(
              {data + i, static_cast<size_t>(std::min(optim::kChecksumBlock, run - i))}));
        }
        return absl::OkStatus();
      }));
      at += run;
    }
    if (extent.Agrees(optim::ChecksumFromBlocks(blocks, extent.bytes))) continue;
    Fail(SwapDiffers(extent, storage_->File(place)));
    return StuckError();
  }
  return absl::OkStatus();
}

// What holds elements [begin, end) of this rank's slice, before values of it are shown.
absl::Status Executor::VerifyArray(const StateArray& array, int64_t begin, int64_t end) {
  EBB_RETURN_IF_ERROR(CheckSwapFiles());
  if (config_.ebb.verify_swap == VerifySwap::kOff) return absl::OkStatus();
  const sharding::Decisions& decisions = plan().decisions;
  const sharding::UnitHomes& unit = plan().pools.homes.units[static_cast<size_t>(array.unit)];
  if (array.what == StateClass::kGradient) {
    const int64_t size = SizeOf(decisions.shard_dtype(array.unit));
    const int64_t elements = plan().layout.units[static_cast<size_t>(array.unit)].trainable.shard;
    return VerifyPlace(plan().pools.GradientShard(array.unit).Plus(begin * size),
                       (std::min(end, elements) - begin) * size);
  }
  const bool masters = array.what == StateClass::kMaster,
             parameters = array.what == StateClass::kParameter;
  if (parameters || (masters && decisions.reads_parameters())) {
    const int64_t size = SizeOf(decisions.compute);
    for (const sharding::ParameterPiece& piece : unit.pieces(array.trainable)) {
      const int64_t first = std::max(begin, piece.begin), last = std::min(end, piece.end);
      if (first >= last) continue;
      EBB_RETURN_IF_ERROR(
          VerifyPlace(piece.home.Plus((first - piece.begin) * size), (last - first) * size));
    }
  }
  if (masters ? decisions.master_size() == 0 : array.what != StateClass::kOptimizer)
    return absl::OkStatus();
  for (int g = 0; g < unit.sub_groups; ++g) {
    const sharding::SubGroup& group =
        plan().pools.homes.sub_groups[static_cast<size_t>(unit.first_sub_group + g)];
    if (group.tier != Tier::kNvme || group.end <= begin || end <= group.begin) continue;
    const Place home = HomeOf(group, masters ? 0 : 1 + array.state);
    EBB_RETURN_IF_ERROR(VerifyPlace(home, 1));
  }
  return absl::OkStatus();
}

}  // namespace ebb
