#include "ebb/runtime/checkpoint/torch_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

using Kind = PickleValue::Kind;

constexpr std::string_view kTensor = "torch._utils._rebuild_tensor_v2",
                           kParameter = "torch._utils._rebuild_parameter", kSize = "torch.Size",
                           kPickle = "/data.pkl";
constexpr std::string_view kZipBegin = "PK\x03\x04";
// Older files are a sequence of pickles. The first is a number: protocol 2, a LONG1 of 10 bytes.
constexpr std::string_view kOldBegin = "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";

struct Storage {
  std::string_view name;
  int64_t bytes;  // of an element
  std::optional<DType> dtype;
};
constexpr Storage kStorages[] = {
    {"torch.FloatStorage", 4, DType::kFloat32}, {"torch.BFloat16Storage", 2, DType::kBFloat16},
    {"torch.HalfStorage", 2, DType::kFloat16},  {"torch.DoubleStorage", 8, std::nullopt},
    {"torch.LongStorage", 8, std::nullopt},     {"torch.IntStorage", 4, std::nullopt},
    {"torch.ShortStorage", 2, std::nullopt},    {"torch.CharStorage", 1, std::nullopt},
    {"torch.ByteStorage", 1, std::nullopt},     {"torch.BoolStorage", 1, std::nullopt}};

const Storage* FindStorage(std::string_view name) {
  const auto found = std::find_if(std::begin(kStorages), std::end(kStorages),
                                  [&](const Storage& storage) { return storage.name == name; });
  return found == std::end(kStorages) ? nullptr : &*found;
}

bool IsOfTensors(std::string_view global) {
  return global == kTensor || global == kParameter || global == kSize ||
         global == "collections.OrderedDict" || FindStorage(global) != nullptr;
}

std::string FirstBytes(int descriptor, const std::string& path, size_t count) {
  std::string bytes(count, '\0');
  const absl::StatusOr<int64_t> size = BytesOfRegularFile(descriptor, path);
  if (!size.ok()) return "";
  bytes.resize(std::min(count, static_cast<size_t>(*size)));
  if (!ReadAt(descriptor, path, 0, std::as_writable_bytes(std::span(bytes))).ok()) return "";
  return bytes;
}

absl::StatusOr<std::string> ReadEntry(int descriptor, const std::string& path,
                                      const ZipEntry& entry) {
  std::string bytes(static_cast<size_t>(entry.bytes), '\0');
  EBB_RETURN_IF_ERROR(
      ReadAt(descriptor, path, entry.begin, std::as_writable_bytes(std::span(bytes))));
  return bytes;
}

}  // namespace

TorchFile::TorchFile(std::string path, FileHandle file, std::map<std::string, ZipEntry> entries,
                     std::string folder, Pickle pickle)
    : path_(std::move(path)),
      file_(std::move(file)),
      entries_(std::move(entries)),
      folder_(std::move(folder)),
      pickle_(std::move(pickle)) {}

absl::StatusOr<TorchFile> TorchFile::Open(const std::string& path, TorchGlobals globals) {
  EBB_ASSIGN_OR_RETURN(FileHandle file, OpenToRead(path));
  return Read(std::move(file), path, globals);
}

absl::StatusOr<TorchFile> TorchFile::Read(FileHandle file, const std::string& path,
                                          TorchGlobals globals) {
  if (FirstBytes(file.get(), path, kOldBegin.size()) == kOldBegin) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path,
                     "' is a file of torch before 1.6, which is not read: load it with torch and "
                     "save it again"));
  }
  EBB_ASSIGN_OR_RETURN(auto entries, ReadZipEntries(file.get(), path));
  std::string folder;
  for (const auto& [name, entry] : entries) {
    const size_t slash = name.find('/');
    if (slash == std::string::npos || name.substr(slash) != kPickle) continue;
    if (!folder.empty())
      return absl::DataLossError(absl::StrCat("'", path, "' has two pickles: '", folder, "' and '",
                                              config::Shortened(name), "'"));
    folder = name.substr(0, slash);
  }
  if (folder.empty())
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "' is a zip archive, but not one that torch.save has written"));
  if (const auto order = entries.find(folder + "/byteorder"); order != entries.end()) {
    const std::string_view little = "little";
    if (std::cmp_not_equal(order->second.bytes, little.size()) ||
        ReadEntry(file.get(), path, order->second).value_or("") != little)
      return absl::InvalidArgumentError(
          absl::StrCat("'", path, "' is not little-endian: only little-endian numbers are read"));
  }
  const ZipEntry& entry = entries.at(folder + std::string(kPickle));
  if (entry.bytes > kPickleBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("the pickle of '", path, "' has ", entry.bytes,
                                                   " bytes; at most ", kPickleBytesMax,
                                                   " are read"));
  }
  EBB_ASSIGN_OR_RETURN(const std::string bytes, ReadEntry(file.get(), path, entry));
  EBB_ASSIGN_OR_RETURN(
      Pickle pickle,
      Pickle::Parse(
          bytes,
          [&](std::string_view name) { return globals == TorchGlobals::kAny || IsOfTensors(name); },
          path));
  return TorchFile(path, std::move(file), std::move(entries), std::move(folder), std::move(pickle));
}

absl::Status TorchFile::Refuse(std::string_view name, std::string_view what) const {
  return absl::InvalidArgumentError(
      absl::StrCat(config::Quoted(name), " of '", path_, "' ", std::string(what)));
}

absl::Status TorchFile::Damaged(std::string_view name, std::string_view what) const {
  return absl::DataLossError(
      absl::StrCat(config::Quoted(name), " of '", path_, "' ", std::string(what)));
}

bool TorchFile::IsTensor(const PickleValue& value) {
  return value.kind == Kind::kObject && (value.text == kTensor || value.text == kParameter);
}

