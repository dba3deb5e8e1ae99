// The engine's memory: one buffer per class of state, laid out by the plan's pools, counted in the
// ledger, and turned into pointers here and nowhere else.
//
// The pools are on the device, or, of a suspended engine, on the host: parameters, masters and
// optimizer states as they are, the others, whose contents no step leaves to the next, not at all.
// Where the device's memory is the host's, what is kept stays at its address and only its row in
// the ledger changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class Storage {
 public:
  // `shard`: which slice of every unit is this rank's.
  static absl::StatusOr<Storage> Create(const Device& device, const sharding::Plan& plan, int shard,
                                        MemoryLedger& ledger);

  // Memory for a move to the other place, taken before anything moves, as it may not be there.
  class Room {
    friend class Storage;
    Tier tier_{};
    Buffer buffers_[kStateClasses];
    MemoryLedger::Charge charges_[kStateClasses];
  };
  absl::StatusOr<Room> MakeRoom(Tier tier) const;  // kDevice, or kCpu: suspended
  // Waits for the copies, which go over `stream`, and gives the memory of the old place back.
  // Pointers from before are not valid any more.
  void MoveInto(Room room, Stream& stream);

  // A unit's section: whole in its slot, or whole where the unit is kept whole.
  std::byte* Whole(int unit, bool trainable) const;
  // This rank's slice of it, in the compute dtype. Within Whole for units that are kept whole.
  std::byte* Slice(int unit, bool trainable) const;
  // fp32 masters: of this rank's slice, and all that this rank updates (whole at stage 0).
  float* MasterSlice(int unit) const;
  float* Master(int unit) const;
  float* State(int unit, int state) const;       // all that this rank updates
  float* StateSlice(int unit, int state) const;  // this rank's slice
  // The parameters beside Master, to be written by an update; null where the master is the
  // parameter.
  std::byte* UpdatedParameter(int unit) const;

  std::byte* Gradient(int visit) const;        // whole, of Decisions::gradient
  std::byte* GradientSlice(int unit) const;    // the reduced shard
  std::byte* ReducedGradient(int unit) const;  // all that this rank updates with
  std::byte* Output(int visit, int index_in_round) const;
  std::byte* OutputGradient(int visit, int index_in_round) const;
  std::byte* EvaluationOutput(int visit, int micro_batch) const;
  std::byte* Staging(int64_t address) const;  // of the staging pool, as the plan has it
  double* NormScratch() const;
  std::byte* ExchangeRecords() const;  // world records, then this rank's own
  float* GradientStaging() const;
  std::byte* Workspace() const;

  // Elements that this rank updates: the shard, or the whole section at stage 0.
  int64_t UpdatedElements(int unit) const;

 private:
  std::byte* At(StateClass state, int64_t offset) const {
    return buffers_[static_cast<int>(state)].data() + offset;
  }
  const sharding::UnitAddresses& Unit(int unit) const { return plan_->pools.units[unit]; }

  bool IsKept(int state) const {
    return state == static_cast<int>(StateClass::kParameter) ||
           state == static_cast<int>(StateClass::kMaster) ||
           state == static_cast<int>(StateClass::kOptimizer);
  }
  bool SharesHostMemory() const { return device_->kind() == DeviceKind::kCpu; }

  const Device* device_ = nullptr;
  const sharding::Plan* plan_ = nullptr;
  MemoryLedger* ledger_ = nullptr;
  int shard_ = 0;
  bool host_predicted_ = false;
  int64_t bytes_[kStateClasses] = {};
  Buffer buffers_[kStateClasses];
  MemoryLedger::Charge charges_[kStateClasses];
};

}  // namespace ebb
