// The communicators of an engine: one for outside of steps, and one for each lane of steps, so that
// lanes do not wait for each other.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/ranks/host_lane.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/instructions.h"

namespace ebb {

class EngineCommunicators {
 public:
  explicit EngineCommunicators(const EngineInputs& inputs) : inputs_(inputs) {}

  // Collective, each of them, and in this order.
  absl::Status MakeControl(MemoryLedger& ledger);
  // For the exchange of records, if the verdict is of more ranks than the world.
  absl::Status MakeVerdict();
  // `shards`: ranks that each unit is cut over.
  absl::Status MakeGather(int shards);
  // The communicator of the ranks that hold a secondary copy.
  absl::Status MakeSecondary(int secondary_shards);
  // With replicas: of the shard group, of the ranks with the same slice, and of the world, unless
  // the verdict has one.
  absl::Status MakeReduce(int shards);

  // For reading state beside steps. A second call does nothing.
  absl::Status MakeAsyncReads(MemoryLedger& ledger);
  HostLane AsyncReads(Stream& stream) {
    return {*async_reads_, stream, async_reads_mirror_, inputs_.world};
  }

  Communicator& control() { return *control_; }
  // The control communicator for data in host memory; `stream`: the reduce stream.
  HostLane Control(Stream& stream) { return {*control_, stream, mirror_, inputs_.world}; }
  // Likewise of the verdict, before the first step; after MakeVerdict.
  HostLane Verdict(Stream& stream) { return {**of_world(), stream, mirror_, *inputs_.verdict}; }

  Communicator& gather() { return **at(sharding::Lane::kGather); }
  Communicator& reduce() { return **at(sharding::Lane::kReduce); }
  // Null if there is none, or none yet.
  std::optional<Communicator>* at(sharding::Lane lane) {
    return &lanes_[static_cast<size_t>(lane)];
  }
  // Over all ranks of a verdict, on the reduce stream. If shards are not repeated, it is the
  // communicator of reductions.
  std::optional<Communicator>* of_world() {
    std::optional<Communicator>* const own = at(sharding::Lane::kExchange);
    return own->has_value() ? own : at(sharding::Lane::kReduce);
  }
  // The communicator of an instruction.
  Communicator& Of(sharding::Lane lane) {
    return lane == sharding::Lane::kExchange ? **of_world() : **at(lane);
  }
  // Communicators of steps, made or not; the first, of Lane::kNone, is never made.
  std::array<std::optional<Communicator>, sharding::kLanes>& of_steps() { return lanes_; }

  // To give memory of the device back waits for the device, and a rank must not wait there for
  // another. So ranks meet here afterwards, before the next work on it. Collective.
  absl::Status BarrierAfterFreedMemory() const;

  CommunicatorOptions OptionsOf(std::string_view name) const;
  // Collectives under way end with errors.
  void Leave();

 private:
  // With room for data from host memory.
  absl::Status MakeForHost(std::string_view name, MemoryLedger& ledger,
                           std::optional<Communicator>& communicator, DeviceMirror& mirror) const;
  absl::Status Make(std::string_view name, sharding::Lane lane);
  absl::Status Split(std::string_view name, int group,
                     sharding::Lane lane);  // by the ranks' groups

  const EngineInputs& inputs_;
  std::optional<Communicator> control_;
  DeviceMirror mirror_;  // for data from host memory
  std::optional<Communicator> async_reads_;
  DeviceMirror async_reads_mirror_;
  std::array<std::optional<Communicator>, sharding::kLanes> lanes_;
};

}  // namespace ebb
