// A checkpoint as tensors: opened as a source of its values and optimizer states, and made from the
// tensors of another program.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
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

// Makes a checkpoint, as of one rank: `folder`/step-N, where N is the source's finished steps, with
// fp32 masters, the source's optimizer states, and its config.json as a value of the trainer's.
// Returns the path. `progress` gets the number of elements that were written since its last call.
absl::StatusOr<std::string> ImportCheckpoint(TensorSource& source, const std::string& folder,
                                             absl::FunctionRef<void(int64_t elements)> progress);

}  // namespace ebb
