// Memory that NCCL knows for one communicator, so that its operations read and write it where it
// is, without copies through NCCL's own buffers, and may use algorithms that need to reach all
// ranks' memory: as a symmetric window (from NCCL 2.27 on), else as a buffer.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/nccl/channel.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class NcclRegistrations {
 public:
  NcclRegistrations(const NcclLibrary& nccl, std::shared_ptr<NcclChannel> channel)
      : nccl_(nccl), channel_(std::move(channel)) {}

  // Zero-filled memory that can be registered.
  static absl::StatusOr<Buffer> Allocate(const NcclLibrary& nccl, const Device& device,
                                         int64_t bytes, std::string_view what);

  // Collective. kUnimplemented: NCCL does not take it here, and the communicator works on without.
  // Other errors are those of the channel: kDeadlineExceeded without words, or what NCCL says.
  absl::Status Add(std::span<std::byte> memory, WaitPoint::Deadline deadline);
  // Nothing that uses the memory is under way.
  void RemoveAll();

 private:
  struct Entry {
    void* window = nullptr;
    void* handle = nullptr;
  };

  const NcclLibrary& nccl_;
  const std::shared_ptr<NcclChannel> channel_;
  std::list<Entry> entries_;  // which NCCL writes to while it registers
};

}  // namespace ebb
