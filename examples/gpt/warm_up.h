// One pass over all kinds of layers on a GPU before the first step, so that a step launches nothing for
// the first time. What a library launches first it loads first, which may wait for the device: there
// another rank's collective may be waiting for this rank. And each product that comes is settled, how
// it is computed (ProductChoice).
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/dtype.h"
#include "ebb/runtime/device/device.h"
#include "layers.h"
#include "model.h"
#include "ops/ops.h"

namespace ebb::gpt {

// For `layers` of that shape, of which no call is under way. `gradient`: the dtype that the engine wants
// gradients in. Waits for the device. Returns what was chosen, as letters of ProductChoice.
// kResourceExhausted: the device has no room beside the engine's pools.
absl::StatusOr<std::string> WarmUp(const Device& device, const Gpt& gpt,
                                   const Layers::Options& options, DType gradient,
                                   const ProductChoice& choice, Layers& layers);

}  // namespace ebb::gpt
