// Checks one JSON value against one row of the table.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/config/keys.h"
#include "ebb/runtime/config/problems.h"
#include "nlohmann/json.hpp"

namespace ebb::config {

// Keeps the file's order, so that remarks and errors have it too.
using Json = nlohmann::ordered_json;

// Whether the row allows the value; adds a problem if not. `shown`: the key's path in the file.
bool Check(const Key& key, const Json& value, std::string_view shown, Problems& problems);

// Whether the value is in the row's `harmless`.
bool IsHarmless(const Key& key, const Json& value);

// Whether it is a whole number in the row's range, but too large for 64 bits.
bool IsTooLarge(const Key& key, const Json& value);

// Hugging Face's Trainer replaces "auto" by its own arguments. False for rows that give the word a
// meaning of their own.
bool IsAuto(const Key& key, const Json& value);

// The value that pydantic, and so DeepSpeed, makes of a value of another kind: true of "true" or 1,
// 3 of "3". Nothing: the value already has the row's kind, or cannot be converted.
std::optional<Json> Converted(const Key& key, const Json& value);

// The value as JSON, shortened, for messages.
std::string Shown(const Json& value);

// An integer, or a float such as 5e8; nothing if it has a fraction or does not fit 64 bits.
std::optional<int64_t> ToInteger(const Json& value);
// An integer, or a text for ParseBytes.
std::optional<int64_t> ToBytes(const Json& value);
// Every spelling that ToDType takes; each is also allowed after "torch.".
struct DTypeSpellings {
  DType dtype;
  std::string_view words;  // "a|b"
};
inline constexpr DTypeSpellings kDTypes[] = {{DType::kFloat32, "fp32|float32|float"},
                                             {DType::kBFloat16, "bf16|bfloat16"},
                                             {DType::kFloat16, "fp16|float16|half"}};
// "bf16", "bfloat16", "torch.bfloat16", ... in any case; never int8.
std::optional<DType> ToDType(std::string_view text);
// The word of the list that equals `text`, ignoring case; "" if none.
std::string_view FindWord(std::string_view list_with_bars, std::string_view text);

}  // namespace ebb::config
