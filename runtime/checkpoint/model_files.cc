#include "ebb/runtime/checkpoint/model_files.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/model_index.h"
#include "ebb/runtime/checkpoint/raw_tensors.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/checkpoint/torch_file.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

constexpr int64_t kModelConfigBytesMax = int64_t{1} << 20;
constexpr char kModelConfig[] = "config.json";

// `dtype`: the format's name.
std::string WhyLeftOut(const std::string& dtype) {
  const bool may_be_parameter = dtype.starts_with("F") || dtype == "I8" || dtype == "U8";
  return may_be_parameter ? absl::StrCat(dtype, ", not F32, BF16 or F16") : "no parameter";
}

// `wanted`: the index's tensors of a file; null without an index.
using Wanted = const std::set<std::string>*;
bool Wants(Wanted wanted, const std::string& name) {
  return wanted == nullptr || wanted->contains(name);
}

// Each adds the tensors of a file, and returns how many of the wanted ones it has.
absl::StatusOr<size_t> AddSafetensors(RawTensors& tensors, const std::string& path, Wanted wanted) {
  EBB_ASSIGN_OR_RETURN(const FileHandle file, OpenToRead(path));
  EBB_ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadSafetensorsHeader(file.get(), path));
  size_t found = 0;
  for (const StoredTensor& tensor : header.tensors) {
    if (!Wants(wanted, tensor.name)) continue;
    ++found;
    const std::optional<DType> dtype = DTypeOfSafetensors(tensor.dtype);
    if (!dtype) {
      tensors.LeaveOut(tensor.name, WhyLeftOut(tensor.dtype));
      continue;
    }
    tensors.Add({.name = tensor.name, .dtype = *dtype, .shape = tensor.shape},
                header.data_begin + tensor.begin);
  }
  return found;
}

absl::StatusOr<size_t> AddTorch(RawTensors& tensors, const std::string& path, Wanted wanted) {
  EBB_ASSIGN_OR_RETURN(const TorchFile file, TorchFile::Open(path, TorchGlobals::kOfTensors));
  const Pickle& pickle = file.pickle();
  if (!IsDict(pickle.root()))
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "' has no dict of tensors, as state_dict() gives one"));
  const std::vector<uint32_t>& items = pickle.root().items;
  std::set<std::string> names;
  size_t found = 0;
  for (size_t i = 0; i + 1 < items.size(); i += 2) {
    const PickleValue &key = pickle[items[i]], &value = pickle[items[i + 1]];
    if (key.kind != PickleValue::Kind::kText || !TorchFile::IsTensor(value)) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", path, "' has ", config::Quoted(key.text),
                       ", which is not a named tensor: save only the model's state_dict()"));
    }
    if (!names.insert(key.text).second)
      return absl::DataLossError(
          absl::StrCat("'", path, "' has ", config::Quoted(key.text), " twice"));
    if (!Wants(wanted, key.text)) continue;
    ++found;
    EBB_ASSIGN_OR_RETURN(const TorchTensor tensor, file.TensorOf(value, key.text));
    if (!tensor.dtype) {
      tensors.LeaveOut(key.text, "no parameter");
      continue;
    }
    tensors.Add({.name = key.text, .dtype = *tensor.dtype, .shape = tensor.shape}, tensor.at);
  }
  return found;
}

struct FileKind {
  const char* words;
  const char *file, *index, *ending;
  absl::StatusOr<size_t> (*add)(RawTensors& tensors, const std::string& path, Wanted wanted);
};
constexpr FileKind kSafetensors = {"safetensors files", kSafetensorsFile, kSafetensorsIndex,
                                   ".safetensors", AddSafetensors},
                   kTorch = {"files of torch", "pytorch_model.bin", "pytorch_model.bin.index.json",
                             ".bin", AddTorch};

absl::Status AddFile(const FileKind& kind, RawTensors& tensors, const std::string& path,
                     Wanted wanted) {
  tensors.BeginFile(path);
  EBB_ASSIGN_OR_RETURN(const size_t found, kind.add(tensors, path, wanted));
  if (wanted == nullptr || found == wanted->size()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("'", path, "' has ", found, " of the ", wanted->size(),
                                          " tensors that the index has for it: fetch both again"));
}

const FileKind* KindIn(const std::string& folder) {
  for (const FileKind* kind : {&kSafetensors, &kTorch})
    if (IsThere(absl::StrCat(folder, "/", kind->file)) ||
        IsThere(absl::StrCat(folder, "/", kind->index)))
      return kind;
  return nullptr;
}

}  // namespace

bool HasModelFiles(const std::string& folder) {
  return KindIn(folder) != nullptr;
}

absl::StatusOr<std::unique_ptr<TensorSource>> OpenModelFiles(const std::string& path) {
  SourceDescription about = {.path = path};
  std::error_code error;
  const bool is_folder = std::filesystem::is_directory(path, error);
  const std::filesystem::path folder =
      is_folder ? path : std::filesystem::path(path).parent_path().string();
  const std::string config_path = folder / kModelConfig;
  if (IsThere(config_path)) {
    const auto text = ReadWholeFile(TargetOf(config_path), kModelConfigBytesMax);
    // Beside a single file it may be another program's.
    if (is_folder) EBB_RETURN_IF_ERROR(text.status());
    about.model_config = text.value_or("");
  }
  if (!is_folder) {
    const FileKind& kind = LooksLikeTorchFile(path) ? kTorch : kSafetensors;
    about.kind = kind.words;
    auto tensors = std::make_unique<RawTensors>(std::move(about));
    EBB_RETURN_IF_ERROR(AddFile(kind, *tensors, path, nullptr));
    return tensors;
  }
  const FileKind* const found = KindIn(path);
  const FileKind& kind = found != nullptr ? *found : kSafetensors;
  about.kind = kind.words;
  auto tensors = std::make_unique<RawTensors>(std::move(about));
  const std::string index_path = absl::StrCat(path, "/", kind.index);
  const std::string one_file = absl::StrCat(path, "/", kind.file);
  if (IsThere(one_file) || !IsThere(index_path)) {
    EBB_RETURN_IF_ERROR(AddFile(kind, *tensors, one_file, nullptr));
    return tensors;
  }
  EBB_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(index_path, kIndexBytesMax));
  EBB_ASSIGN_OR_RETURN(const auto file_of_tensor, ParseModelIndex(text, index_path, kind.ending));
  std::map<std::string, std::set<std::string>> tensors_of_file;
  for (const auto& [tensor, file] : file_of_tensor) tensors_of_file[file].insert(tensor);
  for (const auto& [file, wanted] : tensors_of_file)
    EBB_RETURN_IF_ERROR(AddFile(kind, *tensors, absl::StrCat(path, "/", file), &wanted));
  return tensors;
}

}  // namespace ebb
