#include "ebb/runtime/device/cpu/shared_heap.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <iterator>

#include "ebb/runtime/device/cpu/pages.h"
#include "ebb/runtime/trace/standard_streams.h"

namespace ebb {
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
