#include "ebb/runtime/engine/displaced_gradients.h"

#include <utility>

#include "ebb/runtime/config/status_macros.h"

namespace ebb {

absl::Status DisplacedGradients::Keep(int unit, const void* shard, int64_t bytes, Stream& stream,
                                      const Device& device, MemoryLedger& ledger) {
  Sum& sum = sums_[unit];
  if (sum.buffer.data() == nullptr) {
    EBB_ASSIGN_OR_RETURN(
        sum.buffer, device.Allocate(bytes, "the gradient of a unit whose backward came again"));
    sum.charge = MemoryLedger::Charge(ledger, StateClass::kGradient, Tier::kDevice, bytes);
  }
  stream.Copy(sum.buffer.data(), shard, bytes);
  sum.kept = true;
  return absl::OkStatus();
}

std::byte* DisplacedGradients::Take(int unit) {
  const auto found = sums_.find(unit);
  if (found == sums_.end() || !std::exchange(found->second.kept, false)) return nullptr;
  return found->second.buffer.data();
}

}  // namespace ebb
