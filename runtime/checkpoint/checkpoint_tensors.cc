#include "ebb/runtime/checkpoint/checkpoint_tensors.h"

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/stored_values.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {
namespace {

class CheckpointSource : public TensorSource {
 public:
  CheckpointSource(std::string path, const Manifest& manifest, StoredValues values)
      : values_(std::move(values)) {
    description_ = {.kind = "checkpoint of Ebb", .path = std::move(path), .state = manifest.state};
    const auto config = manifest.trainer.find(kModelConfigName);
    if (config != manifest.trainer.end()) description_.model_config = config->second;
    for (const Manifest::Parameter& parameter : manifest.parameters) {
      tensors_.push_back({.name = parameter.name,
                          .dtype = parameter.dtype,
                          .shape = parameter.shape,
                          .trainable = parameter.trainable});
    }
    for (const Manifest::Parameter& parameter : manifest.parameters)
      for (const std::string& state : parameter.states)
        tensors_.push_back({.name = parameter.name, .state = state, .shape = parameter.shape});
  }

  absl::Status Read(size_t tensor, int64_t begin, std::span<float> values) override {
    const TensorInfo& info = tensors_[tensor];
    const std::string_view value = info.trainable ? kMasterClass : kParameterClass;
    return values_.Read(info.state.empty() ? std::string(value) : info.state, info.name, begin,
                        values);
  }

 private:
  StoredValues values_;
};

// A parameter of a checkpoint has elements. Bytes without elements are a buffer that was never
// filled.
bool IsEmptyBuffer(const TensorInfo& tensor) {
  return tensor.dtype == DType::kInt8 && tensor.elements() == 0;
}

// Adds the parameters to the manifest and the slices to the file. Each tensor with elements is one
// slice.
absl::Status Declare(const TensorSource& source, Manifest& manifest,
                     std::vector<RankFileWriter::Slice>& slices) {
  std::map<std::string, size_t> parameter_of;
  for (const TensorInfo& tensor : source.tensors()) {
    const auto refuse = [&](std::string_view why) {
      return absl::InvalidArgumentError(absl::StrCat(
          Described(tensor), " of '", source.description().path, "' ", std::string(why)));
    };
    if (IsEmptyBuffer(tensor)) continue;
    if (tensor.elements() < 1)
      return refuse("has no elements, but a parameter of a checkpoint needs some");
    if (!MayBeParameter(tensor.name)) return refuse("has a name that is not UTF-8");
    // Bytes are copied unchanged. All numbers are fp32, because files do not say which of them are
    // frozen.
    const bool is_bytes = tensor.dtype == DType::kInt8;
    const DType dtype = is_bytes ? DType::kInt8 : DType::kFloat32;
    if (tensor.state.empty()) {
      if (!parameter_of.emplace(tensor.name, manifest.parameters.size()).second)
        return refuse("is there twice");
      manifest.parameters.push_back(
          {.name = tensor.name, .shape = tensor.shape, .trainable = !is_bytes, .dtype = dtype});
    } else {
      const auto parameter = parameter_of.find(tensor.name);
      if (parameter == parameter_of.end()) return refuse("is a state without a parameter");
      if (!MayBeState(tensor.state))
        return refuse("has a name that a checkpoint uses itself, or cannot store");
      // Without their scales and their map, codes would be loaded as other numbers.
      if (is_bytes)
        return refuse(
            "has bytes (uint8), which are codes of another optimizer: decode them there to fp32, "
            "or "
            "import files of the parameters alone");
      manifest.parameters[parameter->second].states.push_back(tensor.state);
    }
    const std::string of = !tensor.state.empty()
                               ? tensor.state
                               : std::string(is_bytes ? kParameterClass : kMasterClass);
    slices.push_back(
        {.name = {.of = of, .parameter = tensor.name, .begin = 0, .end = tensor.elements()},
         .encoding = dtype});
  }
  return slices.empty() ? absl::InvalidArgumentError(
                              absl::StrCat("'", source.description().path, "' has no parameters"))
                        : absl::OkStatus();
}

absl::StatusOr<std::string> ImportInto(TensorSource& source, const std::string& folder,
                                       absl::FunctionRef<void(int64_t elements)> progress) {
  Manifest manifest{.state = source.description().state, .config = "{}"};
  if (!source.description().model_config.empty())
    manifest.trainer[kModelConfigName] = source.description().model_config;
  std::vector<RankFileWriter::Slice> slices;
  EBB_RETURN_IF_ERROR(Declare(source, manifest, slices));
  EBB_ASSIGN_OR_RETURN(NewCheckpoint checkpoint,
                       NewCheckpoint::Begin(folder, manifest.state.finished_steps));
  const std::string path = absl::StrCat(checkpoint.path(), "/", RankFileName(0, 1));
  EBB_ASSIGN_OR_RETURN(RankFileWriter file, RankFileWriter::Create(path, slices, {}));
  EBB_RETURN_IF_ERROR(ForEachPiece(source, [&](size_t, std::span<const float> values) {
    progress(std::ssize(values));
    return file.Append(values);
  }));
  EBB_RETURN_IF_ERROR(file.Finish());
  return checkpoint.Commit(std::move(manifest), /*ranks=*/1, /*keep=*/0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TensorSource>> OpenCheckpointSource(const std::string& path) {
  EBB_ASSIGN_OR_RETURN(std::string found, FindCheckpoint(path));
  EBB_ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(found));
  return OpenWholeCheckpoint(std::move(found), std::move(manifest));
}

absl::StatusOr<std::unique_ptr<TensorSource>> OpenWholeCheckpoint(std::string checkpoint,
                                                                  Manifest manifest) {
  StoredValues values(checkpoint, manifest);
  EBB_RETURN_IF_ERROR(values.ReadAllHeaders());
  return std::make_unique<CheckpointSource>(std::move(checkpoint), manifest, std::move(values));
}

absl::StatusOr<std::string> ImportCheckpoint(TensorSource& source, const std::string& folder,
                                             absl::FunctionRef<void(int64_t elements)> progress) {
  const bool is_new = !IsThere(folder);
  absl::StatusOr<std::string> imported = ImportInto(source, folder, progress);
  if (!imported.ok() && is_new) RemoveEmptyFolder(folder);
  return imported;
}

}  // namespace ebb
