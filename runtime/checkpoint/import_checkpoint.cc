#include "ebb/runtime/checkpoint/import_checkpoint.h"

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/checkpoint/checkpoint_source.h"
#include "ebb/runtime/checkpoint/copy_tensors.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/slice_name.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

// Bytes are copied unchanged. All numbers are fp32, because files do not say which of them are
// frozen.
DType StoredDType(const TensorInfo& tensor) {
  return tensor.dtype == DType::kInt8 ? DType::kInt8 : DType::kFloat32;
}

// A parameter of a checkpoint has elements. Bytes without elements are a buffer that was never
// filled.
bool IsEmptyBuffer(const TensorInfo& tensor) {
  return tensor.dtype == DType::kInt8 && tensor.elements() == 0;
}

// Adds the parameters to the manifest and the slices to the file. Each tensor with elements is one
// slice.
absl::Status Declare(const TensorSource& source, Manifest& manifest,
                     std::vector<StoredTensor>& slices) {
  std::map<std::string, size_t> parameter_of;
  for (const TensorInfo& tensor : source.tensors()) {
    const auto refuse = [&](std::string_view why) {
      return absl::InvalidArgumentError(absl::StrCat(
          Described(tensor), " of '", source.description().path, "' ", std::string(why)));
    };
    if (IsEmptyBuffer(tensor)) continue;
    if (tensor.elements() < 1)
      return refuse("has no elements, but a parameter of a checkpoint needs some");
    if (!config::IsUtf8(tensor.name) || tensor.name.empty())
      return refuse("has a name that is not UTF-8");
    const DType dtype = StoredDType(tensor);
    const bool is_bytes = dtype == DType::kInt8;
    if (tensor.state.empty()) {
      if (!parameter_of.emplace(tensor.name, manifest.parameters.size()).second)
        return refuse("is there twice");
      manifest.parameters.push_back({.name = tensor.name,
                                     .shape = tensor.shape,
                                     .trainable = !is_bytes,
                                     .group = "",
                                     .dtype = dtype,
                                     .states = {}});
    } else {
      const auto parameter = parameter_of.find(tensor.name);
      if (parameter == parameter_of.end()) return refuse("is a state without a parameter");
      if (!config::IsUtf8(tensor.state) || tensor.state.find('/') != std::string::npos ||
          tensor.state == kMasterClass || tensor.state == kParameterClass)
        return refuse("has a name that a checkpoint uses itself, or cannot store");
      manifest.parameters[parameter->second].states.push_back(tensor.state);
    }
    const std::string of = !tensor.state.empty()
                               ? tensor.state
                               : std::string(is_bytes ? kParameterClass : kMasterClass);
    slices.push_back(
        {.name = NameOf({.of = of, .parameter = tensor.name, .begin = 0, .end = tensor.elements()}),
         .dtype = std::string(SafetensorsName(dtype)),
         .shape = {tensor.elements()},
         .begin = 0,
         .end = tensor.elements() * SizeOf(dtype)});
  }
  return slices.empty() ? absl::InvalidArgumentError(
                              absl::StrCat("'", source.description().path, "' has no parameters"))
                        : absl::OkStatus();
}

absl::StatusOr<std::string> ImportInto(TensorSource& source, const std::string& folder,
                                       absl::FunctionRef<void(int64_t elements)> progress) {
  Manifest manifest{.state = source.description().state,
                    .run = {},
                    .config = "{}",
                    .parameters = {},
                    .files = {},
                    .trainer = {}};
  if (!source.description().model_config.empty())
    manifest.trainer[kModelConfigName] = source.description().model_config;
  std::vector<StoredTensor> slices;
  EBB_RETURN_IF_ERROR(Declare(source, manifest, slices));
  EBB_ASSIGN_OR_RETURN(NewCheckpoint checkpoint,
                       NewCheckpoint::Begin(folder, manifest.state.finished_steps));
  const std::string path = absl::StrCat(checkpoint.path(), "/", RankFileName(0, 1));
  EBB_ASSIGN_OR_RETURN(RankFileWriter file, RankFileWriter::Create(path, std::move(slices), {}));
  ThreadTeam caller_only(1);
  std::vector<std::byte> cast_bytes;
  EBB_RETURN_IF_ERROR(ForEachPiece(source, [&](size_t tensor, std::span<const float> values) {
    std::span<const std::byte> bytes = std::as_bytes(values);
    if (const DType dtype = StoredDType(source.tensors()[tensor]); dtype != DType::kFloat32) {
      cast_bytes.resize(values.size() * static_cast<size_t>(SizeOf(dtype)));
      optim::Cast(caller_only, values.data(), DType::kFloat32, cast_bytes.data(), dtype,
                  std::ssize(values), optim::Rounding::kNearest);
      bytes = cast_bytes;
    }
    const absl::Status written = file.Append(bytes);
    progress(static_cast<int64_t>(values.size()));
    return written;
  }));
  EBB_RETURN_IF_ERROR(file.Finish());
  EBB_ASSIGN_OR_RETURN(RankFileHeader written, ReadRankFileHeader(path));
  manifest.files.push_back(std::move(written.entry));
  EBB_RETURN_IF_ERROR(
      ReplaceFile(absl::StrCat(checkpoint.path(), "/", kManifestName), ToText(manifest)));
  return checkpoint.Commit(/*keep=*/0);
}

}  // namespace

absl::StatusOr<std::string> ImportCheckpoint(TensorSource& source, const std::string& folder,
                                             absl::FunctionRef<void(int64_t elements)> progress) {
  const bool is_new = !IsThere(folder);
  absl::StatusOr<std::string> imported = ImportInto(source, folder, progress);
  if (!imported.ok() && is_new) RemoveEmptyFolder(folder);
  return imported;
}

}  // namespace ebb
