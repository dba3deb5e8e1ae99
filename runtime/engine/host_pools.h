// An engine's pools in host memory, by class of state. A device that has memory of its own locks them, so that copies
// between the two need not hold the host up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/place.h"

namespace ebb {

class HostPools {
 public:
  HostPools() = default;
  // All outlive this.
  HostPools(const Device& device, const Config& config, MemoryLedger& ledger)
      : device_(&device), config_(&config), ledger_(&ledger) {}

  // Host memory for two runs of state that is asked for (sharding/state_pieces.h), where the host does not reach all
  // state.
  static constexpr sharding::Place kStateStaging = {.tier = Tier::kCpu,
                                                    .pool = StateClass::kWorkspace};
  absl::Status TakeStateStaging();

  // 0 bytes: there is no such pool.
  absl::Status Take(StateClass state, int64_t bytes);
  void GiveBack(StateClass state);

  std::span<std::byte> Of(StateClass state) const { return At(state).memory.buffer.span(); }
  // The device could not lock it, so that a copy between the two may read it when it is enqueued, or hold the calling
  // thread up until the stream comes to it.
  bool CopiesHoldUpHost(StateClass state) const;

 private:
  struct Pool {
    PinnedMemory memory;
    LockedRange locked;  // of it, for copies of a GPU; empty where it could not
    MemoryLedger::Charge charge;
  };
  const Pool& At(StateClass state) const { return pools_[static_cast<size_t>(state)]; }
  // `counted_as`: in the ledger.
  absl::Status Allocate(StateClass state, StateClass counted_as, int64_t bytes, bool pin,
                        std::string_view what);

  const Device* device_ = nullptr;
  const Config* config_ = nullptr;
  MemoryLedger* ledger_ = nullptr;
  Pool pools_[kStateClasses];
  bool told_of_unlocked_ = false;
};

}  // namespace ebb
