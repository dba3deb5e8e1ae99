// A private file. Its space is reserved, transfers bypass the page cache if possible, and the
// destructor removes it and frees its space. After the data lies a stamp that transfers do not
// touch:
//
//   |  data: what transfers may move  |  stamp: 4 KiB  |
//
// If another program cuts the file, the stamp is lost, even if our own writes restore the size.
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
  // `bytes` of data, a multiple of kDiskAlignment. Mode 0600; fails if the path exists, even as a
  // link. `whole_need`: part of the message if the disk is full.
  static absl::StatusOr<PrivateFile> Create(std::string path, int64_t bytes,
                                            std::string_view whole_need = {});
  // Sets the length of the data. Old data are kept; added bytes are undefined. Call it while no
  // transfer is under way. After an error the file has its old length.
  absl::Status Resize(int64_t bytes, std::string_view whole_need);
  PrivateFile(PrivateFile&&) = default;
  PrivateFile& operator=(PrivateFile&&) = delete;
  ~PrivateFile();

  // Transfers bypass the page cache from now on. False: this file system refuses that. Writes a
  // block, and returns the disk's error.
  absl::StatusOr<bool> SetDirect();
  void SetBuffered();

  // Whether size, inode, links, mode and stamp are unchanged. Reads a block of the disk.
  absl::Status CheckUnchanged() const;

  int descriptor() const { return handle_.get(); }
  const std::string& path() const { return path_; }

 private:
  PrivateFile(FileHandle handle, std::string path)
      : handle_(std::move(handle)), path_(std::move(path)) {}
  absl::Status Reserve(int64_t from, int64_t bytes, std::string_view whole_need);
  absl::Status Stamp(int64_t data_bytes, size_t bytes);
  // Writes the first `bytes` of the last block. Returns errno, or 0.
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
