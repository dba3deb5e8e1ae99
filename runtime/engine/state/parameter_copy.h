// Parameters of one engine into another of the same world, from shards to shards. Each round packs
// elements for other ranks into staging, sends and receives one message for each pair of ranks, and
// unpacks it. Elements that stay on a rank are read from one shard and written to the other.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/buffer.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/ranks/host_lane.h"
#include "ebb/runtime/engine/state/state_access.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/copy_plan.h"

namespace ebb {

class ParameterCopy {
 public:
  // All but `source` are the destination's. `mirror`: for data between ranks, kept between copies.
  ParameterCopy(StateAccess& source, StateAccess& destination, const HostLane& lane,
                DeviceMirror& mirror, const EngineInputs& inputs)
      : source_(source),
        destination_(destination),
        lane_(lane),
        mirror_(mirror),
        inputs_(inputs),
        rank_(inputs.rank()) {}

  // Plans the copy and takes its memory, which the destination's `ledger` counts meanwhile.
  absl::Status Prepare(const Device& device, int ranks, MemoryLedger& ledger);
  // Collective, once all ranks have prepared. Writes masters only, not what follows from them.
  absl::Status Run();

 private:
  static constexpr int64_t kBytesMax = int64_t{4} << 20;  // of each direction, in one round

  absl::Status RunRound(std::span<const sharding::Transfer> transfers);
  absl::StatusOr<int64_t> Pack(std::span<const sharding::Transfer> transfers);
  absl::Status Exchange(std::span<const sharding::Transfer> transfers, int64_t packed);
  // Writes values_, from element `begin` of the parameter on.
  absl::Status Write(const sharding::Transfer& transfer, int64_t begin);
  absl::Status InParts(const sharding::Transfer& transfer,
                       absl::FunctionRef<absl::Status(int64_t begin)> move);
  absl::Status Unpack(std::span<const sharding::Transfer> transfers);

  StateAccess& source_;
  StateAccess& destination_;
  const HostLane lane_;
  DeviceMirror& mirror_;
  const EngineInputs& inputs_;
  const int rank_;  // of data; tensor ranks copy their own blocks
  sharding::CopyPlan plan_;
  Buffer send_, receive_;
  MemoryLedger::Charge charge_;
  std::vector<CollectiveSpan> messages_;  // of one round; borrowed until they have been sent
  std::vector<float> values_;             // of a part of a transfer
  std::optional<sharding::StateArray> verified_;  // the last one, of the source
};

}  // namespace ebb
