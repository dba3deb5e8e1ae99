// The files of --data: one that is open for reading, and those that are read piece by piece.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
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
  static absl::StatusOr<std::shared_ptr<const TextFile>> Open(const std::string& path);
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;
  ~TextFile();

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
  TextFile(const std::string& path, int descriptor) : path_(path), descriptor_(descriptor) {}
  absl::Status CannotBeRead(int error) const;

  const std::string path_;
  const int descriptor_;
  Version version_;
};

// There may be more files than a process may open. So only a few stay open, and the others are
// opened again when they are read.
class DataFiles {
 public:
  static constexpr size_t kOpenMax = 16;  // not counting files that are being read

  // The file's number. `file` need not stay open.
  size_t Add(const TextFile& file);
  // Reads from `begin` of file number `file`. An error: the file cannot be read, it ends before, or
  // it was replaced or changed since it was added. Any thread.
  absl::Status ReadAt(size_t file, int64_t begin, std::span<uint8_t> bytes);

 private:
  struct Known {
    std::string path;
    TextFile::Version version;
  };
  struct Opened {
    size_t number = 0;
    std::shared_ptr<const TextFile> file;
  };

  absl::StatusOr<std::shared_ptr<const TextFile>> Get(size_t number);
  std::shared_ptr<const TextFile> Find(size_t number);  // null: not open

  std::vector<Known> known_;
  std::mutex mutex_;
  std::vector<Opened> opened_;  // under mutex_; the file that was read last is at the end
};

}  // namespace ebb::gpt
