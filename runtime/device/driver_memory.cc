#include "ebb/runtime/device/driver_memory.h"

#include <algorithm>

#include "ebb/runtime/device/backend.h"

namespace ebb {

DriverMemory::Measured::Measured(const Device& device) : device_(device) {
  if (DriverMemory* const memory = device.backend().driver_memory()) memory->Begin(device);
}

DriverMemory::Measured::~Measured() {
  if (DriverMemory* const memory = device_.backend().driver_memory()) memory->End(device_);
}

void DriverMemory::Begin(const Device& device) {
  const std::scoped_lock lock(mutex_);
  if (open_++ == 0) free_before_ = device.free_bytes();
}

// Memory that a library frees counts against what it took.
void DriverMemory::End(const Device& device) {
  const std::scoped_lock lock(mutex_);
  if (--open_ > 0 || !free_before_) return;
  if (const std::optional<int64_t> free = device.free_bytes())
    bytes_ = std::max<int64_t>(0, bytes_ + *free_before_ - *free);
  peak_bytes_ = std::max(peak_bytes_, bytes_);
}

void DriverMemory::Add(int64_t bytes) {
  const std::scoped_lock lock(mutex_);
  bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes_);
}

int64_t DriverMemory::bytes() const {
  const std::scoped_lock lock(mutex_);
  return bytes_;
}

int64_t DriverMemory::peak_bytes() const {
  const std::scoped_lock lock(mutex_);
  return peak_bytes_;
}

}  // namespace ebb
