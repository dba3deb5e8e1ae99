#include "allocation_counter.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> allocations{0};

void* Counted(void* memory) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void* CountedAligned(size_t size, std::align_val_t alignment) {
  const auto bytes = static_cast<size_t>(alignment);
  return Counted(std::aligned_alloc(bytes, (size + bytes - 1) / bytes * bytes));
}

}  // namespace

// A separate file, because a compiler that sees a new expression together with this free reports a
// mismatch.
void* operator new(size_t size) {
  return Counted(std::malloc(size));
}
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(size);
}
void* operator new(size_t size, std::align_val_t alignment) {
  return CountedAligned(size, alignment);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}

int64_t ebb::testing::Allocations() {
  return allocations.load();
}
