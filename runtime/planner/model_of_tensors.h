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
// What trains: the tensors that ebb.write_shapes says; else the adapters, if a name has "lora_" in
// it; else all. An expression takes their place. Bytes of a quantised base never train, and have no
// output of their own: that of an adapter beside them is kept. Two elements are in a byte of shape
// {n, 1}, as bitsandbytes stores 4 bits.
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

// kInvalidArgument: no tensor, or a size is impossible. kUnimplemented: experts.
absl::StatusOr<Model> ModelOfTensors(std::vector<ModelTensor> tensors, std::string name);

// Files of safetensors, or indexes of such files ("....index.json"). `trainable`: a regular
// expression that is found in the names of what trains; "": as above. Errors name the file.
absl::StatusOr<Model> ModelOfSafetensors(std::span<const std::string> paths,
                                         const std::string& trainable = "");

// Keys of the metadata that ebb.write_shapes writes: a JSON list of the names of frozen tensors, and
// the shapes that quantised ones stand for, by name.
inline constexpr char kFrozenKey[] = "ebb.frozen", kShapesKey[] = "ebb.shapes";

}  // namespace ebb::planner
