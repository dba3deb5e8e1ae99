// A file on the disk without a name, so no other program can open, cut, replace or link it. The
// kernel frees its space when the process ends, even if it is killed. Its space is reserved, and
// transfers bypass the page cache if possible.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"

namespace ebb {

class UnnamedFile {
 public:
  // `directory`: this user may write to it. It is made, private to this user, if it does not exist.
  // A directory in memory (tmpfs) or of another host (NFS) is allowed, and one line of the log says
  // so. `bytes`: a multiple of kDiskAlignment. `whole_need`: part of the message if the disk is
  // full. A file system that cannot make a file without a name makes one, and unlinks it at once.
  static absl::StatusOr<UnnamedFile> Create(const std::string& directory, std::string_view title,
                                            int64_t bytes, std::string_view whole_need = {});
  // Sets the length. Old data are kept; added bytes are undefined. Call it while no transfer is
  // under way. After an error the file has its old length.
  absl::Status Resize(int64_t bytes, std::string_view whole_need);
  UnnamedFile(UnnamedFile&&) = default;
  UnnamedFile& operator=(UnnamedFile&&) = delete;
  // Cuts the file, because a forked process, such as a data loader's worker, may hold it open and
  // so keep its space. A forked process that destroys its copy of this object cuts nothing.
  ~UnnamedFile();

  // Transfers bypass the page cache from now on. False: this file system refuses that. Writes a
  // block, so call it before there are data; returns the disk's error.
  absl::StatusOr<bool> SetDirect();
  void SetBuffered();

  int descriptor() const { return handle_.get(); }
  // For messages: the directory, and the title in parentheses.
  const std::string& path() const { return path_; }

 private:
  UnnamedFile(FileHandle handle, std::string path);
  absl::Status Reserve(int64_t from, int64_t bytes, std::string_view whole_need);

  FileHandle handle_;
  std::string path_;
  int64_t bytes_ = 0;
  int owner_ = 0;  // the process that made it
};

// The line of the log about a directory on a file system of this type (f_type of statfs); empty for
// a disk.
std::string RemarkOnFileSystem(int64_t type, std::string_view directory);

}  // namespace ebb
