#include "ebb/runtime/comm/node/conveyor.h"

#include <algorithm>
#include <atomic>

#include "ebb/runtime/comm/node/pass.h"
#include "ebb/runtime/comm/transfer.h"

namespace ebb {

Conveyor::Conveyor(NodeGroup& group) : group_(group) {
  for (int i = 0; i < group.layout().lanes(); ++i) {
    lanes_.push_back(std::make_unique<Lane>());
    lanes_.back()->inputs.resize(static_cast<size_t>(group.size()));
  }
}

bool Conveyor::Run(const Collective& call, int lanes, WaitPoint::Deadline deadline,
                   ThreadTeam& team) {
  const int64_t origin = call.partial != nullptr ? call.partial->begin : 0;
  const int64_t elements = call.partial != nullptr ? call.partial->end - origin
                                                   : TotalBytes(call, 1) / SizeOf(call.dtype);
  if (elements == 0) return true;
  // Each lane is worth a thread's waking.
  const int64_t bytes = elements * SizeOf(call.dtype) * group_.size();
  constexpr int64_t kLaneBytesMin = int64_t{512} << 10;
  const int64_t used = std::clamp<int64_t>(bytes / kLaneBytesMin, 1, lanes);
  constexpr int64_t kElementsOfALine = 64;  // whole cache lines of any dtype
  const int64_t share =
      ((elements + used - 1) / used + kElementsOfALine - 1) / kElementsOfALine * kElementsOfALine;
  std::atomic<bool> done{true};
  // Lanes are begun in order, each on all ranks sooner or later, so the first that is not complete
  // always goes on: whatever threads the ranks have.
  team.Run(used, 1, [&](int64_t first, int64_t last) {
    for (int64_t lane = first; lane < last; ++lane) {
      const int64_t begin = std::min(elements, lane * share);
      const int64_t end = std::min(elements, begin + share);
      Pass pass(group_, *lanes_[static_cast<size_t>(lane)], static_cast<int>(lane), call,
                origin + begin, origin + end, deadline);
      if (!pass.Run()) done.store(false, std::memory_order_relaxed);
    }
  });
  return done.load(std::memory_order_relaxed);
}

}  // namespace ebb
