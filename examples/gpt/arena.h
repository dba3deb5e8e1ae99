// Memory handed out piece by piece from one block. Over null it only counts, so one function both
// measures a layout and makes it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ebb::gpt {

class Arena {
 public:
  explicit Arena(std::byte* base = nullptr) : base_(base) {}

  // `bytes` at a multiple of 64.
  void* Take(int64_t bytes) {
    void* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (bytes + 63) / 64 * 64;
    return piece;
  }
  template <class T>
  T* Take(int64_t count) {
    return static_cast<T*>(Take(count * static_cast<int64_t>(sizeof(T))));
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

}  // namespace ebb::gpt
