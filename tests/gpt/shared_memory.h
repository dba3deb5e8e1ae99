// Memory for a test's arrays that the host and a device reach at the same address.
#pragma once

#include <map>
#include <memory_resource>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"

namespace ebb::gpt {

class SharedMemory : public std::pmr::memory_resource {
 public:
  explicit SharedMemory(Device device) : device_(std::move(device)) {}

 private:
  // Each array has its own allocation, so that reads beyond it may be noticed. Allocations are kept
  // for the next array of that size, because making and freeing one takes a device some 100 us
  // each.
  void* do_allocate(size_t bytes, size_t) override {
    const std::scoped_lock lock(mutex_);
    if (const auto kept = free_.find(bytes); kept != free_.end()) {
      void* const data = kept->second;
      free_.erase(kept);
      return data;
    }
    absl::StatusOr<Buffer> buffer =
        device_.AllocateShared(static_cast<int64_t>(bytes), "a test's array");
    if (!buffer.ok()) throw std::bad_alloc();
    return buffers_.emplace_back(*std::move(buffer)).data();
  }
  void do_deallocate(void* data, size_t bytes, size_t) override {
    const std::scoped_lock lock(mutex_);
    free_.emplace(bytes, data);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  const Device device_;
  std::mutex mutex_;
  std::vector<Buffer> buffers_;
  std::multimap<size_t, void*> free_;
};

}  // namespace ebb::gpt
