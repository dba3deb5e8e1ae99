// Where ranks exchange what lies in host memory, outside of steps: agreements, values that are
// looked at. Communicators of a GPU reach its own memory only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/trace/ledger.h"

namespace ebb {

// Memory of the device for what lies in host memory, as collectives of a device reach its own only;
// none on the CPU, whose collectives use the host's. Kept for as long as there are collectives:
// to give memory of a device back waits for its kernels, among them perhaps another rank's collective,
// which waits for this rank.
class DeviceMirror {
 public:
  DeviceMirror() = default;
  // Predicted and counted in the ledger, as staging.
  static absl::StatusOr<DeviceMirror> Create(const Device& device, int64_t bytes,
                                             MemoryLedger& ledger);

  bool made() const { return copy_.data() != nullptr; }
  // How many of `bytes` fit where they share the mirror with `others` as large: all on the CPU.
  int64_t Fitting(int64_t bytes, int64_t others) const;
  // `host`, or on a device its place in the mirror.
  std::byte* Of(std::byte* host, int64_t offset) const {
    return copy_.data() != nullptr ? copy_.data() + offset : host;
  }
  const std::byte* Of(const std::byte* host, int64_t offset) const {
    return copy_.data() != nullptr ? copy_.data() + offset : host;
  }
  // In the order of `stream`; nothing on the CPU.
  void Upload(Stream& stream, const std::byte* host, int64_t offset, int64_t bytes) const;
  void Download(Stream& stream, std::byte* host, int64_t offset, int64_t bytes) const;

 private:
  Buffer copy_;
  MemoryLedger::Charge charge_;
};

struct HostLane {
  Communicator& communicator;
  Stream& stream;
  const DeviceMirror& mirror;
};

}  // namespace ebb
