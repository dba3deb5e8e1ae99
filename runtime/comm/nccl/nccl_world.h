// Ranks that each have a CUDA device, connected by NCCL. What differs from communicator.h:
//
// - The order of sums is NCCL's own, and partial sums are rounded to the dtype. What NCCL has summed
//   is then multiplied by `scale`, in fp32 and rounded once more; of fp16 a power of two of it
//   multiplies the inputs, so that no sum overflows whose result does not. The same bits come out
//   for the same version, algorithm and world, not for the same reduction group. int8 is carried
//   but not summed: NCCL wraps where our sums saturate. None of it is so after SumInOrder
//   (ordered_sums.h), which makes the bits those of the CPU.
// - NCCL does not compare what ranks call. Different calls fail by the time-out, if they do not
//   happen to fit; the engine compares a hash of its steps.
// - A communicator that fails (a rank ended, gave up, left or did not come in time) fails all of its
//   world: NCCL cannot end an operation on the other ranks, each has to abort its own.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

// `ranks`: the same ones, which have a bootstrap. `device`: this rank's, on which all streams are that operations are enqueued on. kUnimplemented:
// this build has no NCCL. kUnavailable: this machine has none.
absl::StatusOr<std::shared_ptr<WorldBackend>> NewNcclWorld(std::shared_ptr<WorldBackend> ranks,
                                                           const Device& device);

}  // namespace ebb
