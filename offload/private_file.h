// A file that is ours alone: made with its space reserved, in no cache where that is granted, and
// removed by the destructor. Behind the data lies a stamp that no transfer touches:
//
//   |  data: what transfers may move  |  stamp: 4 KiB  |
//
// A file that was cut keeps no stamp, whatever our own writes make of its size afterwards.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"

namespace ebb {

class PrivateFile {
 public:
  // `bytes` of data, a multiple of kDiskAlignment. Mode 0600; fails if the path exists, as a link too.
  // `whole_need`: said where the disk is full.
  static absl::StatusOr<PrivateFile> Create(std::string path, int64_t bytes,
                                            std::string_view whole_need = {});
  // At least so many bytes of data from now on: what is there stays, and what is added is not zeros. No transfer is
  // under way. An error: as long as it was.
  absl::Status Extend(int64_t bytes, std::string_view whole_need);
  PrivateFile(PrivateFile&&) = default;
  PrivateFile& operator=(PrivateFile&&) = delete;
  ~PrivateFile();

  // Transfers past the page cache from now on. False: this file system refuses them. Writes a block,
  // whose error is the disk's.
  absl::StatusOr<bool> SetDirect();
  void SetBuffered();

  // Size, inode, links, mode and stamp are what they were. Reads a block of the disk.
  absl::Status CheckUnchanged() const;

  int descriptor() const { return handle_.get(); }
  const std::string& path() const { return path_; }

 private:
  PrivateFile(FileHandle handle, std::string path)
      : handle_(std::move(handle)), path_(std::move(path)) {}
  absl::Status Reserve(int64_t from, int64_t bytes, std::string_view whole_need);
  absl::Status Stamp(int64_t data_bytes, size_t bytes);
  // Of the last block its first `bytes`. Its errno, or 0.
  int WriteStamp(size_t bytes) const;
  absl::Status CheckStamp() const;
  absl::Status Changed(std::string_view how) const;

  FileHandle handle_;
  std::string path_;
  int64_t data_bytes_ = 0;
  uint64_t stamp_ = 0;
  struct stat made_ = {};
};

}  // namespace ebb
