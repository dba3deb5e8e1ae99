// A checkpoint from the tensors of another program, as one rank would have saved it.
#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

// Writes `folder`/step-N, N being the source's finished steps, with fp32 masters, the optimizer states that the source
// has, and its config.json as a value of the trainer's. The path. `progress` is told the elements that have been
// written since the last call.
absl::StatusOr<std::string> ImportCheckpoint(TensorSource& source, const std::string& folder,
                                             absl::FunctionRef<void(int64_t elements)> progress);

}  // namespace ebb
