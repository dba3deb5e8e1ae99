// Makes a checkpoint, as of one rank, from the tensors of another program.
#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

// Writes `folder`/step-N, where N is the source's finished steps, with fp32 masters, the source's
// optimizer states, and its config.json as a value of the trainer's. Returns the path. `progress`
// gets the number of elements that were written since its last call.
absl::StatusOr<std::string> ImportCheckpoint(TensorSource& source, const std::string& folder,
                                             absl::FunctionRef<void(int64_t elements)> progress);

}  // namespace ebb
