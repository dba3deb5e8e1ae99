// Reads ranges of files ahead, in a known order, and bypasses the page cache if the file system
// allows that:
//
//   | range | range | range | range |
//     shown   on their way from the disk
//
// For one thread at a time. This thread drives the ring while it waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/io_backend.h"

namespace ebb {

class ReadAhead {
 public:
  struct Range {
    int file = 0;  // of the paths
    int64_t at = 0, bytes = 0;
  };
  static constexpr int64_t kRangeMax = int64_t{4} << 20;
  // Host memory: twice the bytes in flight. If a disk completes all requests at once, it gets as
  // many again while the completed ranges are checked.
  static constexpr int64_t kMemoryBytes = int64_t{64} << 20;

  // Opens all files; each of them has a range. `memory`: pages of kMemoryBytes, borrowed; empty:
  // its own.
  static absl::StatusOr<std::unique_ptr<ReadAhead>> Open(const std::vector<std::string>& paths,
                                                         std::vector<Range> ranges,
                                                         IoBackend backend,
                                                         std::span<std::byte> memory = {});
  ~ReadAhead();

  // The next range, valid until the next call.
  absl::StatusOr<std::span<const std::byte>> Next();

 private:
  struct State;
  explicit ReadAhead(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace ebb
