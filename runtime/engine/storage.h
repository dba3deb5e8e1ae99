// The engine's memory: one buffer per class of state and tier, and a swap file for each of
// parameters and states that live on NVMe; laid out by the plan's pools, counted in the ledger, and
// turned into pointers here and nowhere else.
//
// The device's pools are on the device, or, of a suspended engine, on the host: parameters, masters and
// optimizer states as they are, the others, whose contents no step leaves to the next, not at all.
// Where the device's memory is the host's, what is kept stays at its address and only its row in
// the ledger changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/offload/shard_file.h"
#include "ebb/offload/swap_directory.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/second_places.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/unit_places.h"

namespace ebb {

class Storage {
 public:
  // Of the device's memory, for a class's pool.
  using Allocate =
      std::function<absl::StatusOr<Buffer>(StateClass state, int64_t bytes, std::string_view what)>;

  // `shard`: which slice of every unit is this rank's.
  // `ranks_on_host`: that put as much on the disk, for the message that it is full.
  // `name`: of the swap directories.
  // An error: `into` holds what could be taken. To give memory back may wait for the device, so that
  // ranks which share one agree on the error first.
  static absl::Status Create(const Device& device, const sharding::Plan& plan, const Config& config,
                             int shard, int ranks_on_host, std::string_view name,
                             MemoryLedger& ledger, Allocate allocate, std::optional<Storage>& into);

  // Once the plan has become another one of the same parameters, masters and states, where no step is alive: all else
  // is as that plan has it. Pools that change go before others are taken. An error: what could not be taken is missing,
  // until a call succeeds.
  absl::Status FollowPlan();

  // Memory for a move to the other place, taken before anything moves, as it may not be there.
  class Room {
    friend class Storage;
    Tier tier_{};
    Buffer buffers_[kStateClasses];
    MemoryLedger::Charge charges_[kStateClasses];
  };
  // kDevice, or kCpu: suspended. As Create if there is an error.
  absl::Status MakeRoom(Tier tier, Room& room) const;
  // Waits for the copies, which go over `stream`, and gives the memory of the old place back.
  // Pointers from before are not valid any more. An error: nothing has moved.
  absl::Status MoveInto(Room room, Stream& stream);

  Storage() = default;
  Storage(Storage&&) = default;
  ~Storage();

  // What keeps memory of the device: as Engine::HoldMemory.
  std::shared_ptr<void> Hold();

  // Host memory for two runs of state that is asked for (sharding/state_pieces.h), where the host does not reach
  // all state.
  static constexpr sharding::Place kStateStaging = {.tier = Tier::kCpu,
                                                    .pool = StateClass::kWorkspace};
  absl::Status TakeStateStaging();

  // Of the device; empty where the plan has none.
  std::span<std::byte> Pool(StateClass state) const {
    return buffers_[static_cast<int>(state)].span();
  }

  // Not of kNvme, which File() holds.
  std::byte* At(const sharding::Place& place) const;
  // Of kCpu: the device could not lock it, so that a copy between the two may read it when it is
  // enqueued, or hold the calling thread up until the stream comes to it.
  bool CopiesHoldUpHost(const sharding::Place& place) const;
  ShardFile& File(const sharding::Place& place) const;  // of kNvme, where it is now
  // For masters and states on NVMe that are saved beside steps; once. kResourceExhausted: the disk has no room for them
  // and for what is saved.
  absl::Status TakeSecondPlaces(const sharding::SwapFiles& files, int ranks_on_host);
  ShardFile& SavedFile(const sharding::Place& place) const;  // where the save under way finds it
  SecondPlaces* second_places() const { return second_places_.get(); }
  bool HasFiles() const { return parameter_file_ != nullptr || state_file_ != nullptr; }
  absl::Status CheckFiles() const;  // ShardFile::CheckUnchanged of each; waits for the disk

  // A unit's section: whole in its slot, or whole where the unit is kept whole.
  std::byte* Whole(int unit, bool trainable) const {
    return At(sharding::WholePlace(*plan_, unit, trainable));
  }

  std::byte* Gradient(int visit) const;  // whole, of Decisions::gradient
  std::byte* Output(int visit, int index_in_round) const;
  std::byte* OutputGradient(int visit, int index_in_round) const;
  std::byte* EvaluationOutput(int visit, int micro_batch) const;
  std::byte* Staging(int64_t address) const;  // of the staging pool, as the plan has it
  std::byte* ExchangeRecords() const;         // world records, then this rank's own
  // For an optimizer of the trainer's, where the update runs.
  float* GradientStaging(Tier tier) const;
  float* MasterStaging(Tier tier) const;
  std::byte* Workspace() const;

 private:
  // Pools that the engine has no use for any more.
  struct Held {
    std::vector<Buffer> buffers;
  };
  void GiveBack(Buffer buffer);

  std::byte* OnDevice(StateClass state, int64_t offset) const {
    return buffers_[static_cast<int>(state)].data() + offset;
  }

  bool IsKept(int state) const {
    return state == static_cast<int>(StateClass::kParameter) ||
           state == static_cast<int>(StateClass::kMaster) ||
           state == static_cast<int>(StateClass::kOptimizer);
  }
  bool SharesHostMemory() const { return device_->kind() == DeviceKind::kCpu; }

  const Device* device_ = nullptr;
  const sharding::Plan* plan_ = nullptr;
  const Config* config_ = nullptr;
  MemoryLedger* ledger_ = nullptr;
  Allocate allocate_;
  int shard_ = 0;
  bool host_predicted_ = false;
  int64_t bytes_[kStateClasses] = {};
  int64_t predicted_[kStateClasses][kTiers] = {};
  Buffer buffers_[kStateClasses];
  MemoryLedger::Charge charges_[kStateClasses];
  std::weak_ptr<Held> held_;

  // Bytes of each class on a tier, as the plan has them now, in the ledger, too.
  void TakeBytes();
  absl::Status CreateHostPools();
  absl::Status CreateHostPool(StateClass state);
  absl::Status LockForDevice(int state, std::string_view what);
  absl::Status CreateFiles(int ranks_on_host, std::string_view name);
  std::vector<std::span<std::byte>> RegisteredWithFiles() const;
  int64_t StateFileBytes() const;
  void ChargeFiles();

  // Below the device. Directories go after the files in them, files after their transfers.
  int64_t host_bytes_[kStateClasses] = {};
  PinnedMemory host_[kStateClasses];
  LockedRange locked_[kStateClasses];  // of those, for copies of a GPU; empty where it could not
  bool told_of_unlocked_ = false;
  MemoryLedger::Charge below_[2 * kStateClasses];
  std::vector<SwapDirectory> directories_;
  std::unique_ptr<ShardFile> parameter_file_, state_file_;
  ShardFile::Options state_options_;
  std::unique_ptr<SecondPlaces> second_places_;
  MemoryLedger::Charge in_second_[2];
};

}  // namespace ebb
