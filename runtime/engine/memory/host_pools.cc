#include "ebb/runtime/engine/memory/host_pools.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb {

absl::Status HostPools::Take(StateClass state, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  const bool pins_parameters = config_->zero.offload_param.pin_memory,
             pins_states = config_->zero.offload_optimizer.pin_memory;
  const bool pins = state == StateClass::kStaging     ? pins_parameters || pins_states
                    : state == StateClass::kParameter ? pins_parameters
                                                      : pins_states;
  // A device with memory of its own locks the pools itself, whatever `pin_memory` is.
  return Allocate(state, state, bytes, pins && HostReaches(*device_),
                  absl::StrCat("the ", std::string(Name(state)), " pool in host memory"));
}

absl::Status HostPools::TakeStateStaging() {
  constexpr int64_t kBytes = 2 * sharding::kStateStagingBytes;
  EBB_RETURN_IF_ERROR(Allocate(kStateStaging.pool, StateClass::kStaging, kBytes, /*pin=*/false,
                               "the pool in host memory that state passes through"));
  ledger_->Predict(StateClass::kStaging, Tier::kCpu, kBytes);
  return absl::OkStatus();
}

absl::Status HostPools::TakeSaveStaging(int64_t bytes) {
  if (!Of(kSaveStaging.pool).empty()) return absl::OkStatus();
  EBB_RETURN_IF_ERROR(Allocate(kSaveStaging.pool, StateClass::kStaging, bytes, /*pin=*/false,
                               "the memory that state passes through beside steps"));
  ledger_->Predict(StateClass::kStaging, Tier::kCpu, bytes);
  return absl::OkStatus();
}

// Memory that cannot be locked is used as it is.
absl::Status HostPools::Allocate(StateClass state, StateClass counted_as, int64_t bytes, bool pin,
                                 std::string_view what) {
  Pool& pool = pools_[static_cast<size_t>(state)];
  EBB_ASSIGN_OR_RETURN(pool.memory, AllocatePinned(bytes, pin, what));
  if (!HostReaches(*device_)) {
    absl::StatusOr<LockedRange> locked = device_->LockHostMemory(pool.memory.buffer.span(), what);
    EBB_RETURN_IF_ERROR(device_->status());
    if (locked.ok()) {
      pool.locked = *std::move(locked);
    } else if (!std::exchange(warned_of_unlocked_, true)) {
      LogWarning(absl::StrCat(locked.status().message(),
                              ". Training goes on without the lock: copies from and to this memory "
                              "are slower and block the host, and the system may swap it out"));
    }
  }
  pool.charge = MemoryLedger::Charge(*ledger_, counted_as, Tier::kCpu, bytes);
  return absl::OkStatus();
}

void HostPools::GiveBack(StateClass state) {
  Pool& pool = pools_[static_cast<size_t>(state)];
  pool.charge = {};
  pool.locked = {};
  pool.memory = {};
}

bool HostPools::CopiesHoldUpHost(StateClass state) const {
  return !HostReaches(*device_) && At(state).locked.span().empty();
}

}  // namespace ebb
