// Where the bytes of a Transfer are moved and summed: by CPU threads, or on a GPU's stream. One
// call for each piece of a span. A Mover knows nothing of what its elements mean.
#pragma once

#include <cstdint>
#include <span>

#include "ebb/runtime/device/cpu/copy.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/runtime/kernels/reduce.h"

namespace ebb {

class Mover {
 public:
  virtual ~Mover() = default;
  // CopyBytes (device/cpu/copy.h).
  virtual void Copy(void* destination, const void* source, int64_t bytes,
                    int64_t together_bytes) = 0;
  // CopyBytesInStep. By default one copy after the other.
  virtual void CopyInStep(std::span<const CopyEnds> copies, int64_t bytes, int64_t together_bytes);
  // Reduce (reduce.h), with its bits.
  virtual void Reduce(const Reduction& reduction, std::span<const void* const> inputs,
                      void* destination, int64_t count, int64_t together_bytes) = 0;
};

// Runs at once, on the CPU.
class TeamMover final : public Mover {
 public:
  explicit TeamMover(ThreadTeam& team) : team_(team) {}
  void Copy(void* destination, const void* source, int64_t bytes, int64_t together_bytes) override;
  void CopyInStep(std::span<const CopyEnds> copies, int64_t bytes, int64_t together_bytes) override;
  void Reduce(const Reduction& reduction, std::span<const void* const> inputs, void* destination,
              int64_t count, int64_t together_bytes) override;

 private:
  ThreadTeam& team_;
};

}  // namespace ebb
