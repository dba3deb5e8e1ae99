// A private directory on a disk for one run's swap files: <nvme_path>/ebb-<name>-<pid>-<random>,
// mode 0700. The destructor removes it with its swap files (kSwapFileNames). It also removes
// nvme_path if it was made for such runs and is empty. While the run lives, a file in the directory
// is locked. The next Create on the same nvme_path removes the directories of killed runs only.
// Takes two descriptors, and needs no more to remove the directory.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/dead_runs.h"

namespace ebb {

class SwapDirectory {
 public:
  // A name has letters, digits, '_', '.' and '-', at most kNameMax of them. Otherwise
  // kInvalidArgument.
  static constexpr size_t kNameMax = 222;
  static absl::Status CheckName(std::string_view name);

  // nvme_path: a directory that this user may write to, not a link. It is made if it does not
  // exist. A directory in memory (tmpfs) is allowed, and one line of the log says so. `name`: see
  // CheckName.
  static absl::StatusOr<SwapDirectory> Create(std::string_view nvme_path, std::string_view name);
  SwapDirectory(SwapDirectory&& other) noexcept { *this = std::move(other); }
  SwapDirectory& operator=(SwapDirectory&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(lock_, other.lock_);
    std::swap(owner_, other.owner_);
    return *this;
  }
  ~SwapDirectory();

  const std::string& path() const { return path_; }

 private:
  SwapDirectory() = default;
  static absl::StatusOr<SwapDirectory> CreateAt(const std::string& parent_path,
                                                std::string_view name);
  // kAborted: a cleaner removed it as a dead run's before it was locked.
  static absl::StatusOr<SwapDirectory> CreateIn(int parent, const std::string& parent_path,
                                                std::string_view name);

  std::string path_;
  RunLock lock_;
  int owner_ = 0;  // the process that removes it; a forked child must not
};

}  // namespace ebb
