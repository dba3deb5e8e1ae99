// A file of --data that is open for reading.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb::gpt {

class TextFile {
 public:
  // Which file it is, and at which time. If two versions are equal, so are the contents.
  struct Version {
    uint64_t device = 0, inode = 0;
    int64_t size = 0, seconds = 0, nanoseconds = 0;  // of its last change
    bool operator==(const Version&) const = default;
  };

  // Refuses a missing file, a folder or a device. Does not wait for the writer of a pipe.
  static absl::StatusOr<TextFile> Open(const std::string& path);
  TextFile() = default;  // not open
  TextFile(TextFile&& other) noexcept;
  TextFile& operator=(TextFile&& other) noexcept;
  ~TextFile();

  bool is_open() const { return descriptor_ >= 0; }
  const std::string& path() const { return path_; }
  const Version& version() const { return version_; }
  // In bytes; 0 for a pipe, and for files that the system fills when they are read.
  int64_t size() const { return version_.size; }
  // Reads from `begin`. If the file ends before all of `bytes` are read, it is an error. Any
  // thread.
  absl::Status ReadAt(int64_t begin, std::span<uint8_t> bytes) const;
  // Appends all that follows, at most `most` bytes, to `bytes`. Waits for a pipe's writer, and logs
  // that.
  absl::Status ReadToEnd(int64_t most, std::vector<uint8_t>& bytes) const;

 private:
  absl::Status CannotBeRead(int error) const;

  std::string path_;
  int descriptor_ = -1;
  Version version_;
};

}  // namespace ebb::gpt
