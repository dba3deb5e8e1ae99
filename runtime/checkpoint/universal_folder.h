// A checkpoint of DeepSpeed in its universal form, as its ds_to_universal.py makes one of a run's:
//
//   DIR/zero/model.layers.0.weight/fp32.pt       {"param": tensor}; of a run at stage 3 a flat tensor, without the dict
//   DIR/zero/model.layers.0.weight/exp_avg.pt    each of the optimizer's states likewise
//   DIR/zero/model.layers.0.weight/step.pt       the optimizer's steps
//   DIR/zero/optimizer_state.pt                  the loss scaler and, of stage 3, the steps
//   DIR/*_model_states.pt                        shapes, steps, tied parameters, buffers, frozen parameters
//
// Files of torch.save. Pickles are not executed (torch_file.h). A folder may come from anywhere.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

// Whether the folder is one, or has one that its file latest_universal names.
bool HasUniversalFolder(const std::string& path);
// Whether it is a checkpoint of DeepSpeed in the form in which a run saves it, or a folder of them.
bool LooksLikeDeepSpeed(const std::string& path);

// Values, optimizer states and the training state. Left out, with the reason: buffers, the other names of tied
// parameters, and frozen parameters in pieces. kInvalidArgument: the folder has an unsupported part, such as slices
// of tensor-parallel ranks that were not merged.
absl::StatusOr<std::unique_ptr<TensorSource>> OpenUniversalFolder(const std::string& path);

}  // namespace ebb
