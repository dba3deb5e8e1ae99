// A model in Hugging Face's files: one file, or several files and an index.
//
//   DIR/model.safetensors
//   DIR/model.safetensors.index.json
//       {"weight_map": {"h.0.ln_1.weight": "model-00001-of-00002.safetensors", ...}, ...}
//
// Files and index are untrusted. Names in an index must be plain names of files in that folder, not
// links.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

inline constexpr char kSafetensorsFile[] = "model.safetensors";
inline constexpr char kSafetensorsIndex[] = "model.safetensors.index.json";

// Whether the folder has one of these two files.
bool HasModelFiles(const std::string& folder);
// Whether only torch can read the path: a file of torch.save, or a folder with pytorch_model.bin,
// its index, or a universal checkpoint of DeepSpeed, and without safetensors files.
bool IsForTorch(const std::string& path);
// The text of config.json in the folder, or beside the file; empty if there is none. In Hugging
// Face's cache it is a link.
absl::StatusOr<std::string> ModelConfigBeside(const std::string& path);
// Opens a safetensors file or such a folder. If a folder has one file and an index, the file is
// read, as by transformers. Only fp32, bf16 and fp16 tensors are read.
absl::StatusOr<std::unique_ptr<TensorSource>> OpenModelFiles(const std::string& path);

}  // namespace ebb
