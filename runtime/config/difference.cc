#include "ebb/runtime/config/difference.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/config/convert.h"

namespace ebb::config {
namespace {

Json Changed(const Json& from, const Json& to) {
  Json changed = Json::object();
  for (const auto& [name, value] : to.items()) {
    const auto before = from.find(name);
    if (value.is_object()) {
      Json inner = Changed(before == from.end() ? Json::object() : *before, value);
      if (!inner.empty()) changed[name] = std::move(inner);
    } else if (before == from.end() || *before != value) {
      changed[name] = value;
    }
  }
  return changed;
}

std::string Dumped(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}
// With a space after each colon and comma.
std::string OnOneLine(const Json& object) {
  std::vector<std::string> members;
  for (const auto& [name, value] : object.items()) {
    members.push_back(
        absl::StrCat(Dumped(name), ": ", value.is_object() ? OnOneLine(value) : Dumped(value)));
  }
  return absl::StrCat("{", absl::StrJoin(members, ", "), "}");
}

}  // namespace

std::string Difference(const Config& from, const Config& to) {
  const Json changed = Changed(ToDocument(from), ToDocument(to));
  return changed.empty() ? "" : OnOneLine(changed);
}

}  // namespace ebb::config
