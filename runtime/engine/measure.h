// What a config leaves to Create ("auto"): measured once, the same on every rank from then on, and a number in the
// config that makes another run the same. Collective.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/engine_parts.h"

namespace ebb {

struct ChecksumWork;

class Measuring {
 public:
  explicit Measuring(EngineParts& parts) : with_(parts), config_(parts.inputs.config) {}

  // Before planning: the ratio that ebb.device_memory asks for. On a CPU the same threads update both parts, and it
  // is all that counts.
  void ChooseRatioByCap();
  // The rest, and plans for what was chosen.
  absl::Status Measure();
  // Once there are swap files: which of them have checksums (checksum_cost.h).
  absl::Status ChooseVerifySwap();

 private:
  struct Scratch;
  absl::Status MeasureCoalesce(Scratch& scratch);
  absl::Status MeasureRatio(Scratch& scratch);
  absl::StatusOr<double> MeasureBalance(Scratch& scratch);
  absl::StatusOr<int64_t> DeviceBudget();
  absl::Status MeasureVerifySwap(const ChecksumWork& work);
  void LogChosen(std::string_view key, std::string_view what) const;
  const sharding::Plan& plan() const { return with_.programs.plan(); }
  HostLane Control() const { return with_.communicators.Control(with_.streams.reduce()); }

  EngineParts& with_;
  Config& config_;
};

// Of what planning has come to on this rank. Of a cap that ranks exceed alike one rank looks for what would fit, and
// tells the others.
absl::Status AgreeOnPlanned(EngineParts& parts, const absl::Status& own);

}  // namespace ebb
