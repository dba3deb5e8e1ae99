// Measures the values that a config leaves to Create ("auto"): once, with the same result on every
// rank. The result is a number in the config, and with that number another run is the same.
// Collective.
#pragma once

#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/create/engine_members.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/ranks/host_lane.h"
#include "ebb/sharding/fit/budget.h"
#include "ebb/sharding/plan.h"

namespace ebb {

struct ChecksumWork;

class Measuring {
 public:
  explicit Measuring(EngineMembers& engine) : with_(engine), config_(engine.inputs.config) {}

  // Before planning: the ratio that ebb.device_memory asks for. On a CPU that ratio alone counts,
  // because the same threads update both parts.
  void ChooseRatioByCap();
  // Measures the rest, and plans with the choices.
  absl::Status Measure();
  // Once there are swap files: which of them get checksums (measurements.h).
  absl::Status ChooseVerifySwap();

 private:
  struct Scratch;
  absl::Status MeasureCoalesce(Scratch& scratch);
  absl::StatusOr<int64_t> BucketBytesOfPart(Scratch& scratch);
  absl::Status MeasureRatio(Scratch& scratch);
  absl::StatusOr<double> MeasureBalance(Scratch& scratch);
  absl::StatusOr<int64_t> DeviceBudget();
  absl::Status MeasureVerifySwap(const ChecksumWork& work);
  void LogChosen(std::string_view key, std::string_view what) const;
  const sharding::Plan& plan() const { return with_.plans.plan(); }

  EngineMembers& with_;
  Config& config_;
};

// Agrees on the result of planning on this rank. If ranks exceed a cap alike, one rank looks for a
// config that would fit, and tells the others.
absl::Status AgreeOnPlanned(EngineMembers& engine, const absl::Status& own);

// Whether the host has the memory that Create is about to take. Collective. `tightest`: the limit
// with the least room for a rank; none if the system names none.
absl::Status CheckHostMemory(const EngineInputs& inputs, const sharding::PoolBytes& pools,
                             const HostLane& lane, std::optional<sharding::HostRoom>& tightest);

}  // namespace ebb
