// A model in safetensors files as Hugging Face writes them: one file, or several and an index.
//
//   DIR/model.safetensors
//   DIR/model.safetensors.index.json    {"metadata": {...}, "weight_map": {"h.0.ln_1.weight": "model-00001-of-00002.safetensors", ...}}
//
// Headers and index may come from anywhere. Names of files must be plain ones, of files in that folder and no links.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

inline constexpr char kSafetensorsFile[] = "model.safetensors";
inline constexpr char kSafetensorsIndex[] = "model.safetensors.index.json";

// Whether the folder has either of them.
bool HasSafetensors(const std::string& folder);
// A file, or such a folder. Tensors that are neither fp32, bf16 nor fp16 are skipped.
absl::StatusOr<std::unique_ptr<TensorSource>> OpenSafetensors(const std::string& path);

// The file of each tensor. Untrusted text; `path` is for messages.
absl::StatusOr<std::map<std::string, std::string>> ParseSafetensorsIndex(const std::string& text,
                                                                         const std::string& path);
std::string SafetensorsIndexText(const std::map<std::string, std::string>& file_of_tensor,
                                 int64_t tensor_bytes);

}  // namespace ebb
