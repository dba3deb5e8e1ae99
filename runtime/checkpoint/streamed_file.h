// A new file that is written from its beginning to its end. The disk is at work from the first window on, and little of
// the file is in the page cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"

namespace ebb {

class StreamedFile {
 public:
  static absl::StatusOr<StreamedFile> Create(std::string path);
  StreamedFile(StreamedFile&&) = default;

  const std::string& path() const { return path_; }
  // The next byte that Append writes. Before the first one.
  void BeginAt(int64_t byte) { settled_ = started_ = end_ = byte; }
  absl::Status Append(std::span<const std::byte> bytes);
  // What stands before the place where Append began, or over what it wrote.
  absl::Status WriteAt(int64_t byte, std::span<const std::byte> bytes);
  // Returns when all of it is on the disk.
  absl::Status Sync();

 private:
  StreamedFile(FileHandle file, std::string path)
      : file_(std::move(file)), path_(std::move(path)) {}
  absl::Status StartWriteback();

  FileHandle file_;
  std::string path_;
  int64_t end_ = 0;
  int64_t started_ = 0, settled_ = 0;  // the disk was told to write, and has written
};

}  // namespace ebb
