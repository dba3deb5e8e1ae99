// A plan with what running it needs: the memory of its collectives, an event for each operation that
// is awaited, room for its transfers. Made once, so that a step allocates nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ebb/offload/shard_file.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/event.h"
#include "ebb/sharding/lists.h"
#include "ebb/sharding/plan.h"

namespace ebb {

struct Runnable {
  sharding::Plan plan;
  bool hold_updates = false;
  sharding::Lists<CollectiveSpan> span_lists;
  std::vector<std::span<const CollectiveSpan>>
      spans;                  // by operation; empty: not a collective, nor a fill
  std::vector<Event> events;  // of the operations that are awaited
  std::vector<int> event_of;  // by operation; -1: not awaited
  std::vector<std::unique_ptr<IoTransfer[]>> transfers;  // by operation; of its moves
  std::vector<uint8_t> transfers_started;                // by operation
  std::vector<TrafficRow> traffic[2];  // predicted: without, with updates of the step before
  std::vector<int64_t> begin_ns;       // by operation; empty without a timeline
  std::vector<uint8_t> issued;         // by operation, of the step that runs it
  std::vector<int> carried;            // CarriedOperations
  Event* EventOf(int operation) {
    const int event = event_of[static_cast<size_t>(operation)];
    return event < 0 ? nullptr : &events[static_cast<size_t>(event)];
  }
  int64_t bytes_of[sharding::kOperationKinds] = {};  // of a step's communication, by operation kind
};

}  // namespace ebb
