// Values that the host and the device exchange in a step, in memory that both reach: the memory of
// the plan's cells (sharding::ControlCells). Norms, losses and the ranks' records come from the
// device; the scale and the constants of updates go to it. A device with memory of its own has a
// copy of the values that every thread of an update reads. On the CPU all of this is plain memory.
//
// Two steps may be under way, so the values of a step's updates, loss and exchange exist by parity.
// An evaluation may run within a step, so it has sums and records of its own, under the parity
// kEvaluation. All steps share one scale: a step's exchange comes behind all readers of the scale
// and writes the next step's. Events of the streams order writes with reads.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "ebb/optim/kernels.h"
#include "ebb/optim/parameter_norms.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/outcome/exchange.h"
#include "ebb/runtime/engine/step.h"

namespace ebb {

class ControlBlock {
 public:
  static constexpr int kEvaluation = 2, kSlots = 3;  // of sums and records

  struct Sizes {
    size_t units = 0;
    size_t ranks = 0;     // that exchange records
    size_t compared = 0;  // squares in each record
    size_t sets = 0;      // of constants that a step's updates need
    // Where an optimizer takes norms: sums of this rank, bytes of a rank's record of them, and how
    // many ranks there are.
    size_t norm_sums = 0, norm_record = 0, norm_records = 0;
  };
  // `runs`: of all updates. On an error `into` holds what could be taken, as with Storage.
  static absl::Status Create(const Device& device, const Sizes& sizes,
                             std::span<const optim::UpdateRun> runs,
                             std::optional<ControlBlock>& into);

  // The memory of a cell in a step of that parity, or in an evaluation; empty: it has none.
  std::span<std::byte> At(int64_t cell, int parity) const;

  double& square(int unit) const { return squares_[static_cast<size_t>(unit)]; }  // of its shard
  std::span<const double> squares() const { return squares_; }                    // by unit
  // A step's first sum is its loss; it has no others. An evaluation uses all.
  std::span<double> sums(int parity) const {
    return sums_.subspan(static_cast<size_t>(parity) * Evaluation::kSums, Evaluation::kSums);
  }
  float& loss_scale() const { return *loss_scale_; }
  ExchangeRecord& own_record(int parity) const {
    return *reinterpret_cast<ExchangeRecord*>(OwnRecord(parity).data());
  }
  std::span<ExchangeRecord> records(int parity) const {
    return {reinterpret_cast<ExchangeRecord*>(Records(parity).data()), ranks_};
  }
  // The squares of VerdictRanks::compared: this rank's; all ranks', by rank.
  std::span<double> own_compared(int parity) const {
    return {reinterpret_cast<double*>(&own_record(parity) + 1), compared_};
  }
  std::span<double> compared(int parity) const {
    return {reinterpret_cast<double*>(records(parity).data() + ranks_), ranks_ * compared_};
  }
  // `early`: the constants of updates that come before their step's verdict.
  std::span<optim::UpdateConstants> constants(int parity, bool early) const {
    return Of(parity, early, constants_);
  }

  // For optimizers that take norms: a copy of the sums on the device; this rank's record, and the
  // records of all ranks.
  std::span<optim::NormSums> norm_sums() const { return norm_sums_; }
  std::span<std::byte> norm_record() const { return norm_record_; }
  std::span<std::byte> norm_records() const { return norm_records_; }

  // Enqueued on `stream`, for updates behind it. Does nothing if the device has no memory of its
  // own.
  void CopyRuns(Stream& stream) const;
  // Where an update reads constants, on the device or on the host.
  std::span<const optim::UpdateConstants> constants_for(bool on_device, int parity,
                                                        bool early) const {
    return Of(parity, early, on_device ? device_constants_ : constants_);
  }
  std::span<const optim::UpdateRun> runs_for(bool on_device) const {
    return on_device ? device_runs_ : runs_;
  }

 private:
  template <class T>
  static std::span<T> Of(int parity, bool early, std::span<T> constants) {
    const size_t count = constants.size() / 4;
    return constants.subspan((2 * static_cast<size_t>(parity) + (early ? 1 : 0)) * count, count);
  }
  // One exchange: all ranks' records, then all their squares; this rank's behind both.
  size_t RecordBytes() const { return sizeof(ExchangeRecord) + compared_ * sizeof(double); }
  std::span<std::byte> Records(int parity) const {
    const size_t bytes = ranks_ * RecordBytes();
    return records_.subspan(static_cast<size_t>(parity) * (bytes + RecordBytes()), bytes);
  }
  std::span<std::byte> OwnRecord(int parity) const {
    return {Records(parity).data() + ranks_ * RecordBytes(), RecordBytes()};
  }

  Buffer memory_, device_memory_;
  std::span<double> squares_, sums_;  // sums: by parity
  std::span<std::byte> records_;      // by parity: Records
  size_t ranks_ = 0, compared_ = 0;
  std::span<optim::UpdateConstants> constants_, device_constants_;
  std::span<optim::UpdateRun> runs_, device_runs_;
  std::span<optim::NormSums> norm_sums_;
  std::span<std::byte> norm_record_, norm_records_;
  float* loss_scale_ = nullptr;
};

}  // namespace ebb
