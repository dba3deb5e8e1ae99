// A private directory on a disk for one run's swap files: <nvme_path>/ebb-<name>-<pid>-<random>,
// mode 0700, removed by the destructor with its swap files (kSwapFileNames), and with nvme_path if that
// was made for such runs and is empty. While it lives a file in
// it is locked; what a killed run left, the next Create on the same nvme_path removes, and nothing
// that a living one owns. Takes two descriptors, and no more at its end.
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
  // What a name may have: letters, digits, '_', '.', '-', and no more than kNameMax of them. Else
  // kInvalidArgument.
  static constexpr size_t kNameMax = 222;
  static absl::Status CheckName(std::string_view name);

  // nvme_path: a directory that this user may write, not a link. Where there is none, one is made. A
  // directory in memory (tmpfs) is taken, too, and one line of the log says so. `name`: see CheckName.
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
  // kAborted: taken for a dead run's before it was locked.
  static absl::StatusOr<SwapDirectory> CreateIn(int parent, const std::string& parent_path,
                                                std::string_view name);

  std::string path_;
  RunLock lock_;
  int owner_ = 0;  // the process that removes it: a forked child does not
};

}  // namespace ebb
