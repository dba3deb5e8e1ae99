// A plan with what running it needs: the memory of its collectives, an event for each operation, room
// for its transfers. Made once, so that a step allocates nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ebb/offload/shard_file.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/event.h"
#include "ebb/sharding/plan.h"

namespace ebb {

struct Runnable {
  sharding::Plan plan;
  bool hold_updates = false;
  std::vector<std::vector<CollectiveSpan>> spans;  // by operation; empty where it is no collective
  std::vector<Event> events;                       // by operation
  std::vector<std::unique_ptr<IoTransfer[]>> transfers;  // by operation; of its moves
  std::vector<uint8_t> transfers_started;                // by operation
  std::vector<TrafficRow> traffic[2];  // predicted: without, with updates of the step before
  std::vector<int64_t> begin_ns;       // by operation, while tracing
  std::vector<uint8_t> issued;         // by operation, of the step that runs it
  int64_t bytes_of[sharding::kOperationKinds] = {};  // of a step's communication, by operation kind
};

}  // namespace ebb