absl::StatusOr<std::vector<int64_t>> TorchFile::SizesOf(const PickleValue& value,
                                                        std::string_view name) const {
  const PickleValue* list = &value;
  if (value.kind == Kind::kObject && value.text == kSize) {
    const PickleValue& arguments = pickle_[value.arguments];
    if (arguments.items.size() == 1) list = &pickle_[arguments.items[0]];
  }
  if (list->kind != Kind::kTuple && list->kind != Kind::kList)
    return Damaged(name, "has a shape that is not a list");
  std::vector<int64_t> sizes;
  int64_t elements = 1;
  for (const uint32_t item : list->items) {
    const PickleValue& size = pickle_[item];
    if (size.kind != Kind::kInt || size.integer < 0 ||
        __builtin_mul_overflow(elements, std::max<int64_t>(size.integer, 1), &elements))
      return Damaged(name, "has a shape that is not a list of sizes");
    sizes.push_back(size.integer);
  }
  return sizes;
}

absl::StatusOr<TorchTensor> TorchFile::TensorOf(const PickleValue& value,
                                                std::string_view name) const {
  const PickleValue* tensor = &value;
  if (value.kind == Kind::kObject && value.text == kParameter) {
    const PickleValue& of = pickle_[value.arguments];
    if (of.items.empty()) return Damaged(name, "is a parameter without a tensor");
    tensor = &pickle_[of.items[0]];
  }
  if (tensor->kind != Kind::kObject || tensor->text != kTensor)
    return Refuse(name, "is not a plain tensor");
  const PickleValue& arguments = pickle_[tensor->arguments];
  // storage, offset, size, stride, requires_grad, hooks
  if (arguments.items.size() < 6) return Damaged(name, "lacks a part of its description");
  const auto argument = [&](size_t i) -> const PickleValue& { return pickle_[arguments.items[i]]; };
  const PickleValue& persistent = argument(0);
  const PickleValue* const id =
      persistent.kind == Kind::kPersistent ? &pickle_[persistent.arguments] : nullptr;
  // "storage", class, key, device, elements
  if (id == nullptr || id->items.size() != 5) return Damaged(name, "has no storage");
  const PickleValue &storage_class = pickle_[id->items[1]], &key = pickle_[id->items[2]],
                    &stored = pickle_[id->items[4]];
  if (storage_class.kind != Kind::kGlobal || key.kind != Kind::kText || stored.kind != Kind::kInt)
    return Damaged(name, "has a storage without a class, a key or a size");
  const Storage* const storage = FindStorage(storage_class.text);
  if (storage == nullptr)
    return Refuse(name, absl::StrCat("has numbers of ", config::Quoted(storage_class.text),
                                     ", which are not read"));
  TorchTensor found = {.storage = storage_class.text, .dtype = storage->dtype};
  EBB_ASSIGN_OR_RETURN(found.shape, SizesOf(argument(2), name));
  EBB_ASSIGN_OR_RETURN(const std::vector<int64_t> strides, SizesOf(argument(3), name));
  const PickleValue& offset = argument(1);
  if (strides.size() != found.shape.size() || offset.kind != Kind::kInt || offset.integer < 0)
    return Damaged(name, "has impossible strides or an impossible offset");
  int64_t elements = 1;
  for (size_t d = found.shape.size(); d-- > 0;) {
    if (found.shape[d] > 1 && strides[d] != elements && elements > 0)
      return Refuse(name, "is not stored in row-major order: save tensor.contiguous()");
    elements *= found.shape[d];
  }
  const auto entry = entries_.find(absl::StrCat(folder_, "/data/", key.text));
  if (entry == entries_.end())
    return Damaged(
        name, absl::StrCat("has the storage ", config::Quoted(key.text), ", which the file lacks"));
  int64_t bytes = 0;
  if (stored.integer < 0 || __builtin_mul_overflow(stored.integer, storage->bytes, &bytes) ||
      bytes != entry->second.bytes || offset.integer > stored.integer ||
      elements > stored.integer - offset.integer)
    return Damaged(name, "is larger than its storage");
  found.at = entry->second.begin + offset.integer * storage->bytes;
  return found;
}

absl::StatusOr<double> TorchFile::NumberOf(const PickleValue& value, std::string_view name) const {
  if (value.kind == Kind::kInt) return static_cast<double>(value.integer);
  if (value.kind == Kind::kFloat) return value.real;
  if (!IsTensor(value)) return Refuse(name, "is not a number");
  EBB_ASSIGN_OR_RETURN(const TorchTensor tensor, TensorOf(value, name));
  int64_t elements = 1;
  for (const int64_t size : tensor.shape) elements *= size;
  if (elements != 1) return Refuse(name, "is not a single number");
  const auto read = [&](auto number) -> absl::StatusOr<double> {
    EBB_RETURN_IF_ERROR(
        ReadAt(file_.get(), path_, tensor.at, std::as_writable_bytes(std::span(&number, 1))));
    return static_cast<double>(number);
  };
  if (tensor.storage == "torch.FloatStorage") return read(float{});
  if (tensor.storage == "torch.DoubleStorage") return read(double{});
  if (tensor.storage == "torch.LongStorage") return read(int64_t{});
  if (tensor.storage == "torch.IntStorage") return read(int32_t{});
  return Refuse(name, absl::StrCat("is a number of ", tensor.storage, ", which is not read"));
}

bool LooksLikeTorchFile(const std::string& path) {
  const absl::StatusOr<FileHandle> file = OpenToRead(path);
  if (!file.ok()) return false;
  const std::string begin = FirstBytes(file->get(), path, kOldBegin.size());
  return begin.starts_with(kZipBegin) || begin == kOldBegin;
}

}  // namespace ebb
