// Registers the pools with communicators: where ordered sums are made, and which memory NCCL may
// use without copies of its own. Once the pools exist and again once they have moved, on all ranks.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"
#include "ebb/sharding/plan.h"

namespace ebb {

// Memory for a class of state that communicators may be told of. Plain if no step sends the class.
absl::StatusOr<Buffer> AllocatePool(const EngineInputs& inputs, StateClass state, int64_t bytes,
                                    std::string_view what);

class CollectivePools {
 public:
  CollectivePools(const EngineInputs& inputs, EngineCommunicators& communicators,
                  EngineStreams& streams)
      : inputs_(inputs), communicators_(communicators), streams_(streams) {}

  // Collective. Both outlive this, or the next call.
  absl::Status Show(const Storage& storage, const sharding::Table& table);
  // Before the pools move or go, with no operation under way.
  void Deregister();

 private:
  absl::Status Register(const Storage& storage);
  // Sums over these axes are made in the scratch, if the table has it.
  absl::Status SumInOrder(const Storage& storage, const sharding::Table& table,
                          sharding::Purpose scratch, sharding::StreamId stream,
                          std::initializer_list<Axes> all_axes);

  const EngineInputs& inputs_;
  EngineCommunicators& communicators_;
  EngineStreams& streams_;
  bool logged_copies_ = false;  // it was logged that communicators copy
};

}  // namespace ebb
