// A file system's speed without Ebb: large sequential transfers with O_DIRECT, from huge pages,
// through threads and through io_uring.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"

namespace ebb::bench {

struct RawDiskOptions {
  std::span<const int> files;  // opened for O_DIRECT; blocks go to them in turn
  int64_t bytes = 0;           // of all
  int64_t block_bytes = int64_t{1} << 20;
  int depth = 32;
  std::span<std::byte> memory;  // depth blocks
};

// The place of a byte in files that are striped by blocks.
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

struct RawRequest {
  bool write;
  int64_t at, bytes;
};

// The blocks of the files to read and to write, one after the other, over and over. If there are
// both, they alternate in proportion, and the writes begin in the middle.
class RawRequests {
 public:
  RawRequests(const RawDiskOptions& options, int64_t read, int64_t written)
      : options_(options), bytes_{read, written} {
    if (read > 0) at_[1] = options.bytes / 2 / options.block_bytes * options.block_bytes;
  }

  std::optional<RawRequest> Next() {
    const bool write = moved_[0] >= bytes_[0] ||
                       (moved_[1] < bytes_[1] && static_cast<double>(moved_[1]) * bytes_[0] <
                                                     static_cast<double>(moved_[0]) * bytes_[1]);
    const int64_t left = bytes_[write] - moved_[write];
    if (left <= 0) return std::nullopt;
    const int64_t at = at_[write] % options_.bytes;
    const int64_t bytes = std::min({options_.block_bytes, left, options_.bytes - at});
    moved_[write] += bytes;
    at_[write] = at + bytes;
    return RawRequest{.write = write, .at = at, .bytes = bytes};
  }

 private:
  const RawDiskOptions options_;
  const int64_t bytes_[2];
  int64_t moved_[2] = {}, at_[2] = {};
};

class RawDisk {
 public:
  virtual ~RawDisk() = default;
  // Reads and writes so many bytes at once, in multiples of O_DIRECT's alignment.
  virtual absl::Status Move(int64_t read, int64_t written) = 0;
};

// With `depth` requests in flight. Null: this machine or this build has no io_uring.
std::unique_ptr<RawDisk> RawUring(const RawDiskOptions& options);
// With one request in flight for each of `depth` threads.
std::unique_ptr<RawDisk> RawThreads(const RawDiskOptions& options);

}  // namespace ebb::bench
