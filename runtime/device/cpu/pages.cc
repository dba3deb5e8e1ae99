#include "ebb/runtime/device/cpu/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cpu/shared_heap.h"
#include "ebb/runtime/device/memory_limit.h"

namespace ebb {
namespace {

// No address space has room for more (47 bits of user addresses on x86-64), and no sum below can
// overflow.
constexpr int64_t kBytesMax = int64_t{1} << 47;

constexpr int64_t kSharedBytesMin = int64_t{64} << 10;

int64_t PageBytes() {
  return static_cast<int64_t>(sysconf(_SC_PAGESIZE));
}

int64_t Alignment(int64_t bytes) {
  return bytes >= kHugePageBytes ? kHugePageBytes : PageBytes();
}

// Bytes after the last whole huge page are in small pages: a huge page for them would take up to 2
// MiB of RAM more, in every buffer.
int64_t MappedBytes(int64_t bytes) {
  return RoundUp(bytes, PageBytes());
}

int64_t HeapBytes(int64_t bytes) {
  return RoundUp(bytes, Alignment(bytes));
}

// Released memory of debug builds. It is poisoned and stays mapped for a while; the oldest goes
// first. Otherwise the next allocation would often get the same addresses, and a use after release
// would read its new owner's numbers.
class Quarantine {
 public:
  static constexpr int64_t kBufferBytesMax = int64_t{8} << 20;

  void Add(void* data, int64_t bytes) {
    std::memset(data, kPoison, static_cast<size_t>(bytes));
    const std::scoped_lock lock(mutex_);
    auto& [old_data, old_bytes] = kept_[next_];
    if (old_data != nullptr) munmap(old_data, static_cast<size_t>(old_bytes));
    old_data = data;
    old_bytes = bytes;
    next_ = (next_ + 1) % kept_.size();
  }

 private:
  std::mutex mutex_;
  std::array<std::pair<void*, int64_t>, 16> kept_ = {};
  size_t next_ = 0;
};

void ReleasePages(void* data, int64_t bytes, int) {
  const int64_t mapped = MappedBytes(bytes);
  if constexpr (kPoisonReleased) {
    static auto* quarantine =
        new Quarantine;  // never destroyed: static buffers may be released late
    // Larger buffers are unmapped, so that the next touch faults. Poisoning would make pages
    // resident that were never written.
    if (mapped <= Quarantine::kBufferBytesMax) {
      quarantine->Add(data, mapped);
      return;
    }
  }
  munmap(data, static_cast<size_t>(mapped));
}

void ReleaseShared(void* data, int64_t bytes, int) {
  SharedHeap* const heap = SharedHeap::Installed();
  // In a forked child the heap does not own the parent's buffers.
  if (heap != nullptr && heap->OffsetOf(data, bytes) >= 0)
    heap->Release(static_cast<std::byte*>(data), HeapBytes(bytes));
}

absl::Status Exhausted(int64_t bytes, std::string_view what, std::string_view why) {
  const std::string limit = MemoryLimitBelow(bytes);
  return absl::ResourceExhaustedError(absl::StrCat(
      "cannot allocate ", bytes, " bytes of CPU memory for ",
      absl::string_view(what.data(), what.size()), ": ", absl::string_view(why.data(), why.size()),
      limit.empty() ? "" : "; raise the limit of ", limit));
}

absl::Status CheckRequest(int64_t bytes, std::string_view what) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot allocate ", bytes,
                                                   " bytes of CPU memory for ",
                                                   absl::string_view(what.data(), what.size())));
  }
  if (bytes > kBytesMax) return Exhausted(bytes, what, "more than the address space holds");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Buffer> AllocatePages(int64_t bytes, std::string_view what) {
  EBB_RETURN_IF_ERROR(CheckRequest(bytes, what));
  // Small buffers are not in the heap, because small operations are staged.
  if (SharedHeap* const heap = SharedHeap::Installed();
      heap != nullptr && HeapBytes(bytes) >= kSharedBytesMin) {
    if (std::byte* const data = heap->Allocate(HeapBytes(bytes), Alignment(bytes))) {
      return Buffer(data, bytes, ReleaseShared);
    }
  }
  return AllocatePrivatePages(bytes, what);
}

absl::StatusOr<Buffer> AllocatePrivatePages(int64_t bytes, std::string_view what) {
  EBB_RETURN_IF_ERROR(CheckRequest(bytes, what));
  if (bytes == 0) return Buffer();
  const int64_t size = MappedBytes(bytes);
  const int64_t alignment = Alignment(bytes);
  const int64_t spare =
      alignment == kHugePageBytes ? alignment : 0;  // cut off below, to align the rest
  void* mapped = mmap(nullptr, static_cast<size_t>(size + spare), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return Exhausted(bytes, what, std::strerror(errno));
  auto* start = static_cast<std::byte*>(mapped);
  if (spare > 0) {
    const auto address = reinterpret_cast<uintptr_t>(start);
    const auto before = static_cast<int64_t>((~address + 1) % static_cast<uintptr_t>(alignment));
    if (before > 0) munmap(start, static_cast<size_t>(before));
    if (spare > before) munmap(start + before + size, static_cast<size_t>(spare - before));
    start += before;
    // Fails if huge pages are switched off; the pages are then small.
    madvise(start, static_cast<size_t>(size), MADV_HUGEPAGE);
  }
  return Buffer(start, bytes, ReleasePages);
}

void PopulatePages(ThreadTeam& team, std::span<std::byte> memory) {
#ifdef MADV_POPULATE_WRITE
  const auto page = static_cast<uintptr_t>(PageBytes());
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory.data()) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory.data()) + memory.size();
  team.Run(static_cast<int64_t>(end - begin), kHugePageBytes, [&](int64_t first, int64_t last) {
    madvise(reinterpret_cast<void*>(begin + static_cast<uintptr_t>(first)),
            static_cast<size_t>(last - first), MADV_POPULATE_WRITE);
  });
#else
  static_cast<void>(team), static_cast<void>(memory);
#endif
}

}  // namespace ebb
