#include "ebb/runtime/checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/sharding/model.h"
#include "nlohmann/json.hpp"

namespace ebb {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr const char* kMetadata = "__metadata__";

struct ElementKind {
  const char* name;
  int64_t bits;
};
constexpr ElementKind kKinds[] = {
    {"F64", 64},        {"F32", 32},    {"F16", 16},        {"BF16", 16},   {"I64", 64},
    {"I32", 32},        {"I16", 16},    {"I8", 8},          {"U64", 64},    {"U32", 32},
    {"U16", 16},        {"U8", 8},      {"BOOL", 8},        {"C64", 64},    {"F8_E4M3", 8},
    {"F8_E4M3FNUZ", 8}, {"F8_E5M2", 8}, {"F8_E5M2FNUZ", 8}, {"F8_E8M0", 8}, {"F6_E2M3", 6},
    {"F6_E3M2", 6},     {"F4", 4}};

int64_t BitsOf(std::string_view dtype) {
  for (const ElementKind& kind : kKinds)
    if (kind.name == dtype) return kind.bits;
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

// Reads a header without a tree of all its values:
//
//   level 1   {"__metadata__": {...}, "NAME": {...}, ...}
//   level 2   {"dtype": "F32", "shape": [...], "data_offsets": [...]}, or the metadata
//   level 3   a shape or offsets
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  HeaderReader(SafetensorsHeader& header, int64_t data_bytes, std::string_view path)
      : header_(header), data_bytes_(data_bytes), path_(path) {}

  const absl::Status& status() const { return status_; }
  bool is_complete() const { return complete_; }

  bool start_object(size_t) override {
    if (level_ > 1) return NotThere();
    if (++level_ == 1) return true;
    in_metadata_ = key_ == kMetadata;
    if (IsFull()) return false;
    if (in_metadata_)
      return !std::exchange(has_metadata_, true) || Fail("its header has a name twice");
    tensor_ = {};
    tensor_.name = key_;
    fields_ = 0;
    offsets_.clear();
    return true;
  }
  bool end_object() override {
    if (--level_ == 0) return complete_ = true;
    return std::exchange(in_metadata_, false) || AddTensor();
  }
  bool key(std::string& name) override {
    if (level_ == 2 && !in_metadata_) {
      const int field = name == "dtype"          ? kDtype
                        : name == "shape"        ? kShape
                        : name == "data_offsets" ? kOffsets
                                                 : 0;
      if (field == 0) return FailTensor(kOtherFields);
      if ((fields_ & field) != 0) return Fail("its header has a name twice");
      fields_ |= field;
      field_ = field;
      return true;
    }
    key_ = std::move(name);
    return true;
  }
  bool start_array(size_t) override {
    if (level_ == 3) return Fail("its header is nested too deeply");
    if (level_ != 2 || in_metadata_ || field_ == kDtype) return NotThere();
    level_ = 3;
    return true;
  }
  bool end_array() override {
    --level_;
    return true;
  }
  bool string(std::string& text) override {
    if (level_ == 2 && in_metadata_) {
      if (IsFull()) return false;
      return header_.metadata.emplace(std::move(key_), std::move(text)).second ||
             Fail("its header has a name twice");
    }
    if (level_ != 2 || field_ != kDtype) return NotThere();
    tensor_.dtype = std::move(text);
    return true;
  }
  bool number_unsigned(uint64_t value) override {
    if (level_ != 3 || value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      return NotThere();
    std::vector<int64_t>& list = field_ == kShape ? tensor_.shape : offsets_;
    if (list.size() >= (field_ == kShape ? kSafetensorsDimensionsMax : 2)) return NotThere();
    list.push_back(static_cast<int64_t>(value));
    return true;
  }
  bool number_integer(int64_t) override { return NotThere(); }
  bool number_float(double, const std::string&) override { return NotThere(); }
  bool null() override { return NotThere(); }
  bool boolean(bool) override { return NotThere(); }
  bool binary(Json::binary_t&) override { return NotThere(); }
  bool parse_error(size_t, const std::string&, const Json::exception&) override { return false; }

 private:
  enum { kDtype = 1, kShape = 2, kOffsets = 4 };
  static constexpr const char* kOtherFields =
      "it has other fields than dtype, shape and data_offsets";
  static constexpr const char* kOtherKinds =
      "its dtype is not a name, its shape is not a list, or its offsets are not a pair";

  bool Fail(std::string_view what) {
    status_ = Bad(path_, what);
    return false;
  }
  bool IsFull() {
    return header_.tensors.size() + header_.metadata.size() >= kSafetensorsEntriesMax &&
           !Fail(absl::StrCat("its header has more than ", kSafetensorsEntriesMax, " entries"));
  }
  bool FailTensor(std::string_view what) {
    const std::string& name = level_ == 1 ? key_ : tensor_.name;
    return Fail(absl::StrCat("tensor ", Shown(name), ": ", std::string(what)));
  }
  // A value of another kind than its place needs.
  bool NotThere() {
    if (level_ == 0) return false;  // incomplete
    if (in_metadata_) return Fail(absl::StrCat("its metadata ", Shown(key_), " is not a string"));
    if (level_ == 1)
      return key_ == kMetadata ? Fail("its metadata is not a JSON object")
                               : FailTensor(kOtherFields);
    if (level_ == 3 && field_ == kShape)
      return FailTensor("its shape is not a list of sizes that a file can hold");
    return FailTensor(kOtherKinds);
  }
  bool AddTensor() {
    if (fields_ != (kDtype | kShape | kOffsets)) return FailTensor(kOtherFields);
    if (offsets_.size() != 2) return FailTensor(kOtherKinds);
    int64_t bits = BitsOf(tensor_.dtype);
    if (bits == 0) return FailTensor(absl::StrCat("unknown dtype ", Shown(tensor_.dtype)));
    for (const int64_t size : tensor_.shape)
      if (__builtin_mul_overflow(bits, size, &bits))
        return FailTensor("its shape is not a list of sizes that a file can hold");
    if (bits % 8 != 0) return FailTensor("its bits do not fill whole bytes");
    const int64_t bytes = bits / 8;
    const int64_t begin = offsets_[0], end = offsets_[1];
    if (begin > end || end > data_bytes_)
      return FailTensor(
          absl::StrCat("its data is outside of the ", data_bytes_, " bytes that the file has"));
    if (end - begin != bytes)
      return FailTensor(
          absl::StrCat("it has ", end - begin, " bytes, but its shape needs ", bytes));
    tensor_.begin = begin;
    tensor_.end = end;
    header_.tensors.push_back(std::move(tensor_));
    return true;
  }

  SafetensorsHeader& header_;
  const int64_t data_bytes_;
  const std::string_view path_;
  absl::Status status_;
  int level_ = 0;
  bool complete_ = false, in_metadata_ = false, has_metadata_ = false;
  std::string key_;             // of level 1, or of the metadata
  StoredTensor tensor_;         // the one under way
  int fields_ = 0, field_ = 0;  // those of it that have come, and the one under way
  std::vector<int64_t> offsets_;
};

bool HasNameTwice(const std::vector<StoredTensor>& tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const StoredTensor& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  return std::adjacent_find(names.begin(), names.end()) != names.end();
}

}  // namespace

const StoredTensor& SafetensorsHeader::Add(std::string name, DType dtype,
                                           std::vector<int64_t> shape) {
  const int64_t begin = data_bytes(), bytes = Elements(shape) * SizeOf(dtype);
  return tensors.emplace_back(StoredTensor{.name = std::move(name),
                                           .dtype = std::string(SafetensorsName(dtype)),
                                           .shape = std::move(shape),
                                           .begin = begin,
                                           .end = begin + bytes});
}

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
  SafetensorsHeader header;
  header.data_begin = kLengthBytes + static_cast<int64_t>(text.size());
  const int64_t data_bytes = file_bytes - header.data_begin;
  if (data_bytes < 0) return Bad(path, "it ends within its header");
  HeaderReader reader(header, data_bytes, path);
  const bool parsed = Json::sax_parse(text.begin(), text.end(), &reader);
  EBB_RETURN_IF_ERROR(reader.status());
  if (!parsed || !reader.is_complete()) return Bad(path, "its header is not a JSON object");
  if (HasNameTwice(header.tensors)) return Bad(path, "its header has a name twice");
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

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(
    int descriptor, std::string_view path,
    absl::FunctionRef<void(std::span<const std::byte>)> see) {
  EBB_ASSIGN_OR_RETURN(const int64_t file_bytes, BytesOfRegularFile(descriptor, path));
  if (file_bytes < kLengthBytes) return Bad(path, absl::StrCat("it has ", file_bytes, " bytes"));
  uint64_t length = 0;
  static_assert(std::endian::native == std::endian::little);
  EBB_RETURN_IF_ERROR(ReadAt(descriptor, path, 0, std::as_writable_bytes(std::span(&length, 1))));
  if (length > static_cast<uint64_t>(kSafetensorsHeaderMax) ||
      static_cast<int64_t>(length) > file_bytes - kLengthBytes)
    return Bad(path, absl::StrCat("a header of ", length, " bytes in a file of ", file_bytes));
  std::string prefix(kLengthBytes + static_cast<size_t>(length), '\0');
  EBB_RETURN_IF_ERROR(ReadAt(descriptor, path, 0, std::as_writable_bytes(std::span(prefix))));
  see(std::as_bytes(std::span(prefix)));
  return ParseSafetensorsHeader(std::string_view(prefix).substr(kLengthBytes), file_bytes, path);
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

std::span<const std::byte> BytesAs(DType dtype, std::span<const float> values,
                                   std::vector<std::byte>& room) {
  if (dtype == DType::kFloat32) return std::as_bytes(values);
  room.resize(values.size() * static_cast<size_t>(SizeOf(dtype)));
  ThreadTeam caller_only(1);
  optim::Cast(caller_only, values.data(), DType::kFloat32, room.data(), dtype, std::ssize(values),
              optim::Rounding::kNearest);
  return room;
}

}  // namespace ebb
