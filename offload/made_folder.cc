#include "ebb/offload/made_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

constexpr mode_t kMode = S_IRWXU | S_ISVTX;
constexpr mode_t kModeBits = 07777;

}  // namespace

absl::Status MakeFolder(const std::string& path) {
  bool is_made = false;
  for (size_t slash = 0; slash != std::string::npos;) {
    slash = path.find('/', slash + 1);
    const std::string part = path.substr(0, slash);
    if (mkdir(part.c_str(), kMode) == 0) {
      is_made = true;
    } else if (errno != EEXIST) {
      const int error = errno;
      RemoveMadeFolder(part.substr(0, part.rfind('/')));
      return absl::ErrnoToStatus(
          error, absl::StrCat("nvme_path '", path, "' does not exist, and '", part,
                              "' cannot be made; give a folder on the disk that this user may "
                              "write"));
    }
  }
  if (is_made) {
    LogInfo(absl::StrCat("nvme_path '", path,
                         "' did not exist: it is made, for this user only, and removed at the end "
                         "if it is empty then"));
  }
  return absl::OkStatus();
}

void RemoveMadeFolder(std::string path) {
  for (;;) {
    struct stat found = {};
    if (lstat(path.c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) return;
    if ((found.st_mode & kModeBits) != kMode || found.st_uid != geteuid()) return;
    if (rmdir(path.c_str()) != 0) return;
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos || slash == 0) return;
    path.resize(slash);
  }
}

}  // namespace ebb
