#include "ebb/runtime/engine/create/measure.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ebb/offload/memory_limits.h"
#include "ebb/offload/overrides.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/create/measurements.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/engine/ranks/collective_pools.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/fit/advice.h"
#include "ebb/sharding/fit/budget.h"
#include "ebb/sharding/fit/offload_ratio.h"
#include "ebb/sharding/memory_model.h"

namespace ebb {
namespace {

constexpr std::string_view kRatio = "zero_optimization.offload_optimizer.ratio";

}  // namespace

// The memory of the measurements is freed when all are done. Freeing waits for the device, where a
// collective of another rank may wait for this one.
struct Measuring::Scratch {
  absl::StatusOr<Buffer> groups = Buffer(), number = Buffer();
  UpdateScratch updates;
};

void Measuring::LogChosen(std::string_view key, std::string_view what) const {
  if (with_.inputs.rank() != 0) return;
  LogInfo(absl::StrCat(with_.inputs.options.name, ": \"", std::string(key), "\" auto is ",
                       std::string(what)));
}

absl::Status Measuring::Measure() {
  const Config planned = config_;
  Scratch scratch;
  if (config_.ebb.measures_coalesce) EBB_RETURN_IF_ERROR(MeasureCoalesce(scratch));
  if (config_.zero.offload_optimizer.measures_ratio) EBB_RETURN_IF_ERROR(MeasureRatio(scratch));
  if (config_.ebb.coalesce_bytes == planned.ebb.coalesce_bytes &&
      config_.zero.offload_optimizer.ratio == planned.zero.offload_optimizer.ratio)
    return absl::OkStatus();
  // A plan that fails does on every rank: all have chosen the same.
  if (const absl::Status own = with_.plans.Plan(); !own.ok()) return AgreeOnPlanned(with_, own);
  // Streams have room for all planned operations.
  return with_.streams.Make(with_.inputs.device, &plan());
}

// All parts of a model have one size, because groups decide the order of NCCL's sums.
absl::Status Measuring::MeasureCoalesce(Scratch& scratch) {
  config_.ebb.measures_coalesce = false;
  if (!with_.inputs.uses_nccl()) return absl::OkStatus();
  const absl::StatusOr<int64_t> of_part = BucketBytesOfPart(scratch);
  with_.communicators.gather().Deregister();
  EBB_RETURN_IF_ERROR(AgreeOnStatus(with_.AllRanks(), of_part.status()));
  EBB_ASSIGN_OR_RETURN(const std::vector<int64_t> all, AllValues(with_.AllRanks(), *of_part));
  config_.ebb.coalesce_bytes = all[0];
  LogChosen("ebb.coalesce", absl::StrCat(all[0], " bytes here"));
  return absl::OkStatus();
}

// The size of a group with which gathers are fast on this rank's links.
absl::StatusOr<int64_t> Measuring::BucketBytesOfPart(Scratch& scratch) {
  constexpr char kWhat[] = "measuring group sizes";
  // Allocated like the pools, because NCCL treats registered memory differently.
  scratch.groups = AllocatePool(with_.inputs, StateClass::kGather, kBucketBytesMax, kWhat);
  scratch.number = with_.inputs.device.AllocateShared(sizeof(int64_t), kWhat);
  EBB_RETURN_IF_ERROR(AgreeOnStatus(
      with_.Control(), scratch.groups.ok() ? scratch.number.status() : scratch.groups.status()));
  if (config_.ebb.register_buffers) {
    const absl::Status any = AgreeOnStatus(
        with_.Control(), with_.communicators.gather().Register(scratch.groups->span()));
    // Otherwise all ranks copy, as they will from the pools, and a line of the log says so.
    if (!any.ok()) with_.communicators.gather().Deregister();
    EBB_RETURN_IF_ERROR(with_.communicators.control().status());
  }
  return MeasureBucketBytes(with_.communicators.gather(), with_.streams.gather(),
                            scratch.groups->span(),
                            *reinterpret_cast<int64_t*>(scratch.number->data()));
}

// The least ratio that ebb.device_memory allows. On a CPU nothing else counts, because the same
// threads update both parts.
void Measuring::ChooseRatioByCap() {
  OffloadOptimizerConfig& optimizer = config_.zero.offload_optimizer;
  if (!optimizer.measures_ratio) return;
  optimizer.ratio =
      sharding::ChooseRatio(with_.inputs.ForPlan(), /*balanced=*/0, config_.ebb.device_memory);
  const bool offloads = config_.optimizer_tier() != Tier::kDevice;
  optimizer.measures_ratio = offloads && !HostReaches(with_.inputs.device);
  if (offloads && !optimizer.measures_ratio)
    LogChosen(kRatio, absl::StrCat(optimizer.ratio, ", as the same threads update both parts"));
}

// The balanced one by rank 0's rates, or more where the device lacks memory.
absl::Status Measuring::MeasureRatio(Scratch& scratch) {
  OffloadOptimizerConfig& optimizer = config_.zero.offload_optimizer;
  EBB_ASSIGN_OR_RETURN(const int64_t device_bytes, DeviceBudget());
  EBB_ASSIGN_OR_RETURN(const double balanced, MeasureBalance(scratch));
  optimizer.measures_ratio = false;
  optimizer.ratio = sharding::ChooseRatio(with_.inputs.ForPlan(), balanced, device_bytes);
  LogChosen(
      kRatio,
      absl::StrCat(optimizer.ratio, " here, ",
                   with_.inputs.options.optimizer ? "as little as fits"
                                                  : absl::StrCat("balanced would be ", balanced),
                   ": a rank's pools on the device may take ", device_bytes, " bytes"));
  return absl::OkStatus();
}

// Ranks of a host share its memory's bandwidth in training, and perhaps a device, so all of them
// measure at a time.
absl::StatusOr<double> Measuring::MeasureBalance(Scratch& scratch) {
  const sharding::Decisions& settled = plan().decisions;
  const std::vector<sharding::SubGroup>& groups = plan().table.sub_groups;
  // The time of an optimizer of the trainer's is not known.
  if (with_.inputs.options.optimizer || groups.empty()) return 0;
  const int unit = groups[0].unit;
  UpdateShape shape{.optimizer = config_.optimizer,
                    .master = !settled.reads_parameters(unit) ? optim::MasterForm::kWhole
                              : settled.split_master          ? optim::MasterForm::kSplit
                                                              : optim::MasterForm::kParameter,
                    .gradient = settled.shard_dtype(unit),
                    .parameter = settled.compute_of(unit),
                    .sent = settled.communication_of(unit),
                    .parameters_go_up = settled.parameter_tier == Tier::kDevice,
                    .pins_host_memory = config_.zero.offload_optimizer.pin_memory};
  for (int k = 0; k < settled.optimizer_states; ++k)
    shape.states.push_back(settled.state_encoding(unit, k));
  for (const sharding::SubGroup& group : groups) shape.elements += group.count();
  EBB_RETURN_IF_ERROR(AgreeOnStatus(with_.Control(), absl::OkStatus()));  // all are here
  const absl::StatusOr<sharding::UpdateRates> rates = MeasureUpdateRates(
      with_.inputs.device, *with_.kernels.device, *with_.kernels.host, shape, scratch.updates);
  EBB_RETURN_IF_ERROR(AgreeOnStatus(with_.Control(), rates.status()));
  constexpr double kParts = 1e6;
  EBB_ASSIGN_OR_RETURN(const std::vector<int64_t> all,
                       AllValues(with_.Control(), std::llround(BalancedRatio(*rates) * kParts)));
  return static_cast<double>(all[0]) / kParts;
}

// Bytes that a rank's pools on the device may take. A tenth of the free memory is left to the
// trainer and to libraries. The rest is for all ranks that use the device.
absl::StatusOr<int64_t> Measuring::DeviceBudget() {
  if (config_.ebb.device_memory) return *config_.ebb.device_memory;
  EBB_ASSIGN_OR_RETURN(
      const std::vector<int64_t> devices,
      AllValues(with_.AllRanks(), static_cast<int64_t>(with_.inputs.device.identity())));
  const int64_t sharing =
      std::count(devices.begin(), devices.end(), devices[with_.inputs.of_verdict().rank()]);
  EBB_ASSIGN_OR_RETURN(
      const std::vector<int64_t> all,
      AllValues(with_.AllRanks(),
                with_.inputs.device.free_bytes().value_or(INT64_MAX) / 10 * 9 / sharing));
  return *std::min_element(all.begin(), all.end());
}

// The facts that are known of the files are kept, whatever is chosen.
absl::Status Measuring::ChooseVerifySwap() {
  if (!with_.storage->files().exist()) return absl::OkStatus();
  const sharding::SwapFiles files = sharding::LayOutSwapFiles(plan());
  VerifySwap& verify = config_.ebb.verify_swap;
  if (verify == VerifySwap::kAuto) {
    verify = VerifySwap::kAll;
    if (const ChecksumWork work = ChecksumWorkOf(plan(), files); work.summed > 0)
      EBB_RETURN_IF_ERROR(MeasureVerifySwap(work));
  }
  const std::string left = ClassesWithoutChecksum(files, verify);
  if (with_.inputs.rank() == 0 && !left.empty()) {
    LogInfo(absl::StrCat(with_.inputs.options.name, ": ", left,
                         " on the disk have no checksum, so it is not noticed if another program "
                         "changes them or the disk returns wrong data (\"ebb.verify_swap\": "
                         "\"all\" gives them checksums)"));
  }
  return absl::OkStatus();
}

// Every rank chooses the same: "states" where one of them would get longer by "all".
absl::Status Measuring::MeasureVerifySwap(const ChecksumWork& work) {
  EBB_RETURN_IF_ERROR(AgreeOnStatus(with_.Control(), absl::OkStatus()));  // all measure at a time
  const absl::StatusOr<ChecksumRates> rates = MeasureChecksumRates(*with_.storage, plan());
  EBB_RETURN_IF_ERROR(AgreeOnStatus(with_.Control(), rates.status()));
  constexpr double kParts = 1e6, kMega = 1e6;
  const int threads =
      with_.streams.all()[sharding::LineOf(sharding::StreamId::kHostUpdate)]->team().threads();
  const auto whole = [](double number) { return std::llround(std::min(number, 1e15)); };
  const int64_t own[] = {whole(std::min(LongerAtMost(work, *rates, threads), 1.0) * kParts),
                         whole(rates->sum / kMega), whole(rates->parameters / kMega),
                         whole(rates->states / kMega), threads};
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all, AllLists(with_.Control(), own));
  const std::vector<int64_t>& worst = *std::max_element(all.begin(), all.end());
  const double longer = static_cast<double>(worst[0]) / kParts;
  const bool keeps_all = longer <= kNoLonger;
  if (!keeps_all) {
    config_.ebb.verify_swap = VerifySwap::kStates;
    with_.verifier->VerifyStatesOnly();
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

absl::Status AgreeOnPlanned(EngineMembers& engine, const absl::Status& own) {
  const bool exceeds_cap = absl::IsResourceExhausted(own);
  const absl::string_view what = own.message();
  const uint64_t cause = sharding::Hasher().Add({what.data(), what.size()}).hash();
  return AgreeOnStatus(
      engine.Control(), own, exceeds_cap ? static_cast<int64_t>(cause) : 0, [&engine] {
        return sharding::FindAdvice(engine.inputs.ForPlan(), sharding::CapsOf(engine.inputs.config))
            .text;
      });
}

// All ranks have read the free memory before one takes some, and each knows how many ranks take
// from it.
absl::Status CheckHostMemory(const EngineInputs& inputs, const sharding::PoolBytes& pools,
                             const HostLane& lane, std::optional<sharding::HostRoom>& tightest) {
  const std::vector<MemoryLimit> limits = ReadMemoryLimits(GivenOverrides().system_root);
  std::vector<int64_t> identities;
  for (const MemoryLimit& limit : limits) {
    sharding::Hasher hasher;
    identities.push_back(static_cast<int64_t>(hasher.Add(limit.identity).hash()));
  }
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all, AllLists(lane, identities));
  std::vector<sharding::HostRoom> rooms;
  std::vector<int64_t> first_ranks;  // under each
  std::vector<std::string> warnings;
  const bool holds_device = HostReaches(inputs.device);
  for (size_t i = 0; i < limits.size(); ++i) {
    const auto is_under = [&](const std::vector<int64_t>& rank) {
      return std::find(rank.begin(), rank.end(), identities[i]) != rank.end();
    };
    first_ranks.push_back(std::find_if(all.begin(), all.end(), is_under) - all.begin());
    rooms.push_back({.of = limits[i].name,
                     .ranks = std::count_if(all.begin(), all.end(), is_under),
                     .ram = limits[i].ram,
                     .swap = limits[i].swap,
                     .holds_device = holds_device,
                     .untouched = inputs.model.workspace_untouched_bytes});
    std::string warning = sharding::HostRoomWarning(
        pools, rooms.back(), sharding::SaveBytes(pools, /*has_gpu=*/!holds_device));
    if (first_ranks.back() == lane.communicator.rank() && !warning.empty())
      warnings.push_back(std::move(warning));
  }
  const auto least = std::min_element(rooms.begin(), rooms.end(),
                                      [](const sharding::HostRoom& a, const sharding::HostRoom& b) {
                                        return a.bytes_of_rank() < b.bytes_of_rank();
                                      });
  absl::Status own;
  if (least != rooms.end()) {
    tightest = *least;
    own = sharding::CheckHostRoom(pools, *least);
  }
  // One of the ranks that share a short resource looks for a config that would fit, and tells the
  // others.
  const absl::Status agreed = AgreeOnStatus(
      lane, own, own.ok() ? 0 : identities[static_cast<size_t>(least - rooms.begin())], [&] {
        const sharding::MemoryCaps caps = sharding::CapsOf(inputs.config, *least);
        return sharding::FindAdvice(inputs.ForPlan(), caps).text;
      });
  for (const std::string& warning : warnings) {
    if (agreed.ok()) LogWarning(absl::StrCat(inputs.options.name, ": ", warning));
  }
  return agreed;
}

}  // namespace ebb
