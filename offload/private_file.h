// A file that is ours alone: made with its space reserved, in no cache where that is granted, and
// removed by the destructor.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"

namespace ebb {

class PrivateFile {
 public:
  // Mode 0600; fails if the path exists, as a link too.
  static absl::StatusOr<PrivateFile> Create(std::string path, int64_t bytes);
  PrivateFile(PrivateFile&&) = default;
  PrivateFile& operator=(PrivateFile&&) = delete;
  ~PrivateFile();

  // Transfers past the page cache from now on. False: this file system refuses them.
  bool SetDirect();
  void SetBuffered();

  // Size, inode, links and mode are what they were.
  absl::Status CheckUnchanged() const;

  int descriptor() const { return handle_.get(); }
  const std::string& path() const { return path_; }

 private:
  PrivateFile(FileHandle handle, std::string path)
      : handle_(std::move(handle)), path_(std::move(path)) {}
  absl::Status Reserve(int64_t bytes);

  FileHandle handle_;
  std::string path_;
  struct stat made_ = {};
};

}  // namespace ebb
