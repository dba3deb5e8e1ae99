// The values and optimizer states of a checkpoint, as tensors.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

// `path`: a checkpoint, or a folder of checkpoints, of which the newest complete one is opened.
// Every block that is read is checked.
absl::StatusOr<std::unique_ptr<TensorSource>> OpenCheckpointSource(const std::string& path);
// `checkpoint`: one that was found whole.
absl::StatusOr<std::unique_ptr<TensorSource>> OpenWholeCheckpoint(std::string checkpoint,
                                                                  Manifest manifest);

// The name of a trainer's value: the model's config.json, which Hugging Face's loaders need beside
// the tensors.
inline constexpr char kModelConfigName[] = "config.json";

}  // namespace ebb
