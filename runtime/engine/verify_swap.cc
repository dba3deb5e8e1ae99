// What of the swap files has checksums (checksum_cost.h).
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

}  // namespace ebb
