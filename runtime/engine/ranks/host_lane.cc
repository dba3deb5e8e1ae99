#include "ebb/runtime/engine/ranks/host_lane.h"

#include <algorithm>
#include <cstring>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"

namespace ebb {
namespace {

constexpr int64_t kAlignment = 16;  // of what shares the mirror

}  // namespace

absl::Status DeviceMirror::Allocate(const Device& device, int64_t bytes, MemoryLedger& ledger) {
  if (made() || HostReaches(device)) return absl::OkStatus();
  constexpr char kWhat[] = "what ranks tell each other";
  if (copy_.data() == nullptr) {
    EBB_ASSIGN_OR_RETURN(copy_, device.Allocate(bytes, kWhat));
  }
  EBB_ASSIGN_OR_RETURN(locked_, device.AllocateShared(bytes, kWhat));
  ledger.Predict(StateClass::kStaging, Tier::kDevice, bytes);
  ledger.Predict(StateClass::kStaging, Tier::kCpu, bytes);
  charge_ = MemoryLedger::Charge(ledger, StateClass::kStaging, Tier::kDevice, bytes);
  locked_charge_ = MemoryLedger::Charge(ledger, StateClass::kStaging, Tier::kCpu, bytes);
  return absl::OkStatus();
}

int64_t DeviceMirror::Fitting(int64_t bytes, int64_t others) const {
  if (!made()) return bytes;
  return std::min(bytes, copy_.bytes() / (1 + others) / kAlignment * kAlignment);
}

void DeviceMirror::Upload(Stream& stream, const std::byte* host, int64_t offset,
                          int64_t bytes) const {
  if (!made() || bytes == 0) return;
  std::memcpy(locked_.data() + offset, host, static_cast<size_t>(bytes));
  stream.Copy(copy_.data() + offset, locked_.data() + offset, bytes);
}

void DeviceMirror::Download(Stream& stream, int64_t offset, int64_t bytes) const {
  if (made()) stream.Copy(locked_.data() + offset, copy_.data() + offset, bytes);
}

void DeviceMirror::Take(std::byte* host, int64_t offset, int64_t bytes) const {
  if (made() && bytes > 0) std::memcpy(host, locked_.data() + offset, static_cast<size_t>(bytes));
}

}  // namespace ebb
