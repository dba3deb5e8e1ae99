// An engine's pools in host memory, by class of state. For a device with memory of its own they are
// locked, so that copies between the two do not block the host.
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
  // All arguments outlive this.
  HostPools(const Device& device, const Config& config, MemoryLedger& ledger)
      : device_(&device), config_(&config), ledger_(&ledger) {}

  // Host memory for two runs of state that a call asks for (sharding/state_pieces.h), if the host
  // does not reach all state.
  static constexpr sharding::Place kStateStaging = {.tier = Tier::kCpu,
                                                    .pool = StateClass::kWorkspace};
  absl::Status TakeStateStaging();
  // Likewise for runs of a save. The memory is taken once, and kept.
  static constexpr sharding::Place kSaveStaging = {.tier = Tier::kCpu,
                                                   .pool = StateClass::kSecondary};
  absl::Status TakeSaveStaging(int64_t bytes);

  // With 0 bytes there is no such pool.
  absl::Status Take(StateClass state, int64_t bytes);
  void GiveBack(StateClass state);

  std::span<std::byte> Of(StateClass state) const { return At(state).memory.buffer.span(); }
  // The device could not lock the pool. So a copy may read it when it is enqueued, or hold the
  // calling thread up until the stream comes to the copy.
  bool CopiesHoldUpHost(StateClass state) const;

 private:
  struct Pool {
    PinnedMemory memory;
    LockedRange locked;  // for copies of a GPU; empty if it could not be locked
    MemoryLedger::Charge charge;
  };
  const Pool& At(StateClass state) const { return pools_[static_cast<size_t>(state)]; }
  // `counted_as`: the class in the ledger.
  absl::Status Allocate(StateClass state, StateClass counted_as, int64_t bytes, bool pin,
                        std::string_view what);

  const Device* device_ = nullptr;
  const Config* config_ = nullptr;
  MemoryLedger* ledger_ = nullptr;
  Pool pools_[kStateClasses];
  bool warned_of_unlocked_ = false;
};

}  // namespace ebb
