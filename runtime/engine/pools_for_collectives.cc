// What communicators are told of the pools: where sums in order meet, and which memory NCCL may move
// without copies of its own. Once the pools are there and again once they have moved, on all ranks.
#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {

// Others hold what no step sends.
absl::StatusOr<Buffer> Executor::AllocatePool(StateClass state, int64_t bytes,
                                              std::string_view what) {
  const bool sent = state == StateClass::kParameter || state == StateClass::kGather ||
                    state == StateClass::kSecondary || state == StateClass::kGradient ||
                    state == StateClass::kStaging;
  if (sent && config_.ebb.register_buffers) return world_.Allocate(device_, bytes, what);
  return device_.Allocate(bytes, what);
}

absl::Status Executor::ShowPools() {
  if (config_.ebb.register_buffers && device_.kind() == DeviceKind::kCuda)
    EBB_RETURN_IF_ERROR(RegisterPools());
  const sharding::Pools& pools = plan().pools;
  if (pools.staging_sums_bytes == 0) return absl::OkStatus();
  const std::span<std::byte> scratch(storage_->Staging(pools.staging_sums),
                                     static_cast<size_t>(pools.staging_sums_bytes));
  // Both sum on the reduce stream, one after the other.
  for (std::optional<Communicator>* communicator : {&reduce_communicator_, &replicas_communicator_})
    if (communicator->has_value()) EBB_RETURN_IF_ERROR((*communicator)->SumInOrder(scratch));
  return absl::OkStatus();
}

// Those that steps send from and receive into, with the communicators that do: all of them on all
// ranks, or none.
absl::Status Executor::RegisterPools() {
  absl::Status first;
  const auto show = [&](std::optional<Communicator>& communicator,
                        std::initializer_list<StateClass> pools) {
    for (const StateClass state : pools) {
      // After an error a next one would meet another of the other ranks'.
      if (communicator.has_value() && first.ok())
        first = communicator->Register(storage_->Pool(state));
    }
  };
  show(gather_communicator_, {StateClass::kGather, StateClass::kParameter});
  show(secondary_communicator_, {StateClass::kGather, StateClass::kSecondary});
  show(reduce_communicator_, {StateClass::kGradient, StateClass::kStaging});
  show(replicas_communicator_, {StateClass::kGradient, StateClass::kStaging});
  show(exchange_communicator_, {StateClass::kStaging});
  const absl::Status any = AgreeOnStatus(Control(), first);
  if (any.ok()) return absl::OkStatus();
  EBB_RETURN_IF_ERROR(control_->status());
  DeregisterPools();
  if (rank_ == 0 && !std::exchange(told_of_copies_, true)) {
    LogInfo(absl::StrCat(options_.name,
                         ": collectives copy through buffers of NCCL's: ", any.message()));
  }
  return absl::OkStatus();
}

void Executor::DeregisterPools() {
  for (std::optional<Communicator>* communicator : peers_.of_steps())
    if (communicator->has_value()) (*communicator)->Deregister();
}

}  // namespace ebb
