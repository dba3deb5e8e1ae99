// A model in files as Hugging Face writes them: one, or several and an index.
//
//   DIR/model.safetensors
//   DIR/model.safetensors.index.json    {"metadata": {...}, "weight_map": {"h.0.ln_1.weight": "model-00001-of-00002.safetensors", ...}}
//   DIR/pytorch_model.bin, DIR/pytorch_model.bin.index.json    the same, of torch.save
//
// Files and index may come from anywhere. Names of files must be plain ones, of files in that folder and no links.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

inline constexpr char kSafetensorsFile[] = "model.safetensors";
inline constexpr char kSafetensorsIndex[] = "model.safetensors.index.json";

// Whether the folder has one of the four.
bool HasModelFiles(const std::string& folder);
// A safetensors file, one of torch.save, or such a folder, in which safetensors files come first. Tensors that are neither
// fp32, bf16 nor fp16 are skipped.
absl::StatusOr<std::unique_ptr<TensorSource>> OpenModelFiles(const std::string& path);

}  // namespace ebb
