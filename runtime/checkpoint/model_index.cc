#include "ebb/runtime/checkpoint/model_index.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/json_text.h"
#include "ebb/runtime/config/message.h"
#include "nlohmann/json.hpp"

namespace ebb {
namespace {

using Json = nlohmann::json;

constexpr char kEnding[] = ".safetensors";

}  // namespace

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

}  // namespace ebb
