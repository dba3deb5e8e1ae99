// Memory that NCCL has registered for one communicator. Its operations read and write that memory
// in place, without copies through NCCL's own buffers, and may use algorithms that reach all ranks'
// memory. It is registered as a symmetric window (from NCCL 2.27 on), otherwise as a buffer.
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

  // Collective. kUnimplemented: NCCL does not take the memory, and the communicator works on
  // without it. Other errors are the channel's: kDeadlineExceeded without a message, or NCCL's
  // message.
  absl::Status Add(std::span<std::byte> memory, WaitPoint::Deadline deadline);
  // Call it when no operation uses the memory.
  void RemoveAll();

 private:
  struct Entry {
    void* window = nullptr;
    void* handle = nullptr;
  };

  const NcclLibrary& nccl_;
  const std::shared_ptr<NcclChannel> channel_;
  std::list<Entry> entries_;  // NCCL writes to an entry while it registers it
};

}  // namespace ebb
