#include "ebb/runtime/checkpoint/config_differences.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace ebb {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kTrained[] = {
    "train_batch_size", "gradient_clipping",       "data_types.grad_accum_dtype", "optimizer.",
    "scheduler.",       "ebb.stochastic_rounding", "ebb.parameter_groups."};
constexpr std::string_view kOfDType[] = {"fp16.", "bf16."};

template <size_t kCount>
bool IsOneOf(const std::string& key, const std::string_view (&begins)[kCount]) {
  return std::any_of(std::begin(begins), std::end(begins),
                     [&](std::string_view begin) { return key.starts_with(begin); });
}

void AddValues(const Json& json, const std::string& path, std::map<std::string, Json>& values) {
  if (!json.is_object()) {
    values[path] = json;
    return;
  }
  for (const auto& [key, value] : json.items())
    AddValues(value, path.empty() ? key : absl::StrCat(path, ".", key), values);
}

std::map<std::string, Json> ValuesOf(const Config& config) {
  std::map<std::string, Json> values;
  AddValues(Json::parse(config.ToJson()), "", values);
  return values;
}

}  // namespace

std::vector<std::string> ConfigDifferences(const Config& a, const Config& b) {
  std::vector<std::string> keys;
  if (a.compute != b.compute) keys.emplace_back("dtype");
  if (b.gradient_accumulation_steps > 1 && a.reduces_at_round() != b.reduces_at_round())
    keys.emplace_back("ebb.reduce_at");
  std::map<std::string, Json> of_a = ValuesOf(a);
  const std::map<std::string, Json> of_b = ValuesOf(b);
  for (const auto& [key, value] : of_b) of_a.try_emplace(key);  // null: not given
  for (const auto& [key, value] : of_a) {
    if (!IsOneOf(key, kTrained) && (a.compute != b.compute || !IsOneOf(key, kOfDType))) continue;
    const auto other = of_b.find(key);
    if ((other == of_b.end() ? Json() : other->second) != value) keys.push_back(key);
  }
  return keys;
}

}  // namespace ebb
