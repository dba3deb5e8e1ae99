// Where ranks exchange what lies in host memory, outside of steps: agreements, values that are
// looked at. Communicators of a GPU reach its own memory only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

struct HostLane {
  Communicator& communicator;
  Stream& stream;
  const Device& device;
};

// Host memory as collectives of a device can use it: itself on the CPU, else a copy in memory of
// the device.
class DeviceMirror {
 public:
  static absl::StatusOr<DeviceMirror> Of(const Device& device, void* host, int64_t bytes);

  std::byte* data() const { return copy_.data() != nullptr ? copy_.data() : host_; }
  // In the order of `stream`; nothing on the CPU.
  void Upload(Stream& stream) const;    // from the host
  void Download(Stream& stream) const;  // to it

 private:
  std::byte* host_ = nullptr;
  Buffer copy_;
};

}  // namespace ebb
