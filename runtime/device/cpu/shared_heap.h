// Memory for buffers that other processes may map: ranks of one host read each other's buffers in
// place, as threads do. It is one file without a name, longer than the machine's memory, mapped
// once at a fixed place. Pages exist where they have been touched, until their buffer is released.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace ebb {

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
