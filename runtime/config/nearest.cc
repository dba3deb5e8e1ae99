#include "ebb/runtime/config/nearest.h"

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"

namespace ebb::config {
namespace {

constexpr int kOtherBlock = 2;        // edits that a key of another block is further away
constexpr size_t kNameBytesMax = 96;  // twice the longest name of the table

}  // namespace

// Optimal string alignment (Damerau-Levenshtein without moving a letter twice), three rows at a
// time.
int EditDistance(std::string_view a, std::string_view b) {
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  const auto same = [](char x, char y) {
    return absl::ascii_tolower(static_cast<unsigned char>(x)) ==
           absl::ascii_tolower(static_cast<unsigned char>(y));
  };
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    std::swap(before, last);
    std::swap(last, row);
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] =
          std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same(a[i - 1], b[j - 1]) ? 0 : 1)});
      if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1])) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return row[b.size()];
}

const Key* NearestKey(std::string_view block, std::string_view name) {
  if (name.size() > kNameBytesMax) return nullptr;
  const Key* nearest = nullptr;
  int least = 0;
  for (const Key& key : Keys()) {
    const size_t name_at = key.path.rfind('.') + 1;  // npos + 1 is 0
    if (key.path.ends_with('*')) continue;
    const int distance = EditDistance(name, key.path.substr(name_at)) +
                         (key.path.substr(0, name_at) == block ? 0 : kOtherBlock);
    if (nearest == nullptr || distance < least) {
      nearest = &key;
      least = distance;
    }
  }
  return nearest;
}

std::vector<const Key*> KeysNamed(std::string_view name) {
  std::vector<const Key*> named;
  for (const Key& key : Keys()) {
    const std::string_view own = key.path.substr(key.path.rfind('.') + 1);
    if (own != "*" && own.size() == name.size() && EditDistance(own, name) == 0)
      named.push_back(&key);
  }
  return named;
}

}  // namespace ebb::config
