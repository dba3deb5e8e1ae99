// Opens any PATH of ebb-checkpoint. Files of torch.save are pickles, which torch itself has to read:
//
//   ebb-checkpoint -> python3 -m ebb.checkpoint PATH -> a line of JSON: names, shapes, and the place
//                                                       of each tensor in its file
//
// The values are read here, as of any other file.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

// Opens what OpenTensorSource opens, and a path for which IsForTorch holds. An error of python3 says
// what to install.
absl::StatusOr<std::unique_ptr<TensorSource>> OpenAnySource(const std::string& path);

}  // namespace ebb
