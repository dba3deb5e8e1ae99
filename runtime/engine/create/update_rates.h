// How fast a rank updates: the optimizer on the device, the same on the processor, and the copies
// for updates below the device. Measured when an engine is made, by running each a few times over
// scratch memory like the rank's state.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/optim/kernels.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/sharding/fit/offload_ratio.h"

namespace ebb {

// The arrays of updates, as in optim::UpdateArrays.
struct UpdateShape {
  OptimizerConfig optimizer = {};
  int64_t elements = 0;  // of the rank; kMeasuredElements of them are timed
  optim::MasterForm master = optim::MasterForm::kWhole;
  DType gradient = DType::kFloat32, parameter = DType::kFloat32;
  DType sent = DType::kFloat32;  // dtype of gradients on their way to the host
  bool parameters_go_up = true;
  bool pins_host_memory = true;  // on the CPU; a GPU locks it always
};

// More than most caches hold, like the states of a model.
inline constexpr int64_t kMeasuredElements = int64_t{1} << 22;

// Memory to measure in. Freeing it may wait for the device.
struct UpdateScratch {
  Buffer device, shared;
  PinnedMemory host;
  LockedRange locked;  // goes before the memory that it locks
};

// Blocks: repeats each for 20 ms or so, at least twice. Takes up to 80 MiB of the device and of the
// host in `scratch`, also on an error. Kernels of the device's streams, and of the host's.
absl::StatusOr<sharding::UpdateRates> MeasureUpdateRates(const Device& device,
                                                         optim::Kernels& on_device,
                                                         optim::Kernels& on_host,
                                                         const UpdateShape& shape,
                                                         UpdateScratch& scratch);

}  // namespace ebb
