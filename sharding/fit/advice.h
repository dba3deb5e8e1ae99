// Finds the change to a config that makes its pools fit into ebb.device_memory and ebb.host_memory,
// or into the memory of a host. Nothing is guessed: every combination of the settings below is laid
// out, and the first that fits is the advice. Combinations that keep the trained numbers bit for
// bit come first. Within each group smaller changes come first.
//
//   where a class is          parameters, optimizer states, gradients, activations: each tier
//   what stays above it       offload_param.max_in_cpu 0, offload_optimizer.ratio 1
//   what is cut, and when     stage (from 0: 1, 3; from 1, 2: 3; from 3: 2), reduce_at round, a
//                             round of one micro-batch
//   what is in memory a time  no persistent unit, no prefetch, no coalescing, small sub-groups
//                             (SmallSubGroup), split masters
//
// Only another order of sums changes numbers, by rounding: how many micro-batches are summed before
// a reduction. With reduce_at round these are micro_batches_per_round, with reduce_at step all. So
// an advised stage comes with the reduce_at that keeps the sums; with step a round may be one
// micro-batch. Groups of collectives change sums over NCCL only (PlanInputs).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/table.h"

namespace ebb::sharding {

struct HostRoom;
struct PlanInputs;

// The most combinations that are looked at. Each is laid out once more if its least need
// (LeastTable) does not exceed the caps. A combination that fits is mostly among the first hundred;
// all are needed only if none fits. A config with few of these settings to change has some
// hundreds.
inline constexpr int kAdviceTrialsMax = 33'000;
// The time of a trial grows with the number of units and, a little, of sub-groups. So very large
// models get fewer trials: at least the first kAdviceTrialsMin by their units alone, and at most
// kAdviceWorkMax of work in units. The combination of all settings is always tried.
inline constexpr int64_t kAdviceTrialsMin = 500, kAdviceWorkMax = 500'000;
inline constexpr int64_t kSubGroupsOfAUnit = 4;  // take as long as one unit

// Elements of a small sub-group: about 1/256 of the elements that a rank updates.
// ebb.host_memory alone never leads to more.
int64_t SmallSubGroup(const Table& table);

// Bytes of a rank.
struct MemoryCaps {
  std::optional<int64_t> device = {}, host = {};
  std::optional<int64_t> together = {};  // of both tiers, where the device's memory is the host's
  std::optional<int64_t> disk = {};      // for swap files
  bool of_config = true;                 // the config's keys set the caps; false: the machine does
  std::string_view relief = "raise it";  // what helps without a change of the config
};

// The config's own.
MemoryCaps CapsOf(const Config& config);
// The config's for the device, and the host's for what is in RAM.
MemoryCaps CapsOf(const Config& config, const HostRoom& room);

// How FindAdvice looks at a changed config. Borrowed for the call.
struct AdviceTrials {
  using LayOut = absl::FunctionRef<absl::StatusOr<Table>(const Config& changed)>;
  LayOut lay_out;                      // as near to the caps as it can be: PlanTable
  LayOut lay_out_least;                // faster: needs no more in any class; PlanLeastTable
  bool sums_depend_on_groups = false;  // PlanInputs
};

// For a message: the change that fits, as JSON to merge into the config's file. The change keeps
// the trained numbers if any does (else the text says so) with the fewest keys and least traffic.
// If none fits: what needs least.
struct FoundAdvice {
  std::string text;
  std::optional<Config> config = {};  // resolved; none: no setting fits
  std::string keys = "";              // of the config, as JSON
};

// `config` is resolved, and its pools exceed a cap.
FoundAdvice FindAdvice(const Config& config, const MemoryCaps& caps, const AdviceTrials& trials);
// For the pools of these inputs (plan.h).
FoundAdvice FindAdvice(const PlanInputs& inputs, const MemoryCaps& caps);

}  // namespace ebb::sharding
