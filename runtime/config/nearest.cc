#include "ebb/runtime/config/nearest.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/name_view.h"
#include "ebb/runtime/config/keys.h"

namespace ebb::config {
namespace {

constexpr int kOtherBlock = 2;        // a key of another block counts as so many edits further away
constexpr size_t kNameBytesMax = 96;  // twice the longest name of the table

// The table's keys, then the keys without meaning.
const std::vector<std::string>& KnownPaths() {
  static const std::vector<std::string>* const all = [] {
    auto* paths = new std::vector<std::string>;
    for (const Key& key : Keys()) {
      if (!key.path.ends_with('*')) paths->emplace_back(key.path);
    }
    for (const WithoutMeaning& without : KeysWithoutMeaning()) {
      ForEachWord(without.names, [&](std::string_view name) {
        paths->push_back(Join({without.block, name}));
      });
    }
    return paths;
  }();
  return *all;
}

// In lower case.
std::vector<std::string> WordsOf(std::string_view name) {
  return absl::StrSplit(absl::AsciiStrToLower(NameView(name)), '_');
}

// Words of two names of which one has the other's words.
int SharedWords(std::string_view a, std::string_view b) {
  return static_cast<int>(std::min(WordsOf(a).size(), WordsOf(b).size()));
}
int OtherWords(std::string_view a, std::string_view b) {
  return static_cast<int>(std::max(WordsOf(a).size(), WordsOf(b).size())) - SharedWords(a, b);
}

}  // namespace

// Optimal string alignment (Damerau-Levenshtein without moving a letter twice), three rows at a
// time.
int EditDistance(std::string_view from, std::string_view to) {
  const std::string a = absl::AsciiStrToLower(NameView(from));
  const std::string b = absl::AsciiStrToLower(NameView(to));
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    std::swap(before, last);
    std::swap(last, row);
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] =
          std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return row[b.size()];
}

bool HasWordsOf(std::string_view a, std::string_view b) {
  if (a.size() > b.size()) std::swap(a, b);
  const std::vector<std::string> fewer = WordsOf(a), more = WordsOf(b);
  size_t found = 0;
  for (const std::string& word : more) found += found < fewer.size() && word == fewer[found];
  return found == fewer.size();
}

std::string NearestPath(std::string_view block, std::string_view name) {
  if (name.size() > kNameBytesMax) return "";
  if (const size_t dot = name.rfind('.'); dot != name.npos)
    return NearestPath(Join({block, name.substr(0, dot + 1)}), name.substr(dot + 1));
  const std::string* nearest = nullptr;
  int least = 0;
  for (const std::string& path : KnownPaths()) {
    const size_t name_at = path.rfind('.') + 1;  // npos + 1 is 0
    const std::string_view own = std::string_view(path).substr(name_at);
    const bool is_sibling = std::string_view(path).substr(0, name_at) == block;
    const int detour = is_sibling ? 0 : kOtherBlock;
    int distance = detour + static_cast<int>(std::max(own.size(), name.size()));
    if (HasWordsOf(name, own) && (is_sibling || SharedWords(name, own) > 1))
      distance = detour + OtherWords(name, own);
    // At least as many edits as the difference of the lengths.
    const auto longer =
        static_cast<int>(std::max(own.size(), name.size()) - std::min(own.size(), name.size()));
    if (nearest == nullptr || std::min(distance, longer + detour) < least)
      distance = std::min(distance, EditDistance(name, own) + detour);
    if (nearest == nullptr || distance < least) {
      nearest = &path;
      least = distance;
    }
  }
  return *nearest;
}

std::string NearestWord(std::string_view list_with_bars, std::string_view name) {
  std::string nearest;
  ForEachWord(list_with_bars, [&](std::string_view word) {
    if (name.size() > kNameBytesMax) return;
    if (nearest.empty() || EditDistance(name, word) < EditDistance(name, nearest)) nearest = word;
  });
  return nearest;
}

std::vector<std::string> PathsNamed(std::string_view name) {
  std::vector<std::string> named;
  for (const std::string& path : KnownPaths()) {
    if (path.find('*') != std::string::npos) continue;  // named by the user
    const std::string_view own = std::string_view(path).substr(path.rfind('.') + 1);
    if (absl::EqualsIgnoreCase(NameView(own), NameView(name))) named.push_back(path);
  }
  return named;
}

}  // namespace ebb::config
