// matrix_thread.h's MatrixThread on the host, where copies arrive as late as allowed: a byte that
// is read before the wait is one of a NaN. An overwrite of memory that another thread still reads
// shows too, because a copy's bytes become NaNs when it begins.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "block.h"
#include "ebb/runtime/device/cuda/matrix_thread.h"

namespace ebb::stand_in {

// How often a matrix of LoadMatrices has had rows in the same banks of shared memory, for which a
// device takes more than one pass.
inline std::atomic<int64_t> bank_conflicts = 0;

}  // namespace ebb::stand_in

namespace ebb::kernel {

template <>
class MatrixThread<stand_in::HostThread> : public stand_in::HostThread {
 public:
  explicit MatrixThread(const stand_in::HostThread& thread) : HostThread(thread) {}
  ~MatrixThread() {
    size_t left = copies_.size();
    for (const std::vector<Copy>& group : groups_) left += group.size();
    if (left > 0) Stop("a thread ended with copies that it never waited for");
  }

  template <class Value>
  Value Opaque(Value value) {
    return value;
  }

  void LoadMatrices(int row, uint32_t (&words)[4]) {
    const char* const rows = ExchangeRows(row);
    for (int m = 0; m < 4; ++m)
      std::memcpy(&words[m], rows + (8 * m + lane() / 4) * kRowBytes + 4 * (lane() % 4), 4);
  }
  void LoadMatricesTransposed(int row, uint32_t (&words)[4]) {
    const char* const rows = ExchangeRows(row);
    for (int m = 0; m < 4; ++m) {
      uint16_t halves[2];
      for (int i = 0; i < 2; ++i) {
        std::memcpy(&halves[i],
                    rows + (8 * m + 2 * (lane() % 4) + i) * kRowBytes + 2 * (lane() / 4), 2);
      }
      words[m] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
    }
  }

  // The exact sum of products and c, rounded once; the device's own rounding steps are not
  // specified.
  template <class T>
  void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Parts {
      float a[8], b[4];
    } mine;
    for (int i = 0; i < 4; ++i) UnpackPair<T>(a[i], mine.a[2 * i], mine.a[2 * i + 1]);
    UnpackPair<T>(b0, mine.b[0], mine.b[1]);
    UnpackPair<T>(b1, mine.b[2], mine.b[3]);
    const auto* const parts =
        reinterpret_cast<const Parts*>(Exchange(&mine, sizeof mine));  // by lane
    const int group = lane() / 4, pair = lane() % 4;
    for (int i = 0; i < 4; ++i) {
      const int upper = i / 2, column = 2 * pair + i % 2;  // row group + 8 * upper
      double sum = 0;
      for (int k = 0; k < 16; ++k) {
        const int owner = k % 8 / 2;  // the pair that has k
        sum += double{parts[4 * group + owner].a[k / 8 * 4 + upper * 2 + k % 2]} *
               double{parts[4 * column + owner].b[k / 8 * 2 + k % 2]};
      }
      c[i] = static_cast<float>(c[i] + sum);
    }
  }

  void CopyAsync(int to, const void* from, bool inside) {
    if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
      Stop("a copy that is not aligned to 16 bytes");
    std::memset(shared() + to, 0xff, 16);
    copies_.push_back({.to = shared() + to, .from = from, .inside = inside});
  }
  void CommitCopies() { groups_.push_back(std::exchange(copies_, {})); }
  template <int kPending>
  void WaitForCopies() {
    while (groups_.size() > kPending) {
      for (const Copy& copy : groups_.front()) {
        std::memset(copy.to, 0, 16);
        if (copy.inside) std::memcpy(copy.to, copy.from, 16);
      }
      groups_.erase(groups_.begin());
    }
  }

 private:
  static constexpr int kRowBytes = 16;
  struct Copy {
    char* to;
    const void* from;
    bool inside;
  };

  [[noreturn]] static void Stop(const char* why) {
    std::fprintf(stderr, "%s\n", why);
    std::abort();
  }

  // All 32 rows, with a check of the banks: a row has 4 of 32, of 4 bytes each.
  const char* ExchangeRows(int row) {
    if (row % kRowBytes != 0) Stop("a matrix's row that is not aligned to 16 bytes");
    const char* const places = Exchange(&row, sizeof row);
    if (lane() % 8 == 0) {
      unsigned seen = 0;
      for (int i = lane(); i < lane() + 8; ++i) {
        int place;
        std::memcpy(&place, places + static_cast<size_t>(i) * sizeof place, sizeof place);
        seen |= 1u << (place / kRowBytes % 8);
      }
      if (seen != 0xff) ++stand_in::bank_conflicts;
    }
    return Exchange(shared() + row, kRowBytes);
  }

  std::vector<Copy> copies_;               // of the open group
  std::vector<std::vector<Copy>> groups_;  // begun and not waited for, oldest first
};

}  // namespace ebb::kernel
