// The index of a model in several files: {"metadata": {...}, "weight_map": {TENSOR: FILE, ...}}. It
// is untrusted.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace ebb {

inline constexpr int64_t kIndexBytesMax = 100'000'000;

// The file of each tensor. `path` is for messages.
absl::StatusOr<std::map<std::string, std::string>> ParseModelIndex(const std::string& text,
                                                                   const std::string& path);
std::string SafetensorsIndexText(const std::map<std::string, std::string>& file_of_tensor,
                                 int64_t tensor_bytes);

}  // namespace ebb
