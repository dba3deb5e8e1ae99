#include "ebb/runtime/checkpoint/manifest.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/base/encoding.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/json_text.h"
#include "ebb/sharding/split.h"
#include "nlohmann/json.hpp"

namespace ebb {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr char kFormat[] = "ebb-checkpoint";
constexpr std::string_view kChecksumField = "\"checksum\": \"";
constexpr std::string_view kNoChecksum = "0000000000000000";
constexpr int64_t kRanksMax = 1 << 20;

// Fields of untrusted objects. Keeps the first error.
class Fields {
 public:
  explicit Fields(const std::string& path) : path_(path) {}

  const absl::Status& status() const { return status_; }
  void Fail(std::string_view what) {
    if (status_.ok())
      status_ = absl::DataLossError(absl::StrCat(
          "'", path_, "' is not a manifest that this version reads: ", std::string(what)));
  }
  const Json& At(const Json& object, const char* key) {
    static const Json kNothing;
    if (object.is_object() && object.contains(key)) return object[key];
    Fail(absl::StrCat("it lacks \"", key, "\""));
    return kNothing;
  }
  const Json& List(const Json& object, const char* key) {
    static const Json kEmpty = Json::array();
    const Json& list = At(object, key);
    if (list.is_array()) return list;
    Fail(absl::StrCat("\"", key, "\" is not a list"));
    return kEmpty;
  }
  std::string Text(const Json& object, const char* key) { return TextOf(At(object, key), key); }
  int64_t Count(const Json& object, const char* key) { return CountOf(At(object, key), key); }
  double Number(const Json& object, const char* key) {
    const Json& value = At(object, key);
    if (value.is_number()) return value.get<double>();
    Fail(absl::StrCat("\"", key, "\" is not a number"));
    return 0;
  }
  // Values that have no key of their own.
  std::string TextOf(const Json& value, const char* key) {
    if (value.is_string()) return value.get<std::string>();
    Fail(absl::StrCat("\"", key, "\" is not a string"));
    return "";
  }
  int64_t CountOf(const Json& value, const char* key) {
    if (value.is_number_unsigned() &&
        value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      return static_cast<int64_t>(value.get<uint64_t>());
    Fail(absl::StrCat("\"", key, "\" is not a count"));
    return 0;
  }

 private:
  const std::string& path_;
  absl::Status status_;
};

std::vector<uint64_t> ParseSlices(Fields& fields, const Json& file) {
  constexpr const char* kKey = "slice_checksums";
  std::vector<uint64_t> slices;
  if (!file.is_object() || !file.contains(kKey)) return slices;
  const std::string text = fields.Text(file, kKey);
  for (size_t at = 0; at < text.size(); at += kNoChecksum.size()) {
    const std::optional<uint64_t> sum =
        ParseChecksum(std::string_view(text).substr(at, kNoChecksum.size()));
    if (!sum) fields.Fail(absl::StrCat("\"", kKey, "\" is not 16 digits a slice"));
    slices.push_back(sum.value_or(0));
  }
  return slices;
}

DType ParseDType(Fields& fields, const std::string& name) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8})
    if (Name(dtype) == name) return dtype;
  fields.Fail(absl::StrCat("a parameter has an unknown dtype"));
  return DType::kFloat32;
}

std::vector<int64_t> ParseSizes(Fields& fields, const Json& json, const char* key) {
  std::vector<int64_t> sizes;
  int64_t sum = 0;
  for (const Json& size : fields.List(json, key)) {
    sizes.push_back(fields.CountOf(size, key));
    if (sizes.back() < 1 || __builtin_add_overflow(sum, sizes.back(), &sum))
      fields.Fail(absl::StrCat("\"", key, "\" is not a list of sizes"));
    if (!fields.status().ok()) break;
  }
  return sizes;
}

void ParseSplit(Fields& fields, const Json& json, Manifest::Parameter& parameter) {
  const int64_t ranks = fields.Count(json, "ranks"), dimension = fields.Count(json, "dimension");
  Split& split = parameter.split;
  split.parts = ParseSizes(fields, json, "parts");
  split.multiple = fields.Count(json, "multiple");
  split.sizes = ParseSizes(fields, json, "sizes");
  if (!fields.status().ok()) return;
  if (ranks < 2 || ranks > kRanksMax || dimension >= std::ssize(parameter.shape))
    return fields.Fail("a parameter is split over other ranks or dimensions than it can be");
  split.dimension = static_cast<int>(dimension);
  parameter.blocks = static_cast<int>(ranks);
  ParameterSpec whole;
  whole.shape = parameter.shape;
  whole.split = split;
  const absl::Status fits = CheckSplit(whole, parameter.blocks);
  if (!fits.ok()) fields.Fail(std::string(fits.message()));
}

