// What of a config would have to be different for its pools to stay within ebb.device_memory and
// ebb.host_memory, or within what a host has. Nothing is guessed: every combination of the settings
// below is laid out, in the order of how much it changes, and the first that fits is told.
//
//   where a class is          parameters, optimizer states, gradients, activations: each tier
//   what stays above it       offload_param.max_in_cpu 0, offload_optimizer.ratio 1
//   what is cut, and when     stage (from 0: 1, 3; from 1, 2: 3; from 3: 2), reduce_at round, a
//                             round of one micro-batch
//   what is in memory a time  no persistent unit, no prefetch, no coalescing, small sub-groups
//                             (SmallSubGroup), split masters
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/pools.h"

namespace ebb::sharding {

// At most so many combinations are laid out: one that fits mostly is among the first hundred, and
// only where none fits all are needed. Of a config with few of these settings to change it is
// hundreds.
inline constexpr int kAdviceTrialsMax = 33'000;
// A trial takes as long as there are units, so of models of very many fewer combinations are tried: at
// least the first so many, and in all no more trials times units than this. What all of them together
// need is tried in any case.
inline constexpr int64_t kAdviceTrialsMin = 500, kAdviceUnitTrialsMax = 500'000;

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

// `config` is resolved, and its pools exceed a cap. `lay_out`: as near to the caps as a changed
// config's can be (PlanPools). For a message: the change of the fewest keys that fits, of those the
// one that moves least, as JSON to merge into the config's file; or what needs least.
std::string FindAdvice(const Config& config, const MemoryCaps& caps,
                       absl::FunctionRef<absl::StatusOr<Pools>(const Config& changed)> lay_out);

}  // namespace ebb::sharding
