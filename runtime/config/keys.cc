#include "ebb/runtime/config/keys.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

std::string ShownBound(double bound) {
  if (bound == std::trunc(bound) && std::abs(bound) < 1e15) {
    return std::to_string(static_cast<int64_t>(bound));
  }
  return absl::StrCat(bound);
}

std::string Range(const Key& key) {
  const bool has_least = std::isfinite(key.least), has_most = std::isfinite(key.most);
  std::string text;
  if (has_least && has_most && !key.least_is_open && !key.most_is_open) {
    return Join({" from ", ShownBound(key.least), " to ", ShownBound(key.most)});
  }
  if (has_least) {
    text += Join({key.least_is_open ? " above " : " of at least ", ShownBound(key.least)});
  }
  if (has_most) {
    text += Join({has_least ? " and" : "", key.most_is_open ? " below " : " at most ",
                  ShownBound(key.most)});
  }
  return text;
}

std::string AllowedKind(const Key& key) {
  switch (key.kind) {
    case Kind::kBlock:
    case Kind::kOpenBlock:
      return "an object";
    case Kind::kFlag:
      return "true or false";
    case Kind::kInteger:
      return "an integer" + Range(key);
    case Kind::kRatio:
      return "an integer" + Range(key) + ", or several in brackets";
    case Kind::kNumber:
      return "a number" + Range(key);
    case Kind::kNumberPair:
      return "two numbers in brackets, each" + Range(key);
    case Kind::kNumberTriple:
      return "three numbers in brackets, each" + Range(key);
    case Kind::kBytes:
      return "bytes, as an integer" + Range(key) + " or text such as \"4MiB\"";
    case Kind::kText:
      return "text";
    case Kind::kPaths:
      return "a path, or several in brackets";
    case Kind::kWord:
      return "";
    case Kind::kDType:
      return Alternatives("fp32|bf16|fp16");
    case Kind::kAnything:
      return "anything";
  }
  return "";
}

std::string TextOf(const Json& value) {
  return value.is_string() ? value.get<std::string>() : Shown(value);
}

}  // namespace

std::string_view Kept(std::string text) {
  static auto* const texts = new std::deque<std::string>;
  return texts->emplace_back(std::move(text));
}

const std::vector<Row>& Rows() {
  static const auto* const all = [] {
    auto* rows = new std::vector<Row>;
    Config defaults;
    for (const auto& sections :
         {TrainingSections(), ZeroSections(), EbbSections(), SurroundingsSections()}) {
      for (const auto& [prefix, rows_of_section] : sections) {
        for (Row row : rows_of_section) {
          row.path = Kept(Join({prefix, row.path}));
          if (row.field.give) row.if_default = row.field.give(defaults);
          if (row.field.give && row.default_value.empty() && row.if_absent.empty() &&
              row.required_for.empty())
            row.default_value = Kept(TextOf(row.if_default));
          rows->push_back(std::move(row));
        }
      }
    }
    return rows;
  }();
  return *all;
}

Json ValueOf(const Row& row, Config& config) {
  Json value = row.field.give(config);
  return row.if_absent.empty() || value != row.if_default ? value : Json();
}

const Row& FindRow(std::string_view path) {
  return *std::find_if(Rows().begin(), Rows().end(),
                       [&](const Row& row) { return row.path == path; });
}

std::span<const Key> Keys() {
  static const auto* const all = new std::vector<Key>(Rows().begin(), Rows().end());
  return *all;
}

const Key* FindKey(std::string_view path) {
  static const auto* const by_path = [] {
    auto* map = new std::map<std::string_view, const Key*>;
    for (const Key& key : Keys()) map->emplace(key.path, &key);
    return map;
  }();
  const auto found = by_path->find(path);
  return found == by_path->end() ? nullptr : found->second;
}

const WithoutMeaning* FindWithoutMeaning(std::string_view block, std::string_view name) {
  for (const WithoutMeaning& without : KeysWithoutMeaning()) {
    if (without.block == block && HasWord(without.names, name)) return &without;
  }
  return nullptr;
}

bool HasWord(std::string_view list, std::string_view word) {
  bool has = false;
  ForEachWord(list, [&](std::string_view each) { has = has || each == word; });
  return has;
}

std::string Allowed(const Key& key) {
  if (key.taken == Taken::kRefused && !key.harmless.empty()) {
    if (key.kind == Kind::kWord) return Alternatives(key.harmless);
    if (key.harmless.starts_with("<=")) return Join({"at most ", key.harmless.substr(2)});
    return std::string(key.harmless);
  }
  std::string text = AllowedKind(key);
  if (!key.words.empty()) {
    if (!text.empty()) text += " or ";
    text += Alternatives(key.words);
  }
  return text;
}

}  // namespace ebb::config
