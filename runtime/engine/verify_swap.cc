// What of the swap files has checksums (checksum_cost.h), and the files before values are shown
// (swap_verifier.h); once a step the plan has that (kCheck).
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/checksum_cost.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {

using sharding::Place;

// What is known of the files stays known, whichever it is.
absl::Status Executor::ChooseVerifySwap() {
  if (!storage_->HasFiles()) return absl::OkStatus();
  VerifySwap& verify = config_.ebb.verify_swap;
  if (verify == VerifySwap::kAuto) {
    verify = VerifySwap::kAll;
    if (const ChecksumWork work = ChecksumWorkOf(plan()); work.summed > 0)
      EBB_RETURN_IF_ERROR(MeasureVerifySwap(work));
  }
  const std::string left = ClassesWithoutChecksum(plan(), verify);
  if (rank_ == 0 && !left.empty()) {
    LogInfo(absl::StrCat(options_.name, ": ", left,
                         " on the disk have no checksum: what another program changes of them in "
                         "place, or the disk returns wrong, is not noticed (\"ebb.verify_swap\": "
                         "\"all\" has one for them, too)"));
  }
  return absl::OkStatus();
}

// The same on all ranks: "states" where one of them would get longer by "all".
absl::Status Executor::MeasureVerifySwap(const ChecksumWork& work) {
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), absl::OkStatus()));  // all measure at a time
  const absl::StatusOr<ChecksumRates> rates = MeasureChecksumRates(*storage_, plan());
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), rates.status()));
  constexpr double kParts = 1e6, kMega = 1e6;
  const int threads = host_update_->team().threads();
  const auto whole = [](double number) { return std::llround(std::min(number, 1e15)); };
  const int64_t own[] = {whole(std::min(LongerAtMost(work, *rates, threads), 1.0) * kParts),
                         whole(rates->sum / kMega), whole(rates->parameters / kMega),
                         whole(rates->states / kMega), threads};
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all, AllLists(Control(), own));
  const std::vector<int64_t>& worst = *std::max_element(all.begin(), all.end());
  const double longer = static_cast<double>(worst[0]) / kParts;
  const bool keeps_all = longer <= kNoLonger;
  if (!keeps_all) {
    config_.ebb.verify_swap = VerifySwap::kStates;
    swap_verifier_->VerifyStatesOnly();
  }
  std::vector<std::string> disk;
  if (work.parameters > 0) disk.push_back(absl::StrCat("parameters at ", worst[2], " MB/s"));
  if (work.states > 0) disk.push_back(absl::StrCat("states at ", worst[3], " MB/s"));
  LogChosen(
      "ebb.verify_swap",
      absl::StrFormat("%s here: with all a step may get %.1f%% longer, and up to %.1f%% counts "
                      "as no longer (the disk moves %s, one thread of %d sums %d MB/s)",
                      keeps_all ? "all" : "states", longer * 100, kNoLonger * 100,
                      absl::StrJoin(disk, " and "), worst[4], worst[1]));
  return absl::OkStatus();
}

// For calls for state, which wait for the disk anyway.
absl::Status Executor::CheckSwapFiles() {
  return swap_verifier_->FilesAreOurs() ? absl::OkStatus() : errors_.failure();
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
  return agrees ? absl::OkStatus() : errors_.failure();
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
