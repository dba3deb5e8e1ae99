// A universal checkpoint of DeepSpeed, which ds_to_universal.py makes from a run's checkpoint:
//
//   DIR/zero/model.layers.0.weight/fp32.pt      {"param": tensor}; from stage 3: the flat tensor
//   DIR/zero/model.layers.0.weight/exp_avg.pt   each of the optimizer's states likewise
//   DIR/zero/model.layers.0.weight/step.pt      the optimizer's steps
//   DIR/zero/optimizer_state.pt                 the loss scaler and, from stage 3, the steps
//   DIR/*_model_states.pt                       shapes, steps, tied and frozen parameters, buffers
//
// All are files of torch.save. Pickles are not executed (torch_file.h). A folder is untrusted.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

// Whether the folder is such a checkpoint, or its file latest_universal names one.
bool HasUniversalFolder(const std::string& path);
// Whether it is a checkpoint that a run of DeepSpeed saved, or a folder of such checkpoints.
bool LooksLikeDeepSpeed(const std::string& path);

// Values, optimizer states and the training state. Buffers, second names of tied parameters and
// frozen parameters in pieces are left out, with the reason. kInvalidArgument: the folder has an
// unsupported part, such as slices of tensor-parallel ranks that were not merged.
absl::StatusOr<std::unique_ptr<TensorSource>> OpenUniversalFolder(const std::string& path);

}  // namespace ebb
