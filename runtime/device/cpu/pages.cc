#include "ebb/runtime/device/cpu/pages.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/memory_limit.h"
#include "ebb/runtime/trace/standard_streams.h"

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

namespace {

std::atomic<SharedHeap*> installed{nullptr};
std::mutex installing;

// Twice the machine's memory, so that holes between buffers do no harm.
int64_t HeapBytes() {
  return RoundUp(2 * int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE), kHugePageBytes);
}

}  // namespace

SharedHeap* SharedHeap::Installed() {
  return installed.load(std::memory_order_acquire);
}

SharedHeap* SharedHeap::Install() {
  const std::scoped_lock lock(installing);
  if (SharedHeap* const heap = Installed()) return heap;
  const int file = AboveStandardStreams(memfd_create("ebb-buffers", MFD_CLOEXEC));
  if (file < 0) return nullptr;
  const int64_t bytes = HeapBytes();
  void* mapped = MAP_FAILED;
  if (ftruncate(file, bytes) == 0) {
    mapped = mmap(nullptr, static_cast<size_t>(bytes + kHugePageBytes), PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (mapped != MAP_FAILED) {
    const auto address = reinterpret_cast<uintptr_t>(mapped);
    void* const aligned = static_cast<std::byte*>(mapped) + (~address + 1) % kHugePageBytes;
    mapped = mmap(aligned, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file, 0);
  }
  if (mapped == MAP_FAILED) {
    close(file);
    return nullptr;
  }
  // A forked child would share these pages, although it expects a copy. The child may install a
  // heap of its own.
  madvise(mapped, static_cast<size_t>(bytes), MADV_DONTFORK);
  pthread_atfork(nullptr, nullptr, [] { installed.store(nullptr, std::memory_order_release); });
  // Fails if huge pages are switched off.
  madvise(mapped, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  // Never destroyed, because static buffers may be released late.
  installed.store(new SharedHeap(file, static_cast<std::byte*>(mapped), bytes),
                  std::memory_order_release);
  return Installed();
}

SharedHeap::SharedHeap(int file, std::byte* base, int64_t bytes)
    : file_(file), base_(base), bytes_(bytes) {
  free_[0] = bytes;
}

int64_t SharedHeap::OffsetOf(const void* data, int64_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(data), base = reinterpret_cast<uintptr_t>(base_);
  if (address < base || address - base > static_cast<uintptr_t>(bytes_)) return -1;
  const auto offset = static_cast<int64_t>(address - base);
  return bytes <= bytes_ - offset ? offset : -1;
}

std::byte* SharedHeap::Allocate(int64_t bytes, int64_t alignment) {
  const std::scoped_lock lock(mutex_);
  for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
    const auto [begin, size] = *hole;
    const int64_t at = RoundUp(begin, alignment), end = begin + size;
    if (at > end || end - at < bytes) continue;
    free_.erase(hole);
    if (at > begin) free_[begin] = at - begin;
    if (end > at + bytes) free_[at + bytes] = end - at - bytes;
    return base_ + at;
  }
  return nullptr;
}

void SharedHeap::Release(std::byte* data, int64_t bytes) {
  int64_t begin = data - base_, size = bytes;
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, bytes);
  const std::scoped_lock lock(mutex_);
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      size += before->second;
      free_.erase(before);
    }
  }
  free_[begin] = size;
}

}  // namespace ebb
