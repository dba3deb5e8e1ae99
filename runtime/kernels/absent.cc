// Stands in for the movers of GPUs in a build without CUDA, where no device can ask for one.
#include "absl/status/status.h"
#include "ebb/runtime/kernels/stream_mover.h"

namespace ebb {

absl::StatusOr<std::shared_ptr<const ReduceGrids>> StreamMover::Load(const Device&) {
  return absl::UnimplementedError("this build has no CUDA: configure with -DEBB_CUDA=ON");
}

void StreamMover::Copy(void*, const void*, int64_t, int64_t) {}

void StreamMover::Reduce(const Reduction&, std::span<const void* const>, void*, int64_t, int64_t) {}

}  // namespace ebb
