#include "ebb/runtime/config/difference.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/config/convert.h"

namespace ebb::config {
namespace {

void Collect(const Json& from, const Json& to, const std::string& prefix,
             std::vector<std::string>& changed) {
  for (const auto& [name, value] : to.items()) {
    const auto before = from.find(name);
    if (value.is_object()) {
      Collect(before == from.end() ? Json::object() : *before, value,
              absl::StrCat(prefix, name, "."), changed);
    } else if (before == from.end() || *before != value) {
      changed.push_back(absl::StrCat(
          "\"", prefix, name, "\": ", value.dump(-1, ' ', false, Json::error_handler_t::replace)));
    }
  }
}

}  // namespace

std::string Difference(const Config& from, const Config& to) {
  std::vector<std::string> changed;
  Collect(ToDocument(from), ToDocument(to), "", changed);
  return absl::StrJoin(changed, ", ");
}

}  // namespace ebb::config
