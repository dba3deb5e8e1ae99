#include "ebb/runtime/engine/create/host_memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/offload/memory_limits.h"
#include "ebb/offload/test_hooks.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/fit/advice.h"
#include "ebb/sharding/memory_model.h"

namespace ebb {
// All ranks have read the free memory before one takes some, and each knows how many ranks take
// from it.
absl::Status CheckHostMemory(const EngineInputs& inputs, const sharding::Pools& pools,
                             const HostLane& lane, std::optional<sharding::HostRoom>& tightest) {
  const std::vector<MemoryLimit> limits = ReadMemoryLimits(GetOffloadTestHooks().system_root);
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
    if (first_ranks.back() == inputs.rank() && !warning.empty())
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
