#include "ebb/runtime/checkpoint/folder_lock.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

constexpr size_t kTokenDigits = 16, kTextBytes = 256;

// The lock is a record lock of POSIX, because forked children, such as a data loader's workers, do
// not inherit it: they may outlive a killed run. But such a lock excludes no other engine of this
// process, and closing any descriptor of the file drops it. So all locks of the process stand here,
// by file, and no such file is opened twice.
using FileId = std::pair<dev_t, ino_t>;
struct Locks {
  std::mutex mutex;
  std::map<FileId, int> files;
};
Locks& LocksOfProcess() {
  static Locks* const locks = new Locks;
  return *locks;
}

std::string LockPath(const std::string& folder) {
  return folder + "/.lock";
}

FileId IdOf(const struct stat& file) {
  return {file.st_dev, file.st_ino};
}

std::string TextIn(int file) {
  std::string text(kTextBytes, '\0');
  const ssize_t got = pread(file, text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\n')) text.pop_back();
  return text;
}

std::string TokenIn(int file) {
  const std::string text = TextIn(file);
  return text.size() > kTokenDigits ? text.substr(0, kTokenDigits) : std::string(kNoSave);
}

absl::Status WriteText(int file, const std::string& path, const std::string& token) {
  char host[128] = "";
  gethostname(host, sizeof(host) - 1);
  std::string text =
      absl::StrCat(token, " process ", static_cast<int>(getpid()), " on host ", std::string(host));
  text.resize(kTextBytes, ' ');
  text.back() = '\n';
  return WriteAt(file, path, 0, std::as_bytes(std::span(text)));
}

absl::Status Refused(const std::string& folder, const std::string& holder) {
  return absl::FailedPreconditionError(
      absl::StrCat("another run saves to '", folder, "' (", holder, " holds '", LockPath(folder),
                   "'): wait until it has ended, or give each run a folder of its own. If its "
                   "host has failed and the lock is still held, remove that file"));
}

std::string HolderIn(const std::string& text) {
  return text.size() > kTokenDigits + 1 ? text.substr(kTokenDigits + 1) : "a process";
}

// Returns 0 or the system's error.
int Lock(int file) {
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return fcntl(file, F_SETLK, &whole) == 0 ? 0 : errno;
}

bool HasNoLocks(int error) {
  return error == ENOLCK || error == EOPNOTSUPP || error == ENOSYS || error == EINVAL;
}

}  // namespace

absl::StatusOr<std::shared_ptr<FolderLock>> FolderLock::Take(const std::string& folder) {
  const std::string path = LockPath(folder);
  Locks& locks = LocksOfProcess();
  const std::scoped_lock guard(locks.mutex);
  while (true) {
    struct stat named = {}, opened = {};
    if (lstat(path.c_str(), &named) == 0 && locks.files.contains(IdOf(named)))
      return Refused(folder, "an engine of this process that has not ended");
    FileHandle file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (!file.is_open()) return FileError("opening", path, errno);
    const int error = Lock(file.get());
    if (error == EACCES || error == EAGAIN) return Refused(folder, HolderIn(TextIn(file.get())));
    if (HasNoLocks(error)) {
      LogWarning(absl::StrCat("the file system of '", folder,
                              "' has no locks: let no other run save there"));
    } else if (error != 0) {
      return FileError("locking", path, error);
    }
    if (fstat(file.get(), &opened) != 0) return FileError("reading the state of", path, errno);
    // The file may have been removed before it was locked.
    if (lstat(path.c_str(), &named) != 0 || IdOf(named) != IdOf(opened)) continue;
    EBB_RETURN_IF_ERROR(WriteText(file.get(), path, TokenIn(file.get())));
    locks.files.emplace(IdOf(opened), file.get());
    return std::shared_ptr<FolderLock>(new FolderLock(file.Release(), IdOf(opened), path));
  }
}

FolderLock::~FolderLock() {
  Locks& locks = LocksOfProcess();
  const std::scoped_lock guard(locks.mutex);
  std::erase_if(locks.files, [this](const auto& file) { return file.second == file_; });
  close(file_);
}

absl::Status FolderLock::Sign() const {
  return WriteText(file_, path_, RandomName());
}

absl::Status FolderLock::Sync() const {
  return SyncFile(file_, path_);
}

void FolderLock::Remove() const {
  unlink(path_.c_str());
}

// Code of this process may have opened and closed the file, so it is locked again.
bool FolderLock::IsOf(const std::string& folder) const {
  struct stat named = {};
  if (lstat(LockPath(folder).c_str(), &named) != 0 || IdOf(named) != id_) return false;
  const int error = Lock(file_);
  return error == 0 || HasNoLocks(error);
}

absl::StatusOr<std::shared_ptr<FolderLock>> LockOf(const std::string& folder,
                                                   std::vector<std::shared_ptr<FolderLock>>& held) {
  const auto found =
      std::find_if(held.begin(), held.end(), [&](const auto& lock) { return lock->IsOf(folder); });
  if (found != held.end()) {
    std::rotate(found, found + 1, held.end());  // the last one used
    return held.back();
  }
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<FolderLock> lock, FolderLock::Take(folder));
  // The last two folders, such as all and the best, stay locked. A trainer may save to a new folder
  // each time and remove old ones, which NFS cannot do while a file there is open.
  constexpr size_t kHeldMax = 2;
  if (held.size() == kHeldMax) held.erase(held.begin());
  held.push_back(lock);
  return lock;
}

std::string LastSaveIn(const std::string& folder) {
  Locks& locks = LocksOfProcess();
  const std::scoped_lock guard(locks.mutex);
  struct stat named = {};
  if (lstat(LockPath(folder).c_str(), &named) != 0) return std::string(kNoSave);
  const auto own = locks.files.find(IdOf(named));
  if (own != locks.files.end()) return TokenIn(own->second);
  const absl::StatusOr<FileHandle> file = OpenToRead(LockPath(folder));
  return file.ok() ? TokenIn(file->get()) : std::string(kNoSave);
}

}  // namespace ebb
