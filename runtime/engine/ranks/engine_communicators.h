// The communicators of an engine: one for outside of steps, and one for each pair of a line and
// axes that operations of steps name, so that lines do not wait for each other.
#pragma once

#include <deque>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/ranks/host_lane.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/op_list.h"

namespace ebb {

class EngineCommunicators {
 public:
  explicit EngineCommunicators(const EngineInputs& inputs) : inputs_(inputs) {}

  // Collective, each of them, and in this order.
  absl::Status MakeControl(MemoryLedger& ledger);
  // For the exchange of records, if the verdict is of more ranks than the world.
  absl::Status MakeVerdict();
  // Two of the tensor ranks of ebb.mesh: for the trainer's kernels, and for gradients that are sums.
  absl::Status MakeTensor();
  // `shards`: ranks that each unit is cut over.
  absl::Status MakeGather(int shards);
  // The communicator of the ranks that hold a secondary copy.
  absl::Status MakeSecondary(int secondary_shards);
  // One of the ranks that have a cut model together. With replicas: of the shard group, of the
  // ranks with the same slice, and of the world, unless the verdict has one.
  absl::Status MakeReduce(int shards);

  // For reading state beside steps. A second call does nothing.
  absl::Status MakeAsyncReads(MemoryLedger& ledger);
  HostLane AsyncReads(Stream& stream) {
    return {*async_reads_, stream, async_reads_mirror_, inputs_.of_calls()};
  }

  Communicator& control() { return *control_; }
  // The control communicator for data in host memory; `stream`: the reduce stream.
  HostLane Control(Stream& stream) { return {*control_, stream, mirror_, inputs_.of_calls()}; }
  // Likewise of the verdict, before the first step; after MakeVerdict.
  HostLane Verdict(Stream& stream) { return {of_verdict(), stream, mirror_, *inputs_.verdict}; }

  // A communicator of steps: of the ranks that differ in these axes, for operations on this line.
  struct OfSteps {
    sharding::Line line{};
    Axes axes;
    Communicator communicator;
  };
  // In the order in which they were made, which all ranks share. Tasks of streams keep references.
  std::deque<OfSteps>& of_steps() { return of_steps_; }
  // Null if there is none, or none yet.
  Communicator* Find(sharding::StreamId stream, Axes axes);
  // That communicator. Records go along the world. Where that is one shard group, and the verdict
  // is the world's, they go through the communicator of reductions.
  Communicator& Along(sharding::StreamId stream, Axes axes);
  Communicator& gather() { return Along(sharding::StreamId::kGather, kShardAxes); }
  Communicator& of_verdict() { return Along(sharding::StreamId::kReduce, kWorldAxes); }

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
  // Among all ranks, or among those of the same group.
  absl::Status Make(std::string_view name, sharding::StreamId stream, Axes axes);
  absl::Status Split(const World& world, std::string_view name, int group,
                     sharding::StreamId stream, Axes axes);

  const EngineInputs& inputs_;
  std::optional<Communicator> control_;
  DeviceMirror mirror_;  // for data from host memory
  std::optional<Communicator> async_reads_;
  DeviceMirror async_reads_mirror_;
  std::deque<OfSteps> of_steps_;
};

}  // namespace ebb
