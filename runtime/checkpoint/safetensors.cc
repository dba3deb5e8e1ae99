#include "ebb/runtime/checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/json_text.h"
#include "ebb/runtime/config/status_macros.h"
#include "nlohmann/json.hpp"

namespace ebb {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr const char* kMetadata = "__metadata__";

struct ElementKind {
  const char* name;
  int64_t bytes;
};
constexpr ElementKind kKinds[] = {{"F64", 8},  {"F32", 4},     {"F16", 2},    {"BF16", 2},
                                  {"I64", 8},  {"I32", 4},     {"I16", 2},    {"I8", 1},
                                  {"U64", 8},  {"U32", 4},     {"U16", 2},    {"U8", 1},
                                  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};

int64_t BytesOf(std::string_view dtype) {
  for (const ElementKind& kind : kKinds)
    if (kind.name == dtype) return kind.bytes;
  return 0;
}

absl::Status Bad(std::string_view path, std::string_view what) {
  return absl::DataLossError(absl::StrCat(
      "'", std::string(path), "' is not a complete safetensors file: ", std::string(what)));
}

// A name as a message may show it.
std::string Shown(std::string_view name) {
  constexpr size_t kShown = 100;
  std::string shown = Json(std::string(name.substr(0, kShown)))
                          .dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  return name.size() > kShown ? shown + " ..." : shown;
}

std::optional<int64_t> AsCount(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t count = value.get<uint64_t>();
  if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return static_cast<int64_t>(count);
}

absl::StatusOr<StoredTensor> ParseTensor(const std::string& name, const Json& entry,
                                         int64_t data_bytes, std::string_view path) {
  const auto bad = [&](std::string_view what) {
    return Bad(path, absl::StrCat("tensor ", Shown(name), ": ", std::string(what)));
  };
  if (!entry.is_object() || entry.size() != 3 || !entry.contains("dtype") ||
      !entry.contains("shape") || !entry.contains("data_offsets"))
    return bad("it has other fields than dtype, shape and data_offsets");
  const Json &dtype = entry["dtype"], &shape = entry["shape"], &offsets = entry["data_offsets"];
  if (!dtype.is_string() || !shape.is_array() || !offsets.is_array() || offsets.size() != 2)
    return bad("its dtype is not a name, its shape is not a list, or its offsets are not a pair");
  StoredTensor tensor{.name = name, .dtype = dtype.get<std::string>(), .shape = {}};
  const int64_t element = BytesOf(tensor.dtype);
  if (element == 0) return bad(absl::StrCat("unknown dtype ", Shown(tensor.dtype)));
  int64_t bytes = element;
  for (const Json& dimension : shape) {
    const std::optional<int64_t> size = AsCount(dimension);
    if (!size || __builtin_mul_overflow(bytes, *size, &bytes))
      return bad("its shape is not a list of sizes that a file can hold");
    tensor.shape.push_back(*size);
  }
  const std::optional<int64_t> begin = AsCount(offsets[0]), end = AsCount(offsets[1]);
  if (!begin || !end || *begin > *end || *end > data_bytes)
    return bad(absl::StrCat("its data is outside of the ", data_bytes, " bytes that the file has"));
  if (*end - *begin != bytes)
    return bad(absl::StrCat("it has ", *end - *begin, " bytes, but its shape needs ", bytes));
  tensor.begin = *begin;
  tensor.end = *end;
  return tensor;
}

}  // namespace

std::string_view SafetensorsName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat16:
      return "F16";
    case DType::kInt8:
      return "U8";
  }
  return "";
}

std::optional<DType> DTypeOfSafetensors(std::string_view name) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8})
    if (SafetensorsName(dtype) == name) return dtype;
  return std::nullopt;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text, int64_t file_bytes,
                                                         std::string_view path) {
  const absl::StatusOr<Json> parsed = ParseJsonObject(text, /*levels_max=*/4);
  if (!parsed.ok()) return Bad(path, absl::StrCat("its header ", parsed.status().message()));
  const Json& json = *parsed;

  SafetensorsHeader header;
  header.data_begin = kLengthBytes + static_cast<int64_t>(text.size());
  const int64_t data_bytes = file_bytes - header.data_begin;
  if (data_bytes < 0) return Bad(path, "it ends within its header");
  for (const auto& [name, entry] : json.items()) {
    if (name == kMetadata) {
      if (!entry.is_object()) return Bad(path, "its metadata is not a JSON object");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string())
          return Bad(path, absl::StrCat("its metadata ", Shown(key), " is not a string"));
        header.metadata.emplace(key, value.get<std::string>());
      }
      continue;
    }
    EBB_ASSIGN_OR_RETURN(StoredTensor tensor, ParseTensor(name, entry, data_bytes, path));
    header.tensors.push_back(std::move(tensor));
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) {
              return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
            });
  int64_t end = 0;
  for (const StoredTensor& tensor : header.tensors) {
    if (tensor.begin != end)
      return Bad(path,
                 absl::StrCat("the data of ", Shown(tensor.name), " begins at byte ", tensor.begin,
                              ", not at ", end, ": tensors overlap, or leave a hole"));
    end = tensor.end;
  }
  if (end != data_bytes)
    return Bad(path,
               absl::StrCat("its tensors end at byte ", end, " of ", data_bytes, " bytes of data"));
  return header;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(int descriptor, std::string_view path) {
  EBB_ASSIGN_OR_RETURN(const int64_t file_bytes, BytesOfRegularFile(descriptor, path));
  if (file_bytes < kLengthBytes) return Bad(path, absl::StrCat("it has ", file_bytes, " bytes"));
  uint64_t length = 0;
  static_assert(std::endian::native == std::endian::little);
  EBB_RETURN_IF_ERROR(ReadAt(descriptor, path, 0, std::as_writable_bytes(std::span(&length, 1))));
  if (length > static_cast<uint64_t>(kSafetensorsHeaderMax) ||
      static_cast<int64_t>(length) > file_bytes - kLengthBytes)
    return Bad(path, absl::StrCat("a header of ", length, " bytes in a file of ", file_bytes));
  std::string text(static_cast<size_t>(length), '\0');
  EBB_RETURN_IF_ERROR(
      ReadAt(descriptor, path, kLengthBytes, std::as_writable_bytes(std::span(text))));
  return ParseSafetensorsHeader(text, file_bytes, path);
}

std::string SafetensorsPrefix(const SafetensorsHeader& header, int64_t alignment) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) json[kMetadata] = header.metadata;
  for (const StoredTensor& tensor : header.tensors)
    json[tensor.name] = {{"dtype", tensor.dtype},
                         {"shape", tensor.shape},
                         {"data_offsets", {tensor.begin, tensor.end}}};
  std::string text = json.dump();
  const int64_t bytes = kLengthBytes + static_cast<int64_t>(text.size());
  text.append(static_cast<size_t>((alignment - bytes % alignment) % alignment), ' ');
  const uint64_t length = text.size();
  std::string prefix(kLengthBytes, '\0');
  std::memcpy(prefix.data(), &length, sizeof(length));
  return prefix + text;
}

}  // namespace ebb
