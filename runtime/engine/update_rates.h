// How fast a rank updates: the optimizer on the device, the same on the processor, and the copies
// that come with what is updated below the device. Measured where an engine is made, by running each
// a few times over scratch memory that is like its state.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/optim/kernels.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/sharding/offload_ratio.h"

namespace ebb {

// What the updates read and write, as optim::UpdateArrays has it.
struct UpdateShape {
  OptimizerConfig optimizer = {};
  int64_t elements = 0;  // of the rank; kMeasuredElements of them are timed
  optim::MasterForm master = optim::MasterForm::kWhole;
  DType gradient = DType::kFloat32, parameter = DType::kFloat32;
  DType sent = DType::kFloat32;  // of gradients on their way to the host
  bool parameters_go_up = true;
  bool pins_host_memory = true;  // on the CPU; a GPU locks it always
};

// More than most caches hold, as the states of a model are.
inline constexpr int64_t kMeasuredElements = int64_t{1} << 22;

// What is measured in. To give it back may wait for the device.
struct UpdateScratch {
  Buffer device, shared;
  PinnedMemory host;
  LockedRange locked;  // goes before what it locks
};

// Blocks: each is repeated for 20 ms or so, and at least twice. Takes up to 80 MiB of the device and
// of the host, in `scratch`, whatever it answers. Kernels of the device's streams, and of the host's.
absl::StatusOr<sharding::UpdateRates> MeasureUpdateRates(const Device& device,
                                                         optim::Kernels& on_device,
                                                         optim::Kernels& on_host,
                                                         const UpdateShape& shape,
                                                         UpdateScratch& scratch);

}  // namespace ebb
