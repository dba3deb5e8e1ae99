// Memory for a test's arrays that the host and a device reach at the same address.
#pragma once

#include <map>
#include <memory_resource>
#include <mutex>
#include <new>
#include <utility>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"

namespace ebb::gpt {

class SharedMemory : public std::pmr::memory_resource {
 public:
  explicit SharedMemory(Device device) : device_(std::move(device)) {}

 private:
  // In allocations of its own: so what is read beyond an array may be noticed.
  void* do_allocate(size_t bytes, size_t) override {
    absl::StatusOr<Buffer> buffer =
        device_.AllocateShared(static_cast<int64_t>(bytes), "a test's array");
    if (!buffer.ok()) throw std::bad_alloc();
    void* const data = buffer->data();
    const std::scoped_lock lock(mutex_);
    buffers_.emplace(data, *std::move(buffer));
    return data;
  }
  void do_deallocate(void* data, size_t, size_t) override {
    const std::scoped_lock lock(mutex_);
    buffers_.erase(data);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  const Device device_;
  std::mutex mutex_;
  std::map<void*, Buffer> buffers_;
};

}  // namespace ebb::gpt
