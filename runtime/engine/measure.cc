// What a config leaves to Create ("auto"): measured once, the same on every rank from then on, and a
// number in the config that makes another run the same.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/bucket_measurement.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/engine/update_rates.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/offload_ratio.h"

namespace ebb {
namespace {

constexpr std::string_view kRatio = "zero_optimization.offload_optimizer.ratio";

}  // namespace

// What the measurements use goes back when all are done: to give it back waits for the device, where a
// collective of another rank may wait for this one.
struct Executor::MeasuringScratch {
  absl::StatusOr<Buffer> groups = Buffer(), number = Buffer();
  UpdateScratch updates;
};

void Executor::LogChosen(std::string_view key, std::string_view what) const {
  if (rank_ != 0) return;
  LogInfo(absl::StrCat(options_.name, ": \"", std::string(key), "\" auto is ", std::string(what)));
}

absl::Status Executor::Measure() {
  const Config planned = config_;
  MeasuringScratch scratch;
  if (config_.ebb.measures_coalesce) EBB_RETURN_IF_ERROR(MeasureCoalesce(scratch));
  if (config_.zero.offload_optimizer.measures_ratio) EBB_RETURN_IF_ERROR(MeasureRatio(scratch));
  if (config_.ebb.coalesce_bytes == planned.ebb.coalesce_bytes &&
      config_.zero.offload_optimizer.ratio == planned.zero.offload_optimizer.ratio)
    return absl::OkStatus();
  // A plan that fails does on every rank: all have chosen the same.
  if (const absl::Status own = MakePlans(); !own.ok()) return AgreeOnPlanned(own);
  return MakeStreams();  // which have room for what is planned
}

// The size of a group with which gathers are fast on rank 0's links.
absl::Status Executor::MeasureCoalesce(MeasuringScratch& scratch) {
  config_.ebb.measures_coalesce = false;
  if (!world_.connected_by_nccl()) return absl::OkStatus();
  constexpr char kWhat[] = "measuring group sizes";
  // As the pools: what NCCL does for registered memory is what steps will have.
  scratch.groups = AllocatePool(StateClass::kGather, kBucketBytesMax, kWhat);
  scratch.number = device_.AllocateShared(sizeof(int64_t), kWhat);
  EBB_RETURN_IF_ERROR(AgreeOnStatus(
      Control(), scratch.groups.ok() ? scratch.number.status() : scratch.groups.status()));
  if (config_.ebb.register_buffers) {
    const absl::Status any =
        AgreeOnStatus(Control(), gather_communicator_->Register(scratch.groups->span()));
    // Then all copy, as they will from the pools, of which that is logged.
    if (!any.ok()) gather_communicator_->Deregister();
    EBB_RETURN_IF_ERROR(control_->status());
  }
  const auto measure = [&]() -> absl::StatusOr<std::vector<int64_t>> {
    EBB_ASSIGN_OR_RETURN(const int64_t mine,
                         MeasureBucketBytes(*gather_communicator_, *gather_, scratch.groups->span(),
                                            *reinterpret_cast<int64_t*>(scratch.number->data())));
    // Every shard group has measured.
    return AllValues(Control(), mine);
  };
  const absl::StatusOr<std::vector<int64_t>> all = measure();
  gather_communicator_->Deregister();
  EBB_RETURN_IF_ERROR(all.status());
  config_.ebb.coalesce_bytes = (*all)[0];
  LogChosen("ebb.coalesce", absl::StrCat((*all)[0], " bytes here"));
  return absl::OkStatus();
}

// What ebb.device_memory asks for. On a CPU the same threads update both parts: there it is all that
// counts.
void Executor::ChooseRatioByCap() {
  OffloadOptimizerConfig& optimizer = config_.zero.offload_optimizer;
  if (!optimizer.measures_ratio) return;
  optimizer.ratio = sharding::ChooseRatio(Inputs(), /*balanced=*/0, config_.ebb.device_memory);
  const bool offloads = config_.optimizer_tier() != Tier::kDevice;
  optimizer.measures_ratio = offloads && device_.kind() != DeviceKind::kCpu;
  if (offloads && !optimizer.measures_ratio)
    LogChosen(kRatio, absl::StrCat(optimizer.ratio, ", as the same threads update both parts"));
}

// The balanced one by rank 0's rates, or more where the device lacks memory.
absl::Status Executor::MeasureRatio(MeasuringScratch& scratch) {
  OffloadOptimizerConfig& optimizer = config_.zero.offload_optimizer;
  EBB_ASSIGN_OR_RETURN(const int64_t device_bytes, DeviceBudget());
  EBB_ASSIGN_OR_RETURN(const double balanced, MeasureBalance(scratch));
  optimizer.measures_ratio = false;
  optimizer.ratio = sharding::ChooseRatio(Inputs(), balanced, device_bytes);
  LogChosen(kRatio,
            absl::StrCat(optimizer.ratio, " here, ",
                         options_.optimizer ? "as little as fits"
                                            : absl::StrCat("balanced would be ", balanced),
                         ": a rank's pools on the device may take ", device_bytes, " bytes"));
  return absl::OkStatus();
}

// Ranks of a host share its memory's bandwidth in training, and perhaps a device, so all of them
// measure at a time.
absl::StatusOr<double> Executor::MeasureBalance(MeasuringScratch& scratch) {
  const sharding::Decisions& decisions = plan().decisions;
  const std::vector<sharding::SubGroup>& groups = plan().pools.homes.sub_groups;
  // The time of an optimizer of the trainer's is not known.
  if (options_.optimizer || groups.empty()) return 0;
  UpdateShape shape{.optimizer = config_.optimizer,
                    .master = decisions.stochastic_rounding ? optim::MasterForm::kParameter
                              : decisions.split_master      ? optim::MasterForm::kSplit
                                                            : optim::MasterForm::kWhole,
                    .gradient = decisions.shard_dtype(groups[0].unit),
                    .parameter = decisions.compute,
                    .sent = decisions.communication,
                    .parameters_go_up = decisions.parameter_tier == Tier::kDevice,
                    .pins_host_memory = config_.zero.offload_optimizer.pin_memory};
  for (const sharding::SubGroup& group : groups) shape.elements += group.count();
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), absl::OkStatus()));  // all are here
  const absl::StatusOr<sharding::UpdateRates> rates =
      MeasureUpdateRates(device_, *kernels_, *host_kernels_, shape, scratch.updates);
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), rates.status()));
  constexpr double kParts = 1e6;
  EBB_ASSIGN_OR_RETURN(const std::vector<int64_t> all,
                       AllValues(Control(), std::llround(BalancedRatio(*rates) * kParts)));
  return static_cast<double>(all[0]) / kParts;
}

// What a rank's pools on the device may take. Of what is free a tenth is left to the trainer and to
// libraries; the rest is for all ranks that use the device.
absl::StatusOr<int64_t> Executor::DeviceBudget() {
  if (config_.ebb.device_memory) return *config_.ebb.device_memory;
  EBB_ASSIGN_OR_RETURN(const std::vector<int64_t> devices,
                       AllValues(Control(), static_cast<int64_t>(device_.identity())));
  const int64_t sharing =
      std::count(devices.begin(), devices.end(), devices[static_cast<size_t>(rank_)]);
  EBB_ASSIGN_OR_RETURN(
      const std::vector<int64_t> all,
      AllValues(Control(), device_.free_bytes().value_or(INT64_MAX) / 10 * 9 / sharing));
  return *std::min_element(all.begin(), all.end());
}

}  // namespace ebb
