#include "ebb/runtime/kernels/mover.h"

namespace ebb {

void Mover::CopyInStep(std::span<const CopyEnds> copies, int64_t bytes, int64_t together_bytes) {
  for (const CopyEnds& copy : copies) Copy(copy.destination, copy.source, bytes, together_bytes);
}

void TeamMover::Copy(void* destination, const void* source, int64_t bytes, int64_t together_bytes) {
  CopyBytes(team_, destination, source, bytes, together_bytes);
}

void TeamMover::CopyInStep(std::span<const CopyEnds> copies, int64_t bytes,
                           int64_t together_bytes) {
  CopyBytesInStep(team_, copies, bytes, together_bytes);
}

void TeamMover::Reduce(const Reduction& reduction, std::span<const void* const> inputs,
                       void* destination, int64_t count, int64_t together_bytes) {
  ebb::Reduce(team_, reduction, inputs, destination, count, together_bytes);
}

}  // namespace ebb
