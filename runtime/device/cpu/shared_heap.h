// Memory for buffers that other processes may map: ranks of one host read each other's buffers
// straight from there, as threads do. One file without a name, as long as memory is large, mapped
// once at a fixed place; pages exist where they have been touched, and go when a buffer is
// released.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace ebb {

class SharedHeap {
 public:
  // From now on the large buffers of this process's CPU devices lie in a shared heap, until the
  // process ends; programs that it forks do not have it. Memory that no rank reads of another does
  // not (AllocatePrivatePages). Null: the system does not allow it.
  static SharedHeap* Install();
  // Null before that.
  static SharedHeap* Installed();

  int file() const { return file_; }
  int64_t bytes() const { return bytes_; }
  // Where `data` lies in the file; -1: `bytes` from there are not in it.
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
