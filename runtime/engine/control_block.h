// What the host and the device tell each other in a step, in memory that both reach: norms, losses
// and the ranks' records come from the device, the scale and the constants of updates go to it. On
// the CPU it is memory like any other.
//
// Two steps may be under way, so what a step's updates and its loss need is there by parity. Who
// writes is ordered with who reads by events of the streams.
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
  ExchangeRecord& own_record() const { return records_.back(); }
  std::span<ExchangeRecord> records() const { return records_.first(records_.size() - 1); }
  std::span<optim::UpdateConstants> constants(int parity) const {
    return constants_.subspan(static_cast<size_t>(parity) * constants_.size() / 2,
                              constants_.size() / 2);
  }

 private:
  Buffer memory_;
  std::span<double> squares_, losses_;
  std::span<ExchangeRecord> records_;  // by rank, then this rank's own
  std::span<optim::UpdateConstants> constants_;
  float* loss_scale_ = nullptr;
};

}  // namespace ebb
