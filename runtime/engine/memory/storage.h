// The engine's memory: one buffer for each class of state on the device, pools in host memory, and
// swap files. The plan's pools lay it out, the ledger counts it, and only this file turns it into
// pointers.
//
// The pools of the device are on the device. A suspended engine has parameters, masters and
// optimizer states on the host instead, and no other pools, because no step leaves their contents
// to the next. If the device's memory is the host's, these stay at their address and only the row
// in the ledger changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/swap_storage.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/memory/host_pools.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class Storage {
 public:
  // From the device's memory, for a class's pool.
  using Allocate =
      std::function<absl::StatusOr<Buffer>(StateClass state, int64_t bytes, std::string_view what)>;

  // `shard`: which slice of every unit is this rank's. `ranks_on_host`, `name`: as
  // SwapStorage::Create. An error: `into` holds what could be taken. To give memory back may wait
  // for the device, so that ranks which share one agree on the error first.
  static absl::Status Create(const Device& device, const sharding::Plan& plan, const Config& config,
                             int shard, int ranks_on_host, std::string_view name,
                             MemoryLedger& ledger, Allocate allocate, std::optional<Storage>& into);

  // Call it after the plan was replaced, between steps. Lays out every pool again except
  // parameters, masters and states. Pools that change are given back before others are taken. An
  // error: what could not be taken is missing, until a call succeeds.
  absl::Status FollowPlan();

  // The number of this rank's slice of every unit.
  int shard() const { return shard_; }

  // Memory for a move to the other place, taken before anything moves, as it may not be there.
  class Room {
    friend class Storage;
    Tier tier_{};
    Buffer buffers_[kStateClasses];
    MemoryLedger::Charge charges_[kStateClasses];
  };
  // kDevice, or kCpu: suspended. An error: `room` holds what could be taken.
  absl::Status MakeRoom(Tier tier, Room& room) const;
  // Waits for the copies, which go over `stream`, and gives the memory of the old place back.
  // Pointers from before are not valid any more. An error: nothing has moved.
  absl::Status MoveInto(Room room, Stream& stream);

  Storage(Storage&&) = default;
  ~Storage();

  // Keeps memory of the device, like Engine::HoldMemory.
  std::shared_ptr<void> Hold();

  // HostPools::kStateStaging, where there is need of it.
  absl::Status TakeStateStaging();
  absl::Status TakeSaveStaging(int64_t bytes);  // HostPools::kSaveStaging, likewise

  // On the device; empty if the plan has none.
  std::span<std::byte> Pool(StateClass state) const {
    return buffers_[static_cast<int>(state)].span();
  }
  // Not of kNvme.
  std::byte* At(const sharding::Place& place) const;
  const HostPools& host() const { return host_; }
  SwapStorage& files() const { return *files_; }

 private:
  // Pools that the engine has no use for any more.
  struct Held {
    std::vector<Buffer> buffers;
  };

  Storage() = default;
  void GiveBack(Buffer buffer);
  // Updates the ledger: bytes of each class on a tier, in the present plan.
  void TakeBytes();
  int64_t BytesOf(int state, Tier tier) const { return bytes_[state][static_cast<int>(tier)]; }

  const Device* device_ = nullptr;
  const sharding::Plan* plan_ = nullptr;
  MemoryLedger* ledger_ = nullptr;
  Allocate allocate_;
  int shard_ = 0;
  bool host_predicted_ = false;
  int64_t bytes_[kStateClasses][kTiers] = {};
  Buffer buffers_[kStateClasses];
  MemoryLedger::Charge charges_[kStateClasses];
  std::weak_ptr<Held> held_;
  // Files after the pools that are registered with them.
  HostPools host_;
  std::unique_ptr<SwapStorage> files_;
};

}  // namespace ebb
