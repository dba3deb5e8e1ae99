// Stands in for the movers of GPUs in a build without CUDA, where no device can ask for one.
#include "ebb/runtime/comm/cuda/stream_mover.h"

namespace ebb {

void StreamMover::Copy(void*, const void*, int64_t, int64_t) {}

void StreamMover::Reduce(const Reduction&, std::span<const void* const>, void*, int64_t, int64_t) {}

}  // namespace ebb
