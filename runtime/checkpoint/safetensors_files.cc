#include "ebb/runtime/checkpoint/safetensors_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/json_text.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/status_macros.h"
#include "nlohmann/json.hpp"

namespace ebb {
namespace {

using Json = nlohmann::json;

constexpr int64_t kIndexBytesMax = kSafetensorsHeaderMax;
constexpr int64_t kModelConfigBytesMax = int64_t{1} << 20;
constexpr size_t kReadBytes = size_t{4} << 20;
constexpr char kModelConfig[] = "config.json";

bool IsThere(const std::string& path) {
  struct stat what = {};
  return lstat(path.c_str(), &what) == 0;
}

class SafetensorsFiles : public TensorSource {
 public:
  SafetensorsFiles(std::string path, std::string model_config) {
    description_ = {.kind = "safetensors files",
                    .path = std::move(path),
                    .model_config = std::move(model_config)};
  }

  // `wanted`: what the index says of this file; null without one.
  absl::Status AddFile(const std::string& path, const std::set<std::string>* wanted) {
    EBB_ASSIGN_OR_RETURN(const FileHandle file, OpenToRead(path));
    EBB_ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadSafetensorsHeader(file.get(), path));
    size_t found = 0;
    for (const StoredTensor& tensor : header.tensors) {
      if (wanted != nullptr && !wanted->contains(tensor.name)) continue;
      ++found;
      const std::optional<DType> dtype = DTypeOfSafetensors(tensor.dtype);
      if (!dtype || *dtype == DType::kInt8) {
        description_.skipped.push_back(tensor.name);
        continue;
      }
      tensors_.push_back({.name = tensor.name, .dtype = *dtype, .shape = tensor.shape});
      places_.push_back({.file = paths_.size(), .at = header.data_begin + tensor.begin});
    }
    if (wanted != nullptr && found != wanted->size()) {
      return absl::DataLossError(
          absl::StrCat("'", path, "' has ", found, " of the ", wanted->size(),
                       " tensors that the index says it has: fetch both again"));
    }
    paths_.push_back(path);
    return absl::OkStatus();
  }

  absl::Status Read(size_t tensor, int64_t begin, std::span<float> values) override {
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
    while (!values.empty()) {
      const size_t count = std::min(values.size(), kReadBytes / static_cast<size_t>(size));
      narrow_.resize(count * static_cast<size_t>(size));
      EBB_RETURN_IF_ERROR(ReadAt(file_.get(), path, at, narrow_));
      optim::Cast(caller_only_, narrow_.data(), info.dtype, values.data(), DType::kFloat32,
                  static_cast<int64_t>(count), optim::Rounding::kNearest);
      values = values.subspan(count);
      at += static_cast<int64_t>(narrow_.size());
    }
    return absl::OkStatus();
  }

 private:
  struct Place {
    size_t file = 0;
    int64_t at = 0;  // byte of it
  };
  static constexpr size_t kNone = ~size_t{0};

  std::vector<Place> places_;  // of tensors_
  std::vector<std::string> paths_;
  size_t open_ = kNone;
  FileHandle file_;
  std::vector<std::byte> narrow_;
  ThreadTeam caller_only_{1};
};

}  // namespace

bool HasSafetensors(const std::string& folder) {
  return IsThere(absl::StrCat(folder, "/", kSafetensorsFile)) ||
         IsThere(absl::StrCat(folder, "/", kSafetensorsIndex));
}

absl::StatusOr<std::map<std::string, std::string>> ParseSafetensorsIndex(const std::string& text,
                                                                         const std::string& path) {
  const auto bad = [&](std::string_view what) {
    return absl::DataLossError(
        absl::StrCat("'", path, "' is no index of safetensors files: ", std::string(what)));
  };
  const absl::StatusOr<Json> parsed = ParseJsonObject(text, /*levels_max=*/16);
  if (!parsed.ok()) return bad(absl::StrCat("it ", parsed.status().message()));
  const Json& json = *parsed;
  if (!json.contains("weight_map") || !json["weight_map"].is_object())
    return bad("it has no \"weight_map\"");
  std::map<std::string, std::string> file_of_tensor;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (!name.ends_with(".safetensors") || name.front() == '.' ||
        name.find('/') != std::string::npos || name.find('\0') != std::string::npos ||
        name.size() > 255)
      return bad(
          absl::StrCat("the file of ", config::Quoted(tensor), " is ",
                       config::Quoted(file.dump(-1, ' ', true, Json::error_handler_t::replace)),
                       ", not the plain name of a safetensors file beside it"));
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

absl::StatusOr<std::unique_ptr<TensorSource>> OpenSafetensors(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    auto files = std::make_unique<SafetensorsFiles>(path, "");
    EBB_RETURN_IF_ERROR(files->AddFile(path, nullptr));
    return files;
  }
  std::string model_config;
  const std::string config_path = absl::StrCat(path, "/", kModelConfig);
  if (IsThere(config_path)) {
    EBB_ASSIGN_OR_RETURN(model_config, ReadWholeFile(config_path, kModelConfigBytesMax));
  }
  auto files = std::make_unique<SafetensorsFiles>(path, std::move(model_config));
  const std::string index_path = absl::StrCat(path, "/", kSafetensorsIndex);
  if (!IsThere(index_path)) {
    EBB_RETURN_IF_ERROR(files->AddFile(absl::StrCat(path, "/", kSafetensorsFile), nullptr));
    return files;
  }
  EBB_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(index_path, kIndexBytesMax));
  EBB_ASSIGN_OR_RETURN(const auto file_of_tensor, ParseSafetensorsIndex(text, index_path));
  std::map<std::string, std::set<std::string>> tensors_of_file;
  for (const auto& [tensor, file] : file_of_tensor) tensors_of_file[file].insert(tensor);
  for (const auto& [file, tensors] : tensors_of_file)
    EBB_RETURN_IF_ERROR(files->AddFile(absl::StrCat(path, "/", file), &tensors));
  return files;
}

}  // namespace ebb
