#include "ebb/runtime/engine/ranks/collective_pools.h"

#include <initializer_list>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {

using sharding::StreamId;

absl::StatusOr<Buffer> AllocatePool(const EngineInputs& inputs, StateClass state, int64_t bytes,
                                    std::string_view what) {
  const bool sent = state == StateClass::kParameter || state == StateClass::kGather ||
                    state == StateClass::kSecondary || state == StateClass::kGradient ||
                    state == StateClass::kStaging;
  if (sent && inputs.config.ebb.register_buffers)
    return inputs.world.Allocate(inputs.device, bytes, what);
  return inputs.device.Allocate(bytes, what);
}

absl::Status CollectivePools::Show(const Storage& storage, const sharding::Table& table) {
  if (inputs_.config.ebb.register_buffers && !HostReaches(inputs_.device))
    EBB_RETURN_IF_ERROR(Register(storage));
  // Those of a stream sum one after the other.
  EBB_RETURN_IF_ERROR(SumInOrder(storage, table, sharding::Purpose::kSumScratch, StreamId::kReduce,
                                 {kShardAxes, Axis::kReplica, Axis::kTensor}));
  return SumInOrder(storage, table, sharding::Purpose::kTensorScratch, StreamId::kCompute,
                    {Axis::kTensor});
}

absl::Status CollectivePools::SumInOrder(const Storage& storage, const sharding::Table& table,
                                         sharding::Purpose scratch, StreamId stream,
                                         std::initializer_list<Axes> all_axes) {
  const int row = table.Find(scratch);
  if (row < 0) return absl::OkStatus();
  const std::span<std::byte> memory(storage.At(table.PlaceOf(row)),
                                    static_cast<size_t>(table[row].bytes()));
  for (const Axes axes : all_axes)
    if (Communicator* const communicator = communicators_.Find(stream, axes))
      EBB_RETURN_IF_ERROR(communicator->SumInOrder(memory));
  return absl::OkStatus();
}

// Registers pools that steps send from and receive into, with the communicators that do: all pools
// on all ranks, or none.
absl::Status CollectivePools::Register(const Storage& storage) {
  absl::Status first;
  const auto show = [&](StreamId stream, Axes axes, std::initializer_list<StateClass> pools) {
    Communicator* const communicator = communicators_.Find(stream, axes);
    for (const StateClass state : pools) {
      // After an error a next one would meet another of the other ranks'.
      if (communicator != nullptr && first.ok())
        first = communicator->Register(storage.Pool(state));
    }
  };
  show(StreamId::kGather, kShardAxes, {StateClass::kGather, StateClass::kParameter});
  show(StreamId::kGather, Axis::kInner, {StateClass::kGather, StateClass::kSecondary});
  show(StreamId::kReduce, kShardAxes, {StateClass::kGradient, StateClass::kStaging});
  show(StreamId::kReduce, Axis::kReplica, {StateClass::kGradient, StateClass::kStaging});
  // Not the verdict's, because all of its ranks would have to come here, and records are small.
  if (!inputs_.verdict.has_value()) show(StreamId::kReduce, kWorldAxes, {StateClass::kStaging});
  const absl::Status any = AgreeOnStatus(communicators_.Control(streams_.reduce()), first);
  if (any.ok()) return absl::OkStatus();
  EBB_RETURN_IF_ERROR(communicators_.control().status());
  Deregister();
  if (inputs_.rank() == 0 && !std::exchange(logged_copies_, true)) {
    LogInfo(absl::StrCat(inputs_.options.name,
                         ": collectives copy through NCCL's own buffers: ", any.message()));
  }
  return absl::OkStatus();
}

void CollectivePools::Deregister() {
  for (EngineCommunicators::OfSteps& of : communicators_.of_steps()) of.communicator.Deregister();
}

}  // namespace ebb
