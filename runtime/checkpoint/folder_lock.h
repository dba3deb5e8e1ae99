// The lock of a folder of checkpoints. One run at a time saves there: it holds the lock until its
// engine ends. If the process dies, the system releases the lock.
//
//   DIR/.lock   "8c1f0e6b52a97d34 process 4711 on host node07": the token of the last save, and the
//   run that holds the lock
//
// The token is random, so a run sees whether another run has saved since it loaded a checkpoint of
// the folder.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb {

class FolderLock {
 public:
  // kFailedPrecondition names the process that holds it. On a file system without locks it is
  // always granted, with a warning.
  static absl::StatusOr<std::shared_ptr<FolderLock>> Take(const std::string& folder);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

  // Writes a new token. Call it before each save.
  absl::Status Sign() const;
  // When it returns, the token is on the disk, and other hosts see it.
  absl::Status Sync() const;
  // Removes the file. Another process that has opened it sees that before it locks it.
  void Remove() const;
  // Whether it still locks this folder, which may have been removed and made again.
  bool IsOf(const std::string& folder) const;

  // Whether all ranks have seen the folder since the lock was taken (common_folder.h).
  bool is_common() const { return is_common_; }
  void SetCommon() { is_common_ = true; }

 private:
  FolderLock(int file, const std::pair<dev_t, ino_t>& id, std::string path)
      : file_(file), id_(id), path_(std::move(path)) {}

  const int file_;
  const std::pair<dev_t, ino_t> id_;  // of the file
  const std::string path_;
  bool is_common_ = false;
};

// The folder's lock: one of `held`, or a new one, which is added. `held` has the last two folders'.
absl::StatusOr<std::shared_ptr<FolderLock>> LockOf(const std::string& folder,
                                                   std::vector<std::shared_ptr<FolderLock>>& held);

// The token of the last save to the folder. kNoSave: there was none, or the lock has been removed.
inline constexpr std::string_view kNoSave = "0000000000000000";
std::string LastSaveIn(const std::string& folder);

}  // namespace ebb
