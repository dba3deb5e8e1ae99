#include "ebb/offload/pinned_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cpu/pages.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

std::string MemlockLimit() {
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return "none";
  return absl::StrCat(limit.rlim_cur >> 10, " KiB");
}

void SayUnpinned(int64_t bytes, std::string_view what, int error) {
  static std::once_flag said;
  std::call_once(said, [&] {
    LogWarning(
        absl::StrCat("cannot pin ", (bytes + 1023) >> 10, " KiB of memory for ",
                     absl::string_view(what.data(), what.size()), ": ", std::strerror(error),
                     ". The limit of locked memory (RLIMIT_MEMLOCK) is ", MemlockLimit(),
                     ". It stays unpinned: the system may swap it out, and copies are slower. ",
                     kRaiseLockedMemory));
  });
}

}  // namespace

PinnedMemory::~PinnedMemory() {
  if (pinned && buffer.data() != nullptr) {
    munlock(buffer.data(), static_cast<size_t>(buffer.bytes()));
  }
}

absl::StatusOr<PinnedMemory> AllocatePinned(int64_t bytes, bool pin, std::string_view what) {
  PinnedMemory memory;
  EBB_ASSIGN_OR_RETURN(memory.buffer, AllocatePrivatePages(bytes, what));
  if (!pin || bytes == 0) return memory;
  const auto size = static_cast<size_t>(bytes);
  memory.pinned = mlock(memory.buffer.data(), size) == 0;
  if (!memory.pinned) {
    const int error = errno;
    munlock(memory.buffer.data(), size);  // a part may have been locked
    SayUnpinned(bytes, what, error);
  }
  return memory;
}

}  // namespace ebb
