#include "file_calls.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdarg>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <utility>

namespace ebb::testing {
namespace {

struct Watch {
  std::string folder;
  FileCalls::Answer answer;
};
std::shared_mutex mutex;
Watch* watch = nullptr;        // guarded by mutex
std::atomic<bool> is_watched;  // so that other calls take no lock

int AnswerTo(const char* name, std::string_view path) {
  if (!is_watched.load(std::memory_order_relaxed)) return 0;
  const std::shared_lock lock(mutex);
  if (watch == nullptr || !path.starts_with(watch->folder)) return 0;
  path.remove_prefix(watch->folder.size());
  if (path.starts_with('/')) path.remove_prefix(1);
  return watch->answer({.name = name, .path = std::string(path)});
}

// The descriptor of a folder stands for the files in it.
std::string PathOf(int descriptor, const char* in_folder = "") {
  if (in_folder[0] == '/') return in_folder;
  std::string folder;
  if (descriptor >= 0) {
    char target[PATH_MAX];
    const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
    const ssize_t length = readlink(link.c_str(), target, sizeof(target));
    if (length > 0) folder.assign(target, static_cast<size_t>(length));
  }
  return in_folder[0] == '\0' ? folder : folder + "/" + in_folder;
}
int AnswerTo(const char* name, int descriptor, const char* in_folder = "") {
  if (!is_watched.load(std::memory_order_relaxed)) return 0;
  return AnswerTo(name, PathOf(descriptor, in_folder));
}

template <class Function>
Function* Next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

bool Fails(int answer) {
  if (answer > 0) errno = answer;
  return answer > 0;
}

}  // namespace

FileCalls::FileCalls(std::string folder, Answer answer) {
  const std::unique_lock lock(mutex);
  watch = new Watch{std::move(folder), std::move(answer)};
  is_watched = true;
}
FileCalls::~FileCalls() {
  const std::unique_lock lock(mutex);
  is_watched = false;
  delete std::exchange(watch, nullptr);
}

int ErrorOf(const FileCall& call) {
  const std::string_view name = call.name;
  return name == "pwrite" || name == "fallocate" || name == "mkdir" ? ENOSPC : EIO;
}

}  // namespace ebb::testing

#define EBB_NEXT(name) \
  static const auto next = ebb::testing::Next(static_cast<decltype(::name)*>(nullptr), #name)

// Each as the C library declares it.
extern "C" {

int open(const char* path, int flags, ...) {
  EBB_NEXT(open);
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  return ebb::testing::Fails(ebb::testing::AnswerTo("open", path)) ? -1 : next(path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  EBB_NEXT(openat);
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  return ebb::testing::Fails(ebb::testing::AnswerTo("openat", folder, path))
             ? -1
             : next(folder, path, flags, mode);
}
DIR* opendir(const char* path) {
  EBB_NEXT(opendir);
  return ebb::testing::Fails(ebb::testing::AnswerTo("opendir", path)) ? nullptr : next(path);
}
int mkdir(const char* path, mode_t mode) noexcept {
  EBB_NEXT(mkdir);
  return ebb::testing::Fails(ebb::testing::AnswerTo("mkdir", path)) ? -1 : next(path, mode);
}
int rename(const char* from, const char* to) noexcept {
  EBB_NEXT(rename);
  return ebb::testing::Fails(ebb::testing::AnswerTo("rename", from)) ? -1 : next(from, to);
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned flags) noexcept {
  EBB_NEXT(renameat2);
  return ebb::testing::Fails(ebb::testing::AnswerTo("renameat2", from))
             ? -1
             : next(from_folder, from, to_folder, to, flags);
}
int unlink(const char* path) noexcept {
  EBB_NEXT(unlink);
  return ebb::testing::Fails(ebb::testing::AnswerTo("unlink", path)) ? -1 : next(path);
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  EBB_NEXT(unlinkat);
  return ebb::testing::Fails(ebb::testing::AnswerTo("unlinkat", folder, path))
             ? -1
             : next(folder, path, flags);
}
int fstat(int file, struct stat* status) noexcept {
  EBB_NEXT(fstat);
  return ebb::testing::Fails(ebb::testing::AnswerTo("fstat", file)) ? -1 : next(file, status);
}
int fsync(int file) {
  EBB_NEXT(fsync);
  const int answer = ebb::testing::AnswerTo("fsync", file);
  if (ebb::testing::Fails(answer)) return -1;
  return answer == ebb::testing::FileCalls::kNothing ? 0 : next(file);
}
int fallocate(int file, int mode, off_t from, off_t bytes) {
  EBB_NEXT(fallocate);
  return ebb::testing::Fails(ebb::testing::AnswerTo("fallocate", file))
             ? -1
             : next(file, mode, from, bytes);
}
ssize_t pread(int file, void* into, size_t bytes, off_t at) {
  EBB_NEXT(pread);
  const int answer = ebb::testing::AnswerTo("pread", file);
  if (ebb::testing::Fails(answer)) return -1;
  return next(file, into, answer == 0 ? bytes : (bytes + 1) / 2, at);
}
ssize_t pwrite(int file, const void* from, size_t bytes, off_t at) {
  EBB_NEXT(pwrite);
  const int answer = ebb::testing::AnswerTo("pwrite", file);
  if (ebb::testing::Fails(answer)) return -1;
  return next(file, from, answer == 0 ? bytes : (bytes + 1) / 2, at);
}

}  // extern "C"
