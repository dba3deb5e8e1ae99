// Where ranks exchange data of host memory, outside of steps: agreements, and values to look at.
// Communicators of a GPU reach its own memory only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/trace/ledger.h"

namespace ebb {

// The host lane: device memory for collectives of data in host memory, because a device's
// collectives reach only its own memory, and locked host memory for the copies to and from it. The
// CPU has none, as its collectives use host memory. A copy of other memory of the host waits for
// the stream inside the driver. The driver may then hold what another rank's thread needs for the
// collective of that stream.
//
//   host --Upload--> [ locked | device ] --collective--> [ device | locked ] --Take--> host
//
// Kept for as long as there are collectives: giving memory of a device back waits for its kernels.
// One of them may be another rank's collective, and that waits for this rank.
class DeviceMirror {
 public:
  DeviceMirror() = default;
  // Predicted and counted in the ledger, as staging; nothing on the CPU. The memory is not freed
  // after a failure, until the other ranks know of the failure.
  absl::Status Allocate(const Device& device, int64_t bytes, MemoryLedger& ledger);

  bool made() const { return locked_.data() != nullptr; }
  // How many of `bytes` fit beside `others` of the same size in the mirror: all on the CPU.
  int64_t Fitting(int64_t bytes, int64_t others) const;
  // `host` itself, or on a device its place in the mirror.
  std::byte* Of(std::byte* host, int64_t offset) const {
    return made() ? copy_.data() + offset : host;
  }
  const std::byte* Of(const std::byte* host, int64_t offset) const {
    return made() ? copy_.data() + offset : host;
  }
  // No-ops on the CPU. `host` is read at once, so the last copies of these bytes have to be over.
  // The device gets them in the order of `stream`.
  void Upload(Stream& stream, const std::byte* host, int64_t offset, int64_t bytes) const;
  // In the order of `stream`. Take gives them to the host once the stream is idle.
  void Download(Stream& stream, int64_t offset, int64_t bytes) const;
  void Take(std::byte* host, int64_t offset, int64_t bytes) const;

 private:
  Buffer copy_, locked_;
  MemoryLedger::Charge charge_, locked_charge_;
};

struct HostLane {
  Communicator& communicator;
  Stream& stream;
  const DeviceMirror& mirror;
  const World& world;  // of the communicator's ranks; names them
};

}  // namespace ebb
