#include "ebb/runtime/checkpoint/json_text.h"

#include <set>
#include <string>
#include <vector>

namespace ebb {

absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, int levels_max) {
  using Json = nlohmann::json;
  std::vector<std::set<std::string>> keys;
  bool twice = false, deep = false;
  int64_t values = 0;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    // The tree keeps nothing of what is beyond the limits.
    deep |= depth > levels_max;
    if (depth > levels_max || ++values > kJsonValuesMax) return false;
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end && !keys.empty()) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.empty())
      twice |= !keys.back().insert(parsed.get<std::string>()).second;
    return true;
  };
  Json json = Json::parse(text.begin(), text.end(), watch, /*allow_exceptions=*/false);
  if (values > kJsonValuesMax) return absl::DataLossError("has too many values");
  if (json.is_discarded() || !json.is_object()) return absl::DataLossError("is not a JSON object");
  if (deep) return absl::DataLossError("is nested too deeply");
  if (twice) return absl::DataLossError("has a name twice");
  return json;
}

}  // namespace ebb
