#include "ebb/runtime/checkpoint/model_files.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/json_text.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/device/thread_team.h"
#include "nlohmann/json.hpp"

namespace ebb {
namespace {

using Json = nlohmann::json;

constexpr int64_t kModelConfigBytesMax = int64_t{1} << 20;
constexpr char kModelConfig[] = "config.json", kEnding[] = ".safetensors";

// `dtype`: the format's name.
std::string WhyLeftOut(const std::string& dtype) {
  const bool may_be_parameter = dtype.starts_with("F") || dtype == "I8" || dtype == "U8";
  return may_be_parameter ? absl::StrCat(dtype, ", not F32, BF16 or F16") : "no parameter";
}

// Adds the tensors of a file: all, or those that the index has for it.
absl::Status AddFile(RawTensors& tensors, const std::string& path,
                     const std::set<std::string>* wanted) {
  EBB_ASSIGN_OR_RETURN(const FileHandle file, OpenToRead(path));
  EBB_ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadSafetensorsHeader(file.get(), path));
  tensors.BeginFile(path);
  size_t found = 0;
  for (const StoredTensor& tensor : header.tensors) {
    if (wanted != nullptr && !wanted->contains(tensor.name)) continue;
    ++found;
    const std::optional<DType> dtype = DTypeOfSafetensors(tensor.dtype);
    if (!dtype) {
      tensors.LeaveOut(tensor.name, WhyLeftOut(tensor.dtype));
      continue;
    }
    tensors.Add({.name = tensor.name, .dtype = *dtype, .shape = tensor.shape},
                header.data_begin + tensor.begin);
  }
  if (wanted == nullptr || found == wanted->size()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("'", path, "' has ", found, " of the ", wanted->size(),
                                          " tensors that the index has for it: fetch both again"));
}

bool IsFolder(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

bool HasEither(const std::string& folder, const std::string& file, const std::string& index) {
  return IsThere(absl::StrCat(folder, "/", file)) || IsThere(absl::StrCat(folder, "/", index));
}

// Whether the file begins like one of torch.save: a zip archive, or before torch 1.6 a pickle.
bool IsTorchFile(const std::string& path) {
  const absl::StatusOr<FileHandle> file = OpenToRead(path);
  if (!file.ok()) return false;
  std::string begin(4, '\0');
  const bool read = ReadAt(file->get(), path, 0, std::as_writable_bytes(std::span(begin))).ok();
  return read && (begin == "PK\x03\x04" || begin == "\x80\x02\x8a\x0a");
}

absl::StatusOr<std::unique_ptr<TensorSource>> TensorsOfTorch(const nlohmann::json& json) {
  SourceDescription about = {.kind = json.at("kind"), .path = json.at("path")};
  if (json.at("is_model")) {
    EBB_ASSIGN_OR_RETURN(about.model_config, ModelConfigBeside(about.path));
  }
  auto tensors = std::make_unique<RawTensors>(std::move(about));
  std::string file;
  for (const nlohmann::json& tensor : json.at("tensors")) {
    const std::optional<DType> dtype = DTypeOfSafetensors(tensor.at("dtype").get<std::string>());
    if (!dtype) return absl::DataLossError("a tensor has an unknown dtype");
    if (tensor.at("file") != file) tensors->BeginFile(file = tensor.at("file"));
    tensors->Add({.name = tensor.at("name"),
                  .state = tensor.at("state"),
                  .dtype = *dtype,
                  .shape = tensor.at("shape")},
                 tensor.at("at"));
  }
  for (const nlohmann::json& tensor : json.at("left_out"))
    tensors->LeaveOut(tensor.at("name"), tensor.at("why"));
  const nlohmann::json& given = json.at("state");
  TrainingState state = {.applied_steps = given.value("applied_steps", int64_t{0}),
                         .skipped_steps = given.value("skipped_steps", int64_t{0})};
  state.finished_steps = state.applied_steps + state.skipped_steps;
  state.loss_scaler = {.scale = given.value("scale", state.loss_scaler.scale),
                       .clean_steps = given.value("clean_steps", int64_t{0}),
                       .hysteresis_left = given.value("hysteresis_left", int64_t{0})};
  if (const absl::Status valid = Validate(state); !valid.ok())
    return absl::InvalidArgumentError(absl::StrCat("'", tensors->description().path,
                                                   "' has impossible steps: ", valid.message()));
  tensors->SetState(state);
  return tensors;
}

}  // namespace

void RawTensors::Add(TensorInfo tensor, int64_t at) {
  tensors_.push_back(std::move(tensor));
  places_.push_back({.file = paths_.size() - 1, .at = at});
}

absl::Status RawTensors::Read(size_t tensor, int64_t begin, std::span<float> values) {
  const TensorInfo& info = tensors_[tensor];
  const Place& place = places_[tensor];
  if (begin < 0 || begin + static_cast<int64_t>(values.size()) > info.elements())
    return absl::InvalidArgumentError(absl::StrCat("values beyond the end of ", Described(info)));
  const std::string& path = paths_[place.file];
  if (open_ != place.file) {
    open_ = kNone;
    EBB_ASSIGN_OR_RETURN(file_, OpenToRead(path));
    open_ = place.file;
  }
  const int64_t size = SizeOf(info.dtype);
  int64_t at = place.at + begin * size;
  if (info.dtype == DType::kFloat32)
    return ReadAt(file_.get(), path, at, std::as_writable_bytes(values));
  constexpr size_t kReadBytes = size_t{4} << 20;
  ThreadTeam caller_only(1);
  while (!values.empty()) {
    const size_t count = std::min(values.size(), kReadBytes / static_cast<size_t>(size));
    cast_.resize(count * static_cast<size_t>(size));
    EBB_RETURN_IF_ERROR(ReadAt(file_.get(), path, at, cast_));
    optim::Cast(caller_only, cast_.data(), info.dtype, values.data(), DType::kFloat32,
                static_cast<int64_t>(count), optim::Rounding::kNearest);
    values = values.subspan(count);
    at += static_cast<int64_t>(cast_.size());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, std::string>> ParseModelIndex(const std::string& text,
                                                                   const std::string& path) {
  const auto bad = [&](std::string_view what) {
    return absl::DataLossError(
        absl::StrCat("'", path, "' is not an index of a model's files: ", std::string(what)));
  };
  const absl::StatusOr<Json> parsed = ParseJsonObject(text, /*levels_max=*/16);
  if (!parsed.ok()) return bad(absl::StrCat("it ", parsed.status().message()));
  const Json& json = *parsed;
  if (!json.contains("weight_map") || !json["weight_map"].is_object())
    return bad("it has no \"weight_map\"");
  std::map<std::string, std::string> file_of_tensor;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (!name.ends_with(kEnding) || name.front() == '.' || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos || name.size() > 255)
      return bad(
          absl::StrCat("the file of ", config::Quoted(tensor), " is ",
                       config::Quoted(file.dump(-1, ' ', true, Json::error_handler_t::replace)),
                       ", not the plain name of a ", kEnding, " file beside it"));
    file_of_tensor.emplace(tensor, name);
  }
  if (file_of_tensor.empty()) return bad("it names no tensors");
  return file_of_tensor;
}

std::string SafetensorsIndexText(const std::map<std::string, std::string>& file_of_tensor,
                                 int64_t tensor_bytes) {
  return Json{{"metadata", {{"total_size", tensor_bytes}}}, {"weight_map", file_of_tensor}}.dump(
             2) +
         "\n";
}

bool HasModelFiles(const std::string& folder) {
  return HasEither(folder, kSafetensorsFile, kSafetensorsIndex);
}

bool IsForTorch(const std::string& path) {
  if (!IsFolder(path)) return IsTorchFile(path);
  return !HasModelFiles(path) &&
         (HasEither(path, "pytorch_model.bin", "pytorch_model.bin.index.json") ||
          HasEither(path, "zero", "latest_universal"));
}

absl::StatusOr<std::string> ModelConfigBeside(const std::string& path) {
  const bool is_folder = IsFolder(path);
  const std::filesystem::path folder =
      is_folder ? path : std::filesystem::path(path).parent_path().string();
  const std::string config_path = folder / kModelConfig;
  if (!IsThere(config_path)) return "";
  const auto text = ReadWholeFile(TargetOf(config_path), kModelConfigBytesMax);
  // Beside a single file it may be another program's.
  if (is_folder) EBB_RETURN_IF_ERROR(text.status());
  return text.value_or("");
}

absl::StatusOr<std::unique_ptr<TensorSource>> OpenModelFiles(const std::string& path) {
  SourceDescription about = {.kind = "safetensors files", .path = path};
  EBB_ASSIGN_OR_RETURN(about.model_config, ModelConfigBeside(path));
  const bool is_folder = IsFolder(path);
  auto tensors = std::make_unique<RawTensors>(std::move(about));
  const std::string index_path = absl::StrCat(path, "/", kSafetensorsIndex);
  const std::string one_file = is_folder ? absl::StrCat(path, "/", kSafetensorsFile) : path;
  if (IsThere(one_file) || !IsThere(index_path)) {
    EBB_RETURN_IF_ERROR(AddFile(*tensors, one_file, nullptr));
    return tensors;
  }
  EBB_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(index_path, kIndexBytesMax));
  EBB_ASSIGN_OR_RETURN(const auto file_of_tensor, ParseModelIndex(text, index_path));
  std::map<std::string, std::set<std::string>> tensors_of_file;
  for (const auto& [tensor, file] : file_of_tensor) tensors_of_file[file].insert(tensor);
  for (const auto& [file, wanted] : tensors_of_file)
    EBB_RETURN_IF_ERROR(AddFile(*tensors, absl::StrCat(path, "/", file), &wanted));
  return tensors;
}

absl::StatusOr<std::unique_ptr<TensorSource>> DescribedTensors(const std::string& line) {
  const absl::StatusOr<nlohmann::json> json = ParseJsonObject(line, /*levels_max=*/8);
  if (!json.ok()) return absl::UnimplementedError(config::Shortened(line, /*bytes_max=*/400));
  try {
    if (!json->contains("error")) return TensorsOfTorch(*json);
    const std::string text = json->at("error");
    return json->at("code") == "DATA_LOSS" ? absl::DataLossError(text)
                                           : absl::InvalidArgumentError(text);
  } catch (const nlohmann::json::exception&) {
    return absl::UnimplementedError("the package ebb is of another version");
  }
}

}  // namespace ebb
