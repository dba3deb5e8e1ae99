// A model from the names and shapes of its tensors, as the headers of safetensors files have them: no value is read.
//
//   model.embed_tokens.weight                  unit "before"   what comes before the first numbered block
//   model.layers.0.self_attn.q_proj.weight     unit "layers.0"
//   model.layers.0.mlp.up_proj.weight          unit "layers.0"
//   lm_head.weight                             unit "after"
//
// Tensors of several dtypes keep them where the compute dtype is among them (SpecOf).
//
// Headers do not tell what a token costs or what forward keeps. Each matrix of a block counts as a
// product of each token, with its output kept. A model without a head has its table as head. Experts
// are refused, because no tensor says how many of them a token goes through.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model.h"

namespace ebb::planner {

// kInvalidArgument: nothing that can be trained is there, or sizes are impossible. kUnimplemented: experts.
absl::StatusOr<Model> ModelOfTensors(std::vector<ModelTensor> tensors, std::string name);

// Errors name the file.
absl::StatusOr<Model> ModelOfSafetensors(std::span<const std::string> paths);

}  // namespace ebb::planner
