// One pass over all kinds of layers on a GPU before the first step, so that no kernel is launched
// for the first time in a step. At the first launch of a kernel a library loads the kernel and may
// wait for the device. If another rank's collective then waits for this rank, both wait for ever.
// The pass also chooses how each product is computed (ProductChoice).
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/dtype.h"
#include "ebb/runtime/device/device.h"
#include "model/layers.h"
#include "model/model.h"
#include "ops/ops.h"

namespace ebb::gpt {

// For `layers` of that shape, while none of its calls runs. `gradient`: the dtype of the engine's
// gradients. Waits for the device. Returns the choices, as letters of ProductChoice.
// kResourceExhausted: the device has no room beside the engine's pools.
absl::StatusOr<std::string> WarmUp(const Device& device, const Gpt& gpt,
                                   const Layers::Options& options, DType gradient,
                                   const ProductChoice& choice, Layers& layers);

}  // namespace ebb::gpt
