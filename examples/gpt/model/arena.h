// Gives out memory piece by piece from one block. With a null block it only counts bytes, so one
// function can both measure a layout and make it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ebb::gpt {

class Arena {
 public:
  explicit Arena(std::byte* base = nullptr) : base_(base) {}

  static constexpr int64_t kAlignment = 256;  // as cuBLASLt's workspace needs

  static int64_t Rounded(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  // `bytes` at a multiple of kAlignment.
  void* Take(int64_t bytes) {
    void* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += Rounded(bytes);
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
