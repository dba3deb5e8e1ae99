// A file of --data, open to be read.
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
  // Of a file: which one it is, and as of when. Alike: the contents are the same.
  struct Version {
    uint64_t device = 0, inode = 0;
    int64_t size = 0, seconds = 0, nanoseconds = 0;  // of its last change
    bool operator==(const Version&) const = default;
  };

  // Refuses what is absent, a folder or a device. Does not wait for the writer of a pipe.
  static absl::StatusOr<TextFile> Open(const std::string& path);
  TextFile() = default;  // not open
  TextFile(TextFile&& other) noexcept;
  TextFile& operator=(TextFile&& other) noexcept;
  ~TextFile();

  bool is_open() const { return descriptor_ >= 0; }
  const std::string& path() const { return path_; }
  const Version& version() const { return version_; }
  // In bytes; 0 of a pipe, and of files whose contents the system makes as they are read.
  int64_t size() const { return version_.size; }
  // From `begin`. An end before that of `bytes` is an error. Any thread.
  absl::Status ReadAt(int64_t begin, std::span<uint8_t> bytes) const;
  // All that follows, of at most `most` bytes, behind what `bytes` has. Waits for a pipe's writer, and
  // says so.
  absl::Status ReadToEnd(int64_t most, std::vector<uint8_t>& bytes) const;

 private:
  absl::Status CannotBeRead(int error) const;

  std::string path_;
  int descriptor_ = -1;
  Version version_;
};

}  // namespace ebb::gpt
