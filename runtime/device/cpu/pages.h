// Memory of the CPU device: zero-filled pages straight from the system, in a heap that ranks share
// if there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/buffer.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

constexpr int64_t RoundUp(int64_t bytes, int64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

// Pages for Device::Allocate. Larger buffers lie in the SharedHeap, once it exists, where ranks
// that are processes read them. Huge pages there have a system setting of their own
// (/sys/kernel/mm/transparent_hugepage/shmem_enabled), which is off by default.
absl::StatusOr<Buffer> AllocatePages(int64_t bytes, std::string_view what);
// Pages that no other rank reads: never in the SharedHeap.
absl::StatusOr<Buffer> AllocatePrivatePages(int64_t bytes, std::string_view what);

// Makes untouched pages resident, on all threads, because locking would do it on one. If the system
// refuses a page, the first touch shows it.
void PopulatePages(ThreadTeam& team, std::span<std::byte> memory);

// Memory for buffers that other processes may map: ranks of one host read each other's buffers in
// place, as threads do. It is one file without a name, longer than the machine's memory, mapped
// once at a fixed place. Pages exist where they have been touched, until their buffer is released.
class SharedHeap {
 public:
  // From now on the large buffers of this process's CPU devices lie in a shared heap, until the
  // process ends; forked programs do not have it. Memory that no other rank reads is not in it
  // (AllocatePrivatePages). Null: the system does not allow it.
  static SharedHeap* Install();
  // Null before Install.
  static SharedHeap* Installed();

  int file() const { return file_; }
  int64_t bytes() const { return bytes_; }
  // The offset of `data` in the file; -1: the heap does not hold all of these `bytes`.
  int64_t OffsetOf(const void* data, int64_t bytes) const;

  // Zero-filled, aligned to `alignment`, a power of two of at least a page. Null: no room.
  std::byte* Allocate(int64_t bytes, int64_t alignment);
  void Release(std::byte* data, int64_t bytes);

 private:
  SharedHeap(int file, std::byte* base, int64_t bytes);

  const int file_;
  std::byte* const base_;
  const int64_t bytes_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // offset to bytes, neighbours merged
};

}  // namespace ebb
