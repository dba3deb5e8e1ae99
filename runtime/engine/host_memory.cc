// Whether the host has the memory that Create is about to take.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ebb/offload/memory_limits.h"
#include "ebb/offload/test_hooks.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/advice.h"
#include "ebb/sharding/budget.h"
#include "ebb/sharding/fingerprint.h"

namespace ebb {

// All have read what is left before anybody takes of it, and each knows how many take of the same.
absl::Status Executor::CheckHostMemory() {
  const std::vector<MemoryLimit> limits = ReadMemoryLimits(GetOffloadTestHooks().system_root);
  std::vector<int64_t> identities;
  for (const MemoryLimit& limit : limits) {
    sharding::Hasher hasher;
    identities.push_back(static_cast<int64_t>(hasher.Add(limit.identity).hash()));
  }
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all,
                       AllLists(Control(), identities));
  absl::Status own;
  for (size_t i = 0; own.ok() && i < limits.size(); ++i) {
    const auto is_under = [&](const std::vector<int64_t>& rank) {
      return std::find(rank.begin(), rank.end(), identities[i]) != rank.end();
    };
    const bool is_first = std::find_if(all.begin(), all.end(), is_under) - all.begin() == rank_;
    own = CheckHostRoom({.of = limits[i].name,
                         .ranks = std::count_if(all.begin(), all.end(), is_under),
                         .ram = limits[i].ram,
                         .swap = limits[i].swap,
                         .holds_device = device_.kind() == DeviceKind::kCpu},
                        /*warns=*/is_first);
  }
  return AgreeOnStatus(Control(), own);
}

absl::Status Executor::CheckHostRoom(const sharding::HostRoom& room, bool warns) const {
  const sharding::Pools& pools = plan().pools;
  const absl::Status status = sharding::CheckHostRoom(pools, room);
  if (status.ok()) {
    const std::string warning = sharding::HostRoomWarning(pools, room);
    if (warns && !warning.empty()) LogWarning(absl::StrCat(options_.name, ": ", warning));
    return status;
  }
  sharding::MemoryCaps caps{.device = config_.ebb.device_memory, .of_config = false};
  // A process is more than its pools.
  const int64_t of_rank = (room.ram + room.swap) / room.ranks;
  (room.holds_device ? caps.together : caps.host) = of_rank - of_rank / 20;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), "; ", sharding::Advice(Inputs(), caps)));
}

}  // namespace ebb