Json SplitOf(const Manifest::Parameter& parameter) {
  const Split& split = parameter.split;
  return {{"ranks", parameter.blocks},
          {"dimension", split.dimension},
          {"parts", split.parts},
          {"multiple", split.multiple},
          {"sizes", split.sizes}};
}

// The oldest that has all that the manifest says.
int VersionOf(const Manifest& manifest) {
  const bool cut =
      std::any_of(manifest.parameters.begin(), manifest.parameters.end(),
                  [](const Manifest::Parameter& parameter) { return parameter.blocks > 1; });
  return cut ? 3 : manifest.state_encodings.empty() ? 1 : 2;
}

Manifest::Parameter ParseParameter(Fields& fields, const Json& json) {
  Manifest::Parameter parameter{.name = fields.Text(json, "name")};
  int64_t elements = 1;
  for (const Json& dimension : fields.List(json, "shape")) {
    const int64_t size = fields.CountOf(dimension, "shape");
    if (size < 1 || __builtin_mul_overflow(elements, size, &elements) ||
        elements > int64_t{1} << 53)
      fields.Fail("a parameter has a shape that is not a list of sizes");
    parameter.shape.push_back(size);
  }
  const Json& trainable = fields.At(json, "trainable");
  if (!trainable.is_boolean()) fields.Fail("\"trainable\" is neither true nor false");
  parameter.trainable = trainable.is_boolean() && trainable.get<bool>();
  parameter.group = fields.Text(json, "group");
  parameter.dtype = ParseDType(fields, fields.Text(json, "dtype"));
  for (const Json& state : fields.List(json, "states"))
    parameter.states.push_back(fields.TextOf(state, "states"));
  if (json.contains("split")) ParseSplit(fields, json["split"], parameter);
  return parameter;
}

absl::Status CheckVersion(const Json& json, const std::string& path) {
  const auto version = json.find("version");
  if (version == json.end() || !version->is_number_unsigned() ||
      (version->get<uint64_t>() >= 1 && version->get<uint64_t>() <= uint64_t{kCheckpointVersion}))
    return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("'", path, "' has version ", version->get<uint64_t>(), ", this is version ",
                   kCheckpointVersion, ": read it with the Ebb that wrote it"));
}

}  // namespace

std::string ChecksumText(uint64_t checksum) {
  return absl::StrFormat("%016x", checksum);
}

std::optional<uint64_t> ParseChecksum(std::string_view text) {
  uint64_t checksum = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), checksum, 16);
  if (error != std::errc() || ChecksumText(checksum) != text) return std::nullopt;
  return checksum;
}

std::string ToText(const Manifest& manifest) {
  OrderedJson json;
  json["format"] = kFormat;
  json["version"] = VersionOf(manifest);
  json["checksum"] = kNoChecksum;
  if (!manifest.run.empty()) json["run"] = manifest.run;
  if (manifest.reduction_group > 0) json["reduction_group"] = manifest.reduction_group;
  const TrainingState& state = manifest.state;
  json["training_state"] = {{"finished_steps", state.finished_steps},
                            {"applied_steps", state.applied_steps},
                            {"skipped_steps", state.skipped_steps},
                            {"loss_scaler",
                             {{"scale", state.loss_scaler.scale},
                              {"clean_steps", state.loss_scaler.clean_steps},
                              {"hysteresis_left", state.loss_scaler.hysteresis_left}}}};
  OrderedJson& trainer = json["trainer"] = Json::object();
  for (const auto& [name, bytes] : manifest.trainer) trainer[name] = absl::Base64Escape(bytes);
  OrderedJson& files = json["files"] = Json::array();
  for (const Manifest::File& file : manifest.files) {
    std::string slices;
    for (const uint64_t checksum : file.slice_checksums) slices += ChecksumText(checksum);
    files.push_back({{"bytes", file.bytes},
                     {"header_checksum", ChecksumText(file.header_checksum)},
                     {"slice_checksums", std::move(slices)}});
  }
  OrderedJson& parameters = json["parameters"] = Json::array();
  for (const Manifest::Parameter& parameter : manifest.parameters) {
    parameters.push_back({{"name", parameter.name},
                          {"shape", parameter.shape},
                          {"trainable", parameter.trainable},
                          {"group", parameter.group},
                          {"dtype", Name(parameter.dtype)},
                          {"states", parameter.states}});
    if (parameter.blocks > 1) parameters.back()["split"] = SplitOf(parameter);
  }
  if (!manifest.state_encodings.empty()) json["state_encodings"] = manifest.state_encodings;
  json["config"] = manifest.config;
  std::string text =
      json.dump(1, ' ', /*ensure_ascii=*/false, OrderedJson::error_handler_t::replace) + "\n";
  const std::string checksum = ChecksumText(optim::Checksum(std::as_bytes(std::span(text))));
  return text.replace(text.find(kChecksumField) + kChecksumField.size(), checksum.size(), checksum);
}

