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
  // Moves all bytes once.
  virtual absl::Status Pass(bool write) = 0;
};

struct RawDiskOptions {
  std::span<const int> files;  // opened for O_DIRECT; block after block in turns
  int64_t bytes = 0;           // of all
  int64_t block_bytes = int64_t{1} << 20;
  int depth = 32;
  std::span<std::byte> memory;  // depth blocks
};

// Where a byte of all files lies, as stripes of a block have it.
struct RawPlace {
  int file;
  int64_t offset;
};
inline RawPlace PlaceOf(const RawDiskOptions& options, int64_t at) {
  const auto files = static_cast<int64_t>(options.files.size());
  const int64_t block = at / options.block_bytes;
  return {options.files[static_cast<size_t>(block % files)],
          block / files * options.block_bytes + at % options.block_bytes};
}

// `depth` requests are in flight. Null: this machine or this build has no io_uring.
std::unique_ptr<RawDisk> RawUring(const RawDiskOptions& options);
// A request in flight for each of `depth` threads.
std::unique_ptr<RawDisk> RawThreads(const RawDiskOptions& options);

}  // namespace ebb::bench
