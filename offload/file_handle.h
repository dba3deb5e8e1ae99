// An open file of the system, never standard input, output or error. Move-only, closed by the
// destructor.
#pragma once

#include <unistd.h>

#include <utility>

#include "ebb/runtime/trace/standard_streams.h"

namespace ebb {

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

}  // namespace ebb
