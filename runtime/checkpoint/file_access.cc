#include "ebb/runtime/checkpoint/file_access.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {
namespace {

const char* AdviceFor(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "; free space there, or name a folder on a larger disk";
    case EACCES:
    case EPERM:
    case EROFS:
      return "; name a folder that this user may write";
    case EIO:
      return "; the disk may be failing: see the kernel's log (dmesg)";
    case ENOTDIR:
      return "; a part of that path is a file, not a folder";
    case EMFILE:
    case ENFILE:
      return "; raise the limit of open files (ulimit -n)";
    case EFBIG:
      return "; raise the limit of a file's size (ulimit -f)";
    case ELOOP:
      return "; a link is there, and links are not followed";
    default:
      return "";
  }
}

}  // namespace

absl::Status FileError(std::string_view action, std::string_view path, int error) {
  const absl::Status status =
      absl::ErrnoToStatus(error, absl::StrCat(std::string(action), " '", std::string(path), "'"));
  return absl::Status(status.code(), absl::StrCat(status.message(), AdviceFor(error)));
}

bool IsThere(const std::string& path) {
  struct stat what = {};
  return lstat(path.c_str(), &what) == 0;
}

absl::StatusOr<FileHandle> OpenToRead(const std::string& path) {
  // A pipe would wait for its writer.
  FileHandle file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file.is_open()) return FileError("opening", path, errno);
  EBB_RETURN_IF_ERROR(BytesOfRegularFile(file.get(), path).status());
  return file;
}

std::string TargetOf(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_symlink(path, error)) return path;
  const std::string target = std::filesystem::canonical(path, error).string();
  return error ? path : target;
}

absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error))
    names.push_back(entry->path().filename().string());
  if (error) return FileError("listing", folder, error.value());
  return names;
}

std::string RandomName() {
  std::random_device random;
  return absl::StrFormat("%08x%08x", random(), random());
}

absl::StatusOr<FileHandle> CreateFile(const std::string& path) {
  FileHandle file(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!file.is_open()) return FileError("creating", path, errno);
  return file;
}

absl::StatusOr<int64_t> BytesOfRegularFile(int descriptor, std::string_view path) {
  struct stat file = {};
  if (fstat(descriptor, &file) != 0) return FileError("reading the size of", path, errno);
  if (!S_ISREG(file.st_mode))
    return absl::InvalidArgumentError(
        absl::StrCat("'", std::string(path), "' is not a regular file"));
  return static_cast<int64_t>(file.st_size);
}

absl::Status ReadAt(int descriptor, std::string_view path, int64_t offset,
                    std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t got = pread(descriptor, into.data(), into.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    const int64_t bytes = static_cast<int64_t>(into.size());
    if (got < 0)
      return FileError(absl::StrCat("reading ", bytes, " bytes at ", offset, " of"), path, errno);
    if (got == 0)
      return absl::DataLossError(absl::StrCat("'", std::string(path), "' ends at byte ", offset,
                                              ", but ", bytes,
                                              " bytes more were expected: the file was cut"));
    into = into.subspan(static_cast<size_t>(got));
    offset += got;
  }
  return absl::OkStatus();
}

absl::Status WriteAt(int descriptor, std::string_view path, int64_t offset,
                     std::span<const std::byte> from) {
  while (!from.empty()) {
    const ssize_t put = pwrite(descriptor, from.data(), from.size(), offset);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0)
      return FileError(absl::StrCat("writing ", from.size(), " bytes at ", offset, " of"), path,
                       put < 0 ? errno : ENOSPC);
    from = from.subspan(static_cast<size_t>(put));
    offset += put;
  }
  return absl::OkStatus();
}

void BlockFileSizeSignal() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

absl::Status SyncFile(int descriptor, std::string_view path) {
  return fsync(descriptor) == 0 ? absl::OkStatus() : FileError("syncing", path, errno);
}

absl::Status SyncFolder(const std::string& path) {
  const FileHandle folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder.is_open()) return FileError("opening", path, errno);
  return SyncFile(folder.get(), path);
}

absl::StatusOr<std::string> ReadWholeFile(const std::string& path, int64_t bytes_max) {
  EBB_ASSIGN_OR_RETURN(const FileHandle file, OpenToRead(path));
  EBB_ASSIGN_OR_RETURN(const int64_t bytes, BytesOfRegularFile(file.get(), path));
  if (bytes > bytes_max)
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' has ", bytes,
                                                   " bytes, more than the ", bytes_max,
                                                   " that such a file may have"));
  std::string text(static_cast<size_t>(bytes), '\0');
  EBB_RETURN_IF_ERROR(ReadAt(file.get(), path, 0, std::as_writable_bytes(std::span(text))));
  return text;
}

absl::Status ReplaceFile(const std::string& path, std::string_view text) {
  const std::string written = path + ".new";
  {
    if (unlink(written.c_str()) != 0 && errno != ENOENT)
      return FileError("removing", written, errno);
    EBB_ASSIGN_OR_RETURN(const FileHandle file, CreateFile(written));
    EBB_RETURN_IF_ERROR(WriteAt(file.get(), written, 0, std::as_bytes(std::span(text))));
    EBB_RETURN_IF_ERROR(SyncFile(file.get(), written));
  }
  if (rename(written.c_str(), path.c_str()) != 0) return FileError("renaming", written, errno);
  return SyncFolder(std::filesystem::path(path).parent_path().string());
}

}  // namespace ebb
