#include "ebb/runtime/engine/host_lane.h"

#include <algorithm>

#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

constexpr int64_t kAlignment = 16;  // of what shares the mirror

}  // namespace

absl::StatusOr<DeviceMirror> DeviceMirror::Create(const Device& device, int64_t bytes,
                                                  MemoryLedger& ledger) {
  DeviceMirror mirror;
  if (device.kind() == DeviceKind::kCpu) return mirror;
  EBB_ASSIGN_OR_RETURN(mirror.copy_, device.Allocate(bytes, "what ranks tell each other"));
  ledger.Predict(StateClass::kStaging, Tier::kDevice, bytes);
  mirror.charge_ = MemoryLedger::Charge(ledger, StateClass::kStaging, Tier::kDevice, bytes);
  return mirror;
}

int64_t DeviceMirror::Fitting(int64_t bytes, int64_t others) const {
  if (copy_.data() == nullptr) return bytes;
  return std::min(bytes, copy_.bytes() / (1 + others) / kAlignment * kAlignment);
}

void DeviceMirror::Upload(Stream& stream, const std::byte* host, int64_t offset,
                          int64_t bytes) const {
  if (copy_.data() != nullptr) stream.Copy(copy_.data() + offset, host, bytes);
}

void DeviceMirror::Download(Stream& stream, std::byte* host, int64_t offset, int64_t bytes) const {
  if (copy_.data() != nullptr) stream.Copy(host, copy_.data() + offset, bytes);
}

}  // namespace ebb
