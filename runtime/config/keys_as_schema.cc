#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/keys.h"
#include "ebb/runtime/config/keys_as_text.h"
#include "ebb/runtime/config/value.h"

namespace ebb::config {
namespace {

// Words in the table's case, in small letters, and in capitals, because some users write those.
void AddWords(std::string_view list, Json& words) {
  ForEachWord(list, [&](std::string_view word) {
    const absl::string_view text(word.data(), word.size());
    for (const std::string& spelling :
         {std::string(word), absl::AsciiStrToLower(text), absl::AsciiStrToUpper(text)}) {
      if (std::find(words.begin(), words.end(), spelling) == words.end()) {
        words.push_back(spelling);
      }
    }
  });
}

Json WordList(std::string_view list) {
  Json words = Json::array();
  AddWords(list, words);
  return words;
}

Json Number(const Key& key, std::string_view type) {
  Json schema = {{"type", type}};
  // The plan takes no more than it needs, so any large limit is allowed.
  if (std::isfinite(key.least))
    schema[key.least_is_open ? "exclusiveMinimum" : "minimum"] = key.least;
  if (std::isfinite(key.most)) schema[key.most_is_open ? "exclusiveMaximum" : "maximum"] = key.most;
  return schema;
}

Json Paths() {
  const Json path = {{"type", "string"}};
  return {{"anyOf", {path, {{"type", "array"}, {"items", path}, {"minItems", 1}}}}};
}

// A value of the row's kind, without the extra words.
Json OfKind(const Key& key) {
  switch (key.kind) {
    case Kind::kFlag:
      return {{"type", "boolean"}};
    case Kind::kInteger:
      return Number(key, "integer");
    case Kind::kRatio:
      return {{"anyOf",
               {Number(key, "integer"),
                {{"type", "array"}, {"items", Number(key, "integer")}, {"minItems", 2}}}}};
    case Kind::kNumber:
      return Number(key, "number");
    case Kind::kNumberPair:
    case Kind::kNumberTriple: {
      const int numbers = key.kind == Kind::kNumberPair ? 2 : 3;
      return {{"type", "array"},
              {"items", Number(key, "number")},
              {"minItems", numbers},
              {"maxItems", numbers}};
    }
    case Kind::kBytes:
      return {
          {"anyOf",
           {Number(key, "integer"),
            {{"type", "string"}, {"pattern", "^[0-9]+([.][0-9]+)? *([kKmMgGtT][iI]?)?[bB]?$"}}}}};
    case Kind::kText:
      return {{"type", "string"}};
    case Kind::kPaths:
      return Paths();
    case Kind::kDType: {
      Json words = Json::array();
      for (const DTypeSpellings& spellings : kDTypes) AddWords(spellings.words, words);
      for (const DTypeSpellings& spellings : kDTypes) {
        ForEachWord(spellings.words, [&](std::string_view word) {
          words.push_back(Join({"torch.", word}));
        });
      }
      return {{"enum", std::move(words)}};
    }
    default:
      return Json::object();
  }
}

// Any value in which no "enabled" is true, at any depth.
Json Off() {
  return {{"properties", {{"enabled", {{"not", {{"const", true}}}}}}},
          {"additionalProperties", {{"$ref", "#/definitions/off"}}}};
}

// For a refused row: the values that are accepted.
Json Harmless(const Key& key) {
  if (key.harmless == "disabled") {
    return {{"type", "object"}, {"properties", {{"enabled", {{"enum", Json::array({false, 0})}}}}}};
  }
  if (key.harmless == "off") return {{"$ref", "#/definitions/off"}};
  if (key.kind == Kind::kWord) return {{"enum", WordList(key.harmless)}};
  if (key.kind == Kind::kFlag) return {{"const", key.harmless == "true"}};
  if (key.harmless.starts_with("<=")) {
    return {{"type", "integer"}, {"maximum", Json::parse(key.harmless.substr(2))}};
  }
  return key.harmless.empty() ? Json{{"type", "null"}} : Json{{"const", Json::parse(key.harmless)}};
}

Json Leaf(const Key& key) {
  Json choices = Json::array();
  Json words = Json::array({nullptr});
  if (key.taken == Taken::kRefused) {
    choices.push_back(Harmless(key));
  } else {
    if (key.kind != Kind::kWord) choices.push_back(OfKind(key));
    AddWords(key.words, words);
  }
  if (IsAuto(key, "auto")) words.push_back("auto");
  choices.push_back({{"enum", std::move(words)}});
  return {{"anyOf", std::move(choices)}};
}

// "/properties/zero_optimization/properties/stage", for a path without "*".
std::string Reference(std::string_view path) {
  std::string text = "#";
  while (!path.empty()) {
    const size_t dot = path.find('.');
    text += Join({"/properties/", path.substr(0, dot)});
    path.remove_prefix(dot == std::string_view::npos ? path.size() : dot + 1);
  }
  return text;
}

Json Object(std::string_view prefix, bool is_strict);

Json Property(const Key& key) {
  if (!key.same_as.empty()) {
    return {{"allOf", Json::array({Json{{"$ref", Reference(key.same_as)}}})},
            {"description", Join({key.meaning, ": ", key.same_as})}};
  }
  Json schema;
  if (key.is_block()) {
    schema = Object(Join({key.path, "."}), key.kind == Kind::kBlock);
    // Early files have a flag for the whole block.
    if (key.path == "zero_optimization") schema["type"] = {"object", "boolean", "null"};
  } else {
    schema = Leaf(key);
  }
  const std::string_view value = key.default_value.empty() ? key.if_absent : key.default_value;
  std::string description(key.meaning);
  if (!value.empty()) description += Join({"; default: ", value});
  std::erase(description, '`');
  schema["description"] = std::move(description);
  return schema;
}

Json Object(std::string_view prefix, bool is_strict) {
  Json properties = Json::object();
  Json others = !is_strict;
  for (const Key& key : Keys()) {
    if (!key.path.starts_with(prefix)) continue;
    const std::string name(key.path.substr(prefix.size()));
    if (name.find('.') != std::string::npos) continue;
    if (name == "*") {
      others = Property(key);
    } else {
      properties[name] = Property(key);
    }
  }
  for (const WithoutMeaning& without : KeysWithoutMeaning()) {
    if (without.block != prefix) continue;
    ForEachWord(without.names, [&](std::string_view name) {
      properties[std::string(name)] = {
          {"description", Join({"without meaning here: ", without.why})}};
    });
  }
  return {{"type", {"object", "null"}},
          {"properties", std::move(properties)},
          {"patternProperties", {{"^(_|//|[cC][oO][mM][mM][eE][nN][tT]$)", Json::object()}}},
          {"additionalProperties", std::move(others)}};
}

}  // namespace

std::string KeysAsSchema() {
  Json schema = {{"$schema", "http://json-schema.org/draft-07/schema#"},
                 {"title", "Ebb's configuration, in DeepSpeed's vocabulary"}};
  schema.update(Object("", /*is_strict=*/false));
  schema["type"] = "object";
  schema["definitions"] = {{"off", Off()}};
  return schema.dump(1) + "\n";
}

}  // namespace ebb::config
