// What a file system gives without Ebb: large sequential transfers past the page cache, from huge
// pages, through threads and through io_uring, with nothing around them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"

namespace ebb::bench {

class RawDisk {
 public:
  virtual ~RawDisk() = default;
  // Moves bytes [0, bytes) of the file once.
  virtual absl::Status Pass(bool write) = 0;
};

struct RawDiskOptions {
  int file = -1;  // opened for O_DIRECT
  int64_t bytes = 0;
  int64_t block_bytes = int64_t{1} << 20;
  int depth = 32;
  std::span<std::byte> memory;  // depth blocks
};

// `depth` requests are in flight. Null: this machine or this build has no io_uring.
std::unique_ptr<RawDisk> RawUring(const RawDiskOptions& options);
// A request in flight for each of a few threads.
std::unique_ptr<RawDisk> RawThreads(const RawDiskOptions& options);

}  // namespace ebb::bench
