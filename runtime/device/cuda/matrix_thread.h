// A thread of kernel_thread.h that also multiplies matrices with its warp: MatrixThread<Thread>,
// which a kernel makes from the Thread it runs with. This one is the device's, for sm_80 and later;
// tests have theirs in tests/cuda/stand_in/host_matrix_thread.h.
//
// A product is c[16, 8] += a[16, 16] b[16, 8], with a and b of 16-bit numbers, two in each word,
// and c of fp32. Its parts are spread over the warp's lanes as in PTX's mma.m16n8k16: with group =
// lane / 4 and pair = lane % 4,
//
//   a[0]  a(group,     2 pair), a(group,     2 pair + 1)    c[0]  c(group,     2 pair)
//   a[1]  a(group + 8, 2 pair), a(group + 8, 2 pair + 1)    c[1]  c(group,     2 pair + 1)
//   a[2]  a(group,     2 pair + 8), ... + 9                 c[2]  c(group + 8, 2 pair)
//   a[3]  a(group + 8, 2 pair + 8), ... + 9                 c[3]  c(group + 8, 2 pair + 1)
//   b0    b(2 pair, group), b(2 pair + 1, group)
//   b1    b(2 pair + 8, group), b(2 pair + 9, group)
//
// the first of two numbers in the lower half of its word. So two neighbouring numbers of c,
// rounded, are one word of an a: the result of a product goes into the next product without a move
// between lanes.
//
// Places in shared memory are byte offsets from shared().
#pragma once

#include <cstdint>
#include <type_traits>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/cuda/kernel_thread.h"

namespace ebb::kernel {

template <class Thread>
class MatrixThread;

#if defined(__CUDACC__)

template <>
class MatrixThread<DeviceThread> : public DeviceThread {
 public:
  __device__ __forceinline__ explicit MatrixThread(const DeviceThread& thread)
      : DeviceThread(thread), base_(static_cast<int>(__cvta_generic_to_shared(thread.shared()))) {}

  // Hides from the compiler how the value was computed. For addresses inside loops: otherwise their
  // sums with constants would be kept in registers from before the loop.
  __device__ __forceinline__ int Opaque(int place) const {
    asm volatile("" : "+r"(place));
    return place;
  }
  __device__ __forceinline__ const char* Opaque(const char* pointer) const {
    asm volatile("" : "+l"(pointer));
    return pointer;
  }

  // Four matrices of 8 rows of 8 numbers; lane i has the place of row i % 8 of matrix i / 8, a
  // multiple of 16 bytes. words[m] becomes numbers (group, 2 pair) and (group, 2 pair + 1) of
  // matrix m. All lanes call it.
  __device__ __forceinline__ void LoadMatrices(int row, uint32_t (&words)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(base_ + row)
                 : "memory");
  }
  // words[m] becomes numbers (2 pair, group) and (2 pair + 1, group).
  __device__ __forceinline__ void LoadMatricesTransposed(int row, uint32_t (&words)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(base_ + row)
                 : "memory");
  }

  // T is BFloat16 or Float16. All lanes call it.
  template <class T>
  __device__ __forceinline__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) const {
    if constexpr (std::is_same_v<T, BFloat16>) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      static_assert(std::is_same_v<T, Float16>);
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }

  // Begins to copy 16 bytes to shared memory, both ends at multiples of 16. Without `inside` it
  // writes zeros and does not read `from`. This thread sees the bytes after WaitForCopies, other
  // threads after a Sync.
  __device__ __forceinline__ void CopyAsync(int to, const void* from, bool inside) const {
    const uint32_t bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(base_ + to), "l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
  }
  // Ends a group of this thread's copies, which may be empty.
  __device__ __forceinline__ void CommitCopies() const {
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Waits for all groups of this thread but the last kPending.
  template <int kPending>
  __device__ __forceinline__ void WaitForCopies() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  }

 private:
  const int base_;
};

#endif

}  // namespace ebb::kernel
