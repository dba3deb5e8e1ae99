// An open file of the system, and the space that it will need on the disk.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

#include "ebb/runtime/trace/standard_streams.h"

namespace ebb {

// Never standard input, output or error. Move-only, closed by the destructor.
class FileHandle {
 public:
  FileHandle() = default;
  // Takes `descriptor`; -1, a failed open, makes it not open.
  explicit FileHandle(int descriptor) : descriptor_(AboveStandardStreams(descriptor)) {}
  FileHandle(FileHandle&& other) noexcept { *this = std::move(other); }
  FileHandle& operator=(FileHandle&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~FileHandle() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  int get() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }
  // The caller must close it.
  int Release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_ = -1;
};

// Makes the file that is open as `descriptor` `bytes` long, with its space on the disk, before its
// first use: a disk that is too small is an error before training. The file is new and empty, or
// ends at `from`. Added bytes are zeros. Returns 0 or an errno (ENOSPC, EDQUOT); after an error the
// file may be shorter. `path` is for the log.
//
// Blocks as long as fallocate does. If fallocate is unknown (ext2, NFS before 4.2) or not allowed,
// zeros are written to the disk, 64 MiB at a time, and the log says so. If zeros take no space (a
// file system that compresses), no space can be reserved, and a warning says so once.
int WaitReserved(int descriptor, int64_t bytes, const std::string& path, int64_t from = 0);

}  // namespace ebb