absl::StatusOr<Manifest> ParseManifest(const std::string& text, const std::string& path) {
  Fields fields(path);
  const absl::StatusOr<Json> parsed = ParseJsonObject(text, /*levels_max=*/8);
  // The version is checked first, because another version may have another checksum.
  if (parsed.ok()) EBB_RETURN_IF_ERROR(CheckVersion(*parsed, path));
  const size_t field = text.find(kChecksumField);
  const size_t digits = field + kChecksumField.size();
  const std::optional<uint64_t> checksum =
      field == std::string::npos
          ? std::nullopt
          : ParseChecksum(std::string_view(text).substr(digits, kNoChecksum.size()));
  if (!checksum) {
    fields.Fail("it has no checksum");
  } else {
    optim::RunningChecksum sum;
    for (const std::string_view part : {std::string_view(text).substr(0, digits), kNoChecksum,
                                        std::string_view(text).substr(digits + kNoChecksum.size())})
      sum.Append(std::as_bytes(std::span(part)));
    if (sum.Take() != *checksum)
      fields.Fail("it has changed since it was written (its checksum differs)");
  }
  EBB_RETURN_IF_ERROR(fields.status());
  if (!parsed.ok()) fields.Fail(absl::StrCat("it ", parsed.status().message()));
  EBB_RETURN_IF_ERROR(fields.status());
  const Json& json = *parsed;
  if (fields.Text(json, "format") != kFormat) fields.Fail("another format");
  fields.Count(json, "version");
  EBB_RETURN_IF_ERROR(fields.status());

  Manifest manifest;
  const Json& state = fields.At(json, "training_state");
  const Json& scaler = fields.At(state, "loss_scaler");
  manifest.state = {.finished_steps = fields.Count(state, "finished_steps"),
                    .applied_steps = fields.Count(state, "applied_steps"),
                    .skipped_steps = fields.Count(state, "skipped_steps"),
                    .loss_scaler = {.scale = fields.Number(scaler, "scale"),
                                    .clean_steps = fields.Count(scaler, "clean_steps"),
                                    .hysteresis_left = fields.Count(scaler, "hysteresis_left")}};
  if (fields.status().ok())
    if (const absl::Status valid = Validate(manifest.state); !valid.ok())
      fields.Fail(valid.ToString());
  if (json.contains("run")) manifest.run = fields.Text(json, "run");
  if (json.contains("reduction_group"))
    manifest.reduction_group = fields.Count(json, "reduction_group");
  const Json& trainer = fields.At(json, "trainer");
  if (!trainer.is_object()) fields.Fail("\"trainer\" is not an object");
  for (const auto& [name, bytes] : trainer.items()) {
    if (!absl::Base64Unescape(fields.TextOf(bytes, "trainer"), &manifest.trainer[name]))
      fields.Fail("a value of the trainer is not in base64");
  }
  for (const Json& file : fields.List(json, "files")) {
    const std::optional<uint64_t> header = ParseChecksum(fields.Text(file, "header_checksum"));
    if (!header) fields.Fail("\"header_checksum\" is not 16 digits");
    manifest.files.push_back({.bytes = fields.Count(file, "bytes"),
                              .header_checksum = header.value_or(0),
                              .slice_checksums = ParseSlices(fields, file)});
  }
  if (manifest.files.empty() || static_cast<int64_t>(manifest.files.size()) > kRanksMax)
    fields.Fail("it names no files");
  std::set<std::string_view> names;
  const Json& parameters = fields.List(json, "parameters");
  manifest.parameters.reserve(parameters.size());
  for (const Json& parameter : parameters) {
    manifest.parameters.push_back(ParseParameter(fields, parameter));
    if (manifest.parameters.back().blocks > std::ssize(manifest.files))
      fields.Fail("a parameter has more blocks than there are files");
    if (!names.insert(manifest.parameters.back().name).second)
      fields.Fail("a parameter is named twice");
    if (!fields.status().ok()) break;
  }
  if (json.contains("state_encodings")) {
    if (!fields.At(json, "state_encodings").is_object() || fields.Count(json, "version") < 2)
      fields.Fail("\"state_encodings\" is not an object of a version with states in blocks");
    EBB_RETURN_IF_ERROR(fields.status());
    for (const auto& [of, encoding] : fields.At(json, "state_encodings").items()) {
      std::string& name = manifest.state_encodings[of];
      name = fields.TextOf(encoding, "state_encodings");
      if (name != Name(kDynamic8) && name != Name(kDynamicUnsigned8))
        fields.Fail("a state has an unknown encoding");
    }
  }
  manifest.config = fields.Text(json, "config");
  EBB_RETURN_IF_ERROR(fields.status());
  return manifest;
}

bool HasManifest(const std::string& folder) {
  return IsThere(folder + "/" + kManifestName);
}

absl::StatusOr<Manifest> ReadManifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  EBB_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kManifestBytesMax));
  return ParseManifest(text, path);
}

}  // namespace ebb
