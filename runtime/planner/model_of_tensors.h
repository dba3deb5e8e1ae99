// A model from the names and shapes of its tensors in the headers of safetensors files. No value is
// read.
//
//   model.embed_tokens.weight                unit "before": before the first numbered block
//   model.layers.0.self_attn.q_proj.weight   unit "layers.0"
//   model.layers.0.mlp.up_proj.weight        unit "layers.0"
//   lm_head.weight                           unit "after"
//
// Tensors of several dtypes keep their dtypes if the compute dtype is one of them (SpecOf).
//
// Headers have neither the operations of a token nor the tensors that forward keeps. So each matrix
// of a block counts as one product for each token, with a kept output. The table is the head of a
// model without a head. Experts are refused, because headers do not say how many a token uses.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model.h"

namespace ebb::planner {

// kInvalidArgument: no tensor can be trained, or a size is impossible. kUnimplemented: experts.
absl::StatusOr<Model> ModelOfTensors(std::vector<ModelTensor> tensors, std::string name);

// Files of safetensors, or indexes of such files ("....index.json"). Errors name the file.
absl::StatusOr<Model> ModelOfSafetensors(std::span<const std::string> paths);

}  // namespace ebb::planner
