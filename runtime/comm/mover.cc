#include "ebb/runtime/comm/mover.h"

#include "ebb/runtime/device/cpu/copy.h"

namespace ebb {

void TeamMover::Copy(void* destination, const void* source, int64_t bytes, int64_t together_bytes) {
  CopyBytes(team_, destination, source, bytes, together_bytes);
}

void TeamMover::Reduce(const Reduction& reduction, std::span<const void* const> inputs,
                       void* destination, int64_t count, int64_t together_bytes) {
  ebb::Reduce(team_, reduction, inputs, destination, count, together_bytes);
}

}  // namespace ebb
