// Sums of gradients beside the shards that backward writes over. Where the whole gradient is the shard
// (sharding::GradientIsShard), a second backward of the unit in one step, which was not declared, starts
// from zero in the memory of the sum so far. That waits here, and what the second one wrote is added to
// it. Memory is allocated when a unit first needs it, and stays: a step that keeps the declared order
// needs none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "absl/status/status.h"
#include "ebb/runtime/device/buffer.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/trace/ledger.h"

namespace ebb {

class DisplacedGradients {
 public:
  // Copies the sum of `unit`, `bytes` at `shard`, in the order of `stream`.
  absl::Status Keep(int unit, const void* shard, int64_t bytes, Stream& stream,
                    const Device& device, MemoryLedger& ledger);
  // Where the sum is that was kept since the last call for this unit; null: none was.
  std::byte* Take(int unit);

 private:
  struct Sum {
    Buffer buffer;
    MemoryLedger::Charge charge;
    bool kept = false;
  };
  std::map<int, Sum> sums_;  // by unit
};

}  // namespace ebb
