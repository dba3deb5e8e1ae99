// Runs a kernel of runtime/device/cuda/kernel_thread.h on the host. The threads of a block are
// fibers that take turns, each until it waits for others. So a kernel that forgets to wait reads
// memory that no thread has written. The order of threads is random, though the same in each run,
// and shared memory begins as NaNs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>

#include "ebb/runtime/device/cuda/kernel_thread.h"

namespace ebb::stand_in {

class Block;

class HostThread {
 public:
  HostThread(Block& block, int index) : block_(block), index_(index) {}

  int index() const { return index_; }
  int lane() const { return index_ % kernel::kWarp; }
  int warp() const { return index_ / kernel::kWarp; }
  int64_t block() const;
  int64_t blocks() const;
  char* shared() const;

  void Sync();
  void SyncWarp() { Exchange(nullptr, 0); }
  template <class T>
  T Shuffle(T value, int lane) {
    T found;
    std::memcpy(&found, Exchange(&value, sizeof(T)) + static_cast<size_t>(lane) * sizeof(T),
                sizeof(T));
    return found;
  }
  template <class T>
  T ShuffleXor(T value, int mask) {
    return Shuffle(value, lane() ^ mask);
  }

  // The values that all lanes of the warp passed, by lane; valid until the warp's next exchange but
  // one. For operations of a whole warp: every lane must call it.
  const char* Exchange(const void* mine, size_t bytes);

 private:
  Block& block_;
  const int index_;
};

// Runs `body` for every thread of block `index` of `blocks`. Aborts, where a device would hang, if
// threads wait for one another in vain.
void RunBlock(int64_t index, int64_t blocks, int threads, size_t shared_bytes,
              const std::function<void(HostThread&)>& body);
// Runs all blocks, one after the other.
void RunBlocks(int64_t blocks, int threads, size_t shared_bytes,
               const std::function<void(HostThread&)>& body);

template <class Kernel>
void RunKernel(int64_t blocks, size_t shared_bytes, const typename Kernel::Arrays& arrays) {
  RunBlocks(blocks, Kernel::kThreads, shared_bytes,
            [&](HostThread& thread) { Kernel::Run(thread, arrays); });
}

}  // namespace ebb::stand_in
