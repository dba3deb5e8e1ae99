// The one table of the configuration's keys: the part of DeepSpeed's vocabulary that has a meaning
// here, and the "ebb" keys.
//
// A row says where a key stands ("zero_optimization.stage"), which values it allows, its default,
// and how it is taken. In key_rows.h it also has the field of Config that holds the value. Reading, checking, messages, writing, docs/configuration.md and the JSON
// Schema all come from these rows; only relations between keys are code (together.cc, batch.cc).
// Old and second names are rows of their own that point at the main key. DeepSpeed's keys without
// meaning here are names in a list beside the table.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

namespace ebb::config {

enum class Kind : uint8_t {
  kBlock,      // an object in which DeepSpeed refuses unknown keys; "ebb", too
  kOpenBlock,  // an object in which DeepSpeed ignores them
  kFlag,       // true or false
  kInteger,    // 5e8 is one
  kRatio,      // 1:1:2 as [1, 1, 2]; 3 is [1, 1, 1]
  kNumber,
  kNumberPair,  // [0.9, 0.999]
  kNumberTriple,
  kBytes,  // an integer, or text such as "4MiB"
  kText,
  kPaths,  // a path, or a list of them
  kWord,   // one of `words`, in any case
  kDType,  // "fp32", "bf16", "fp16" and PyTorch's spellings of them, in any case
  kAnything,
};

enum class Taken : uint8_t {
  kLiterally,
  kUpperLimit,    // the plan takes as much as it needs, up to this value
  kApproximated,  // close to the key's meaning
  kRefused,       // would change results or placement, and is not built
};

struct Key {
  std::string_view path;  // names joined by '.'; "*" stands for a name of the user's choice
  Kind kind = Kind::kBlock;
  std::string_view default_value;  // the value if it is not given, as in the JSON; "": none
  Taken taken = Taken::kLiterally;
  // The key's meaning in one line. kRefused: the reason, as the end of the error.
  std::string_view meaning;

  // kInteger, kRatio, kNumber, kNumberPair, kNumberTriple: the range; an open end excludes its bound.
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  bool least_is_open = false, most_is_open = false;
  std::string_view words = "";  // kWord: all, "a|b|c"; other kinds: also allowed texts
  // The values that change nothing: "a|b", or "<=1"; for an object "disabled" or "off" (value.cc).
  // They are never refused, upper limits or approximated.
  std::string_view harmless = "";
  // Parameters of an optimizer or scheduler: the types that have it (all if ""), and those that
  // need it.
  std::string_view only_for = "", required_for = "";
  std::string_view if_absent = "";  // for documents, without default_value: what then holds
  std::string_view same_as = "";    // the key that it is another name of, which has its own row
  bool is_deprecated = false;       // for rows with same_as: the name gets a remark
  bool may_repeat = false;          // may also be given under another name; `path` wins
  bool must_agree = false;          // may also be given under another name, with the same value

  bool is_block() const { return kind == Kind::kBlock || kind == Kind::kOpenBlock; }
};

std::span<const Key> Keys();

// DeepSpeed's keys that are accepted with a remark, whatever their value.
struct WithoutMeaning {
  std::string_view block;       // "zero_optimization."
  std::string_view names;       // "a|b"
  std::string_view why;         // the end of the remark
  std::string_view inner = "";  // names in the object, where DeepSpeed refuses others
};
std::span<const WithoutMeaning> KeysWithoutMeaning();

// The row of exactly this path, or null.
const Key* FindKey(std::string_view path);
const WithoutMeaning* FindWithoutMeaning(std::string_view block, std::string_view name);

// Calls `visit` for each word of `list`, "a|b|c".
template <class Visitor>
void ForEachWord(std::string_view list, Visitor&& visit) {
  while (!list.empty()) {
    const size_t bar = list.find('|');
    visit(list.substr(0, bar));
    list.remove_prefix(bar == std::string_view::npos ? list.size() : bar + 1);
  }
}

// Whether `list` has the word, case-sensitive.
bool HasWord(std::string_view list, std::string_view word);

// The values that the row allows, for use after "allowed: ".
std::string Allowed(const Key& key);

}  // namespace ebb::config
