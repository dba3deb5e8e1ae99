// Ranks that each have a CUDA device, connected by NCCL. What differs from communicator.h:
//
// - The order of sums is NCCL's own, and partial sums are rounded to the dtype. NCCL's sum is then
//   multiplied by `scale` in fp32 and rounded once more. In fp16 a power of two of the scale
//   multiplies the inputs instead, so that a sum overflows only if its result does. The bits are
//   the same for the same version, algorithm and world, but not for the same reduction group. int8
//   is carried but not summed, because NCCL wraps where our sums saturate. After SumInOrder
//   (operations.h) all this does not hold: the bits are those of the CPU.
// - NCCL does not compare what ranks call. Different calls fail by the time-out, unless they happen
//   to fit; the engine compares a hash of its steps.
// - A communicator that fails (a rank ended, gave up, left or did not come in time) fails its whole
//   world, because NCCL cannot end an operation on the other ranks: each has to abort its own.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

// `ranks`: the same ranks, with a bootstrap. `device`: this rank's; all streams of its operations
// are on it. kUnimplemented: this build has no NCCL. kUnavailable: this machine has none.
absl::StatusOr<std::shared_ptr<WorldBackend>> NewNcclWorld(std::shared_ptr<WorldBackend> ranks,
                                                           const Device& device);

}  // namespace ebb
