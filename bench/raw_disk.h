// What a file system gives without Ebb: large sequential transfers past the page cache, from huge
// pages, through threads and through io_uring, with nothing around them.
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

struct RawRequest {
  bool write;
  int64_t at, bytes;
};

// What is read and what is written of the files, block after block: in their proportion where it is both,
// and then the writes begin in the middle. Round and round.
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
  // So many bytes are read and so many written, at once: multiples of what O_DIRECT takes.
  virtual absl::Status Move(int64_t read, int64_t written) = 0;
};

// `depth` requests are in flight. Null: this machine or this build has no io_uring.
std::unique_ptr<RawDisk> RawUring(const RawDiskOptions& options);
// A request in flight for each of `depth` threads.
std::unique_ptr<RawDisk> RawThreads(const RawDiskOptions& options);

}  // namespace ebb::bench
