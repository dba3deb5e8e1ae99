// The swap files before values are shown (swap_verifier.h); once a step the plan has it (kCheck).
#include <algorithm>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/executor.h"

namespace ebb {

using sharding::Place;

// For who calls for state, and waits for the disk anyway.
absl::Status Executor::CheckSwapFiles() {
  return swap_verifier_->FilesAreOurs() ? absl::OkStatus() : StuckError();
}

absl::Status Executor::VerifyPlace(const Place& place, int64_t bytes) {
  if (place.tier != Tier::kNvme) return absl::OkStatus();
  EBB_ASSIGN_OR_RETURN(
      const bool agrees,
      swap_verifier_->VerifyFile(place, bytes, [&](const Place& from, int64_t run, auto show) {
        return VisitPlace(from, run, Access::kRead, [&](std::byte* data) {
          show(data);
          return absl::OkStatus();
        });
      }));
  return agrees ? absl::OkStatus() : StuckError();
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
    const Place home = swap_verifier_->HomeOf(group, masters ? 0 : 1 + array.state);
    EBB_RETURN_IF_ERROR(VerifyPlace(home, 1));
  }
  return absl::OkStatus();
}

}  // namespace ebb
