// Owned device memory. Move-only. The destructor frees it; the owner orders that after the work
// that uses the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace ebb {

class Buffer {
 public:
  using Release = void (*)(void* data, int64_t bytes, int device);

  Buffer() = default;
  // `device`: the ordinal of the memory's device.
  Buffer(void* data, int64_t bytes, Release release, int device = 0)
      : data_(data), bytes_(bytes), release_(release), device_(device) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(release_, other.release_);
    std::swap(device_, other.device_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) release_(data_, bytes_, device_);
  }

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  int64_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {data(), static_cast<size_t>(bytes_)}; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  Release release_ = nullptr;
  int device_ = 0;
};

// Host memory that the caller owns, locked in RAM for a device as long as this object exists. The
// memory outlives it, and nothing on the device uses the memory when this object is destroyed.
class LockedRange {
 public:
  LockedRange() = default;
  LockedRange(std::span<std::byte> memory, Buffer::Release unlock, int device = 0)
      : locked_(memory.data(), static_cast<int64_t>(memory.size()), unlock, device) {}
  std::span<std::byte> span() const { return locked_.span(); }

 private:
  Buffer locked_;  // its release unlocks
};

// Debug builds fill released memory with this. Read as fp32, bf16 or fp16, every bit pattern of it
// is a NaN, so a use after release shows in the numbers.
inline constexpr unsigned char kPoison = 0xff;
#ifdef NDEBUG
inline constexpr bool kPoisonReleased = false;
#else
inline constexpr bool kPoisonReleased = true;
#endif

}  // namespace ebb
