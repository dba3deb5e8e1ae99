// Memory for a benchmark's arrays, in huge pages. Arrays start at different offsets modulo 2 MiB,
// because at equal offsets kernels over several arrays lose half of their speed on some machines.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

namespace ebb {

inline constexpr int64_t kHugePage = int64_t{2} << 20;
inline constexpr int64_t kSkew = 69'952;

class HugePages {
 public:
  explicit HugePages(int64_t bytes) : bytes_(bytes + kHugePage) {
    void* const memory = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return;
    memory_ = static_cast<char*>(memory);
    madvise(memory_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);
    next_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_) + kHugePage - 1) /
                                    kHugePage * kHugePage);
  }
  ~HugePages() {
    if (memory_ != nullptr) munmap(memory_, static_cast<size_t>(bytes_));
  }
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  bool ok() const { return memory_ != nullptr; }

  // The next array: at a huge page's start, plus one skew for each array before it.
  template <class T>
  T* Take(int64_t count, T value) {
    T* const array = reinterpret_cast<T*>(next_ + taken_ * kSkew);
    std::fill_n(array, count, value);
    next_ += (count * static_cast<int64_t>(sizeof(T)) + ++taken_ * kSkew + kHugePage - 1) /
             kHugePage * kHugePage;
    return array;
  }
  static int64_t BytesFor(int64_t arrays, int64_t count) {
    return arrays * (count * 4 + arrays * kSkew + kHugePage);
  }

 private:
  int64_t bytes_;
  char* memory_ = nullptr;
  char* next_ = nullptr;
  int64_t taken_ = 0;
};

}  // namespace ebb
