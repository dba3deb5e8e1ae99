// What the host and the device tell each other in a step, in memory that both reach: norms, losses
// and the ranks' records come from the device, the scale and the constants of updates go to it. On
// the CPU it is memory like any other.
//
// Two steps may be under way, so what a step's updates, its loss and its exchange need is there by
// parity. The scale is one for all steps: each one's exchange, behind all that reads it, writes the
// next one's. Who writes is ordered with who reads by events of the streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "ebb/optim/kernels.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/exchange.h"

namespace ebb {

class ControlBlock {
 public:
  // `updates`: different sets of constants that one step's updates need.
  static absl::StatusOr<ControlBlock> Create(const Device& device, size_t units, size_t ranks,
                                             size_t updates);

  double& square(int unit) const { return squares_[static_cast<size_t>(unit)]; }  // of its shard
  double& loss(int parity) const { return losses_[static_cast<size_t>(parity)]; }
  float& loss_scale() const { return *loss_scale_; }
  ExchangeRecord& own_record(int parity) const { return RecordsOf(parity).back(); }
  std::span<ExchangeRecord> records(int parity) const {
    return RecordsOf(parity).first(records_.size() / 2 - 1);
  }
  // `early`: of updates that come before their step's verdict.
  std::span<optim::UpdateConstants> constants(int parity, bool early) const {
    const size_t count = constants_.size() / 4;
    return constants_.subspan((2 * static_cast<size_t>(parity) + (early ? 1 : 0)) * count, count);
  }

 private:
  std::span<ExchangeRecord> RecordsOf(int parity) const {
    return records_.subspan(static_cast<size_t>(parity) * records_.size() / 2, records_.size() / 2);
  }

  Buffer memory_;
  std::span<double> squares_, losses_;
  std::span<ExchangeRecord> records_;  // by parity: by rank, then this rank's own
  std::span<optim::UpdateConstants> constants_;
  float* loss_scale_ = nullptr;
};

}  // namespace ebb
