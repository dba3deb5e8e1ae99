// Imports and exports the parameters of an engine: safetensors files, as Hugging Face's libraries
// read and write them.
//
//   ebb::ImportParameters(engine, "gpt2/model.safetensors");
//   ebb::ExportParameters(engine, "exported");                    // exported/model.safetensors
//
// An import takes a file, a folder with an index, a checkpoint, or of a folder of checkpoints the
// newest undamaged one, as LoadCheckpoint. Both are collective and belong between steps. An error
// on any rank is every rank's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/engine/engine.h"

namespace ebb {

enum class ParameterNames : uint8_t {
  kAuto,  // kSame if the files have the engine's names, kGpt2 if all names are GPT-2's, else kSame
  kSame,
  kGpt2  // Hugging Face's GPT-2: other names, some matrices transposed, the tied head left out
};

struct ImportOptions {
  ParameterNames names = ParameterNames::kAuto;
  // Gets the config.json beside the tensors or in the checkpoint (empty: there is none) before any
  // value is read, and can refuse what shapes do not show, such as another number of heads.
  std::function<absl::Status(const std::string& model_config)> check = {};
};

// Sets every parameter of the model; optimizer states stay unchanged. A missing or unknown
// parameter, or another shape, is an error that names the parameter. Each rank reads only its part.
// After an error the engine's values are undefined.
absl::Status ImportParameters(Engine& engine, const std::string& path,
                              const ImportOptions& options = {});

struct ExportOptions {
  DType dtype = DType::kFloat32;  // or bf16
  int64_t file_bytes_max = 5'000'000'000;
  ParameterNames names = ParameterNames::kAuto;
  std::map<std::string, std::string> files =
      {};  // small files beside the tensors, such as config.json, by name
};

// Writes masters and frozen parameters into a new or empty folder. Rank 0 writes. It holds a
// transposed matrix whole, and pieces of all other parameters.
absl::Status ExportParameters(Engine& engine, const std::string& folder,
                              const ExportOptions& options = {});
// Call it before training on the rank that writes: it refuses a folder that an export would refuse.
absl::Status CheckExports(const std::string& folder);

}  // namespace ebb
