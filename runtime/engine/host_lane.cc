#include "ebb/runtime/engine/host_lane.h"

#include "ebb/runtime/config/status_macros.h"

namespace ebb {

absl::StatusOr<DeviceMirror> DeviceMirror::Of(const Device& device, void* host, int64_t bytes) {
  DeviceMirror mirror;
  mirror.host_ = static_cast<std::byte*>(host);
  if (device.kind() == DeviceKind::kCpu) return mirror;
  EBB_ASSIGN_OR_RETURN(mirror.copy_, device.Allocate(bytes, "what ranks tell each other"));
  return mirror;
}

void DeviceMirror::Upload(Stream& stream) const {
  if (copy_.data() != nullptr) stream.Copy(copy_.data(), host_, copy_.bytes());
}

void DeviceMirror::Download(Stream& stream) const {
  if (copy_.data() != nullptr) stream.Copy(host_, copy_.data(), copy_.bytes());
}

}  // namespace ebb
