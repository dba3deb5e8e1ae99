// What of a config would have to be different for its pools to stay within ebb.device_memory and
// ebb.host_memory, or within what a host has. Nothing is guessed: every combination of the settings
// below is laid out, and the first that fits is told: those that keep the trained numbers bit for bit
// before those that do not, and then in the order of how much they change.
//
//   where a class is          parameters, optimizer states, gradients, activations: each tier
//   what stays above it       offload_param.max_in_cpu 0, offload_optimizer.ratio 1
//   what is cut, and when     stage (from 0: 1, 3; from 1, 2: 3; from 3: 2), reduce_at round, a
//                             round of one micro-batch
//   what is in memory a time  no persistent unit, no prefetch, no coalescing, small sub-groups
//                             (SmallSubGroup), split masters
//
// Only what adds gradients up in another order changes numbers, by rounding: how many micro-batches are
// summed before they are reduced. With reduce_at round these are the micro_batches_per_round, with step
// all, however many rounds there are; so a stage is told with the reduce_at that keeps it so, and with
// step a round may be of one micro-batch. Groups of collectives have a say over NCCL only (PlanInputs).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/pools.h"

namespace ebb::sharding {

// At most so many combinations are looked at, and each is laid out at most once more where what it
// needs at least (LeastPools) does not exceed the caps: one that fits mostly is among the first hundred,
// and only where none fits all are needed. Of a config with few of these settings to change it is
// hundreds.
inline constexpr int kAdviceTrialsMax = 33'000;
// A trial takes as long as there are units, and a little for each sub-group, so of very large models
// fewer combinations are tried: at least the first so many where units are all there is, and in all no
// more than this work, in units. What all of them together need is tried in any case.
inline constexpr int64_t kAdviceTrialsMin = 500, kAdviceWorkMax = 500'000;
inline constexpr int64_t kSubGroupsOfAUnit = 4;  // take as long

// Elements: 256 sub-groups or so of what a rank of the config with these pools updates, and no more
// than ebb.host_memory leads to by itself.
int64_t SmallSubGroup(const Pools& pools);

// Bytes of a rank.
struct MemoryCaps {
  std::optional<int64_t> device = {}, host = {};
  std::optional<int64_t> together = {};  // of both, where the device's memory is the host's
  bool of_config = true;                 // keys of it say so; else the machine
};

// The config's own.
MemoryCaps CapsOf(const Config& config);

// How FindAdvice looks at a changed config. Borrowed for the call.
struct AdviceTrials {
  using LayOut = absl::FunctionRef<absl::StatusOr<Pools>(const Config& changed)>;
  LayOut lay_out;                      // as near to the caps as it can be: PlanPools
  LayOut lay_out_least;                // no more than that in any class, and fast: PlanLeastPools
  bool sums_depend_on_groups = false;  // PlanInputs
};

// `config` is resolved, and its pools exceed a cap. For a message: the change that fits, keeps the
// trained numbers if any does, and has the fewest keys; of those the one that moves least, as JSON to
// merge into the config's file. It says so where numbers change. Or what needs least.
std::string FindAdvice(const Config& config, const MemoryCaps& caps, const AdviceTrials& trials);

}  // namespace ebb::sharding
