// Files of named tensors (https://github.com/huggingface/safetensors, "Format"):
//
//   | bytes of the header: 8, little-endian | header: JSON, then blanks | data of all tensors |
//
// A header is untrusted. Sizes, offsets, dtypes and names are checked before a byte is used. The
// largest allowed header takes less than 1 GiB of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"

namespace ebb {

// The format's own limit for a header.
inline constexpr int64_t kSafetensorsHeaderMax = 100'000'000;
// Ebb's own limits, against headers of many tiny entries: tensors and entries of the metadata, and
// dimensions of a tensor.
inline constexpr size_t kSafetensorsEntriesMax = 1 << 20, kSafetensorsDimensionsMax = 64;

struct StoredTensor {
  std::string name;
  std::string dtype;  // the format's name: "F32", "BF16", "I64" ...
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes from the start of the data

  int64_t bytes() const { return end - begin; }
};

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
  int64_t data_begin = 0;  // byte of the file

  // Adds a tensor behind the others.
  const StoredTensor& Add(std::string name, DType dtype, std::vector<int64_t> shape);
  int64_t data_bytes() const { return tensors.empty() ? 0 : tensors.back().end; }
};

// The format's name of a dtype, and the reverse. Nothing for dtypes that Ebb does not have.
std::string_view SafetensorsName(DType dtype);
std::optional<DType> DTypeOfSafetensors(std::string_view name);

// `text`: the JSON. `file_bytes`: of the whole file. `path` is for messages.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text, int64_t file_bytes,
                                                         std::string_view path);
// Reads the header of an open file, with pread. A file that ends early is an error. `see` gets all
// bytes before the data.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(
    int descriptor, std::string_view path,
    absl::FunctionRef<void(std::span<const std::byte>)> see = [](std::span<const std::byte>) {});

// The bytes of a file before its data: the length, the JSON and blanks. The data begins at a
// multiple of `alignment`. If a value of the metadata changes and keeps its length, only its bytes
// change.
std::string SafetensorsPrefix(const SafetensorsHeader& header, int64_t alignment);
// The bytes of values in a dtype: of the values themselves, or in `room`.
std::span<const std::byte> BytesAs(DType dtype, std::span<const float> values,
                                   std::vector<std::byte>& room);

}  // namespace ebb
