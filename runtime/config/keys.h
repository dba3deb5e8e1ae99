// The one table of the configuration's keys: what of DeepSpeed's vocabulary means something here,
// and the "ebb" keys.
//
// A row says where a key stands ("zero_optimization.stage"), what values it allows, its default,
// and how it is taken. Reading, checking, messages, writing, docs/configuration.md and the JSON
// Schema are all driven by these rows; only relations between keys are code (together.cc,
// batch.cc). Old and second names are rows of their own that point at the key they stand for.
// DeepSpeed's keys without meaning here are names in a list beside the table.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

namespace ebb::config {

enum class Kind : uint8_t {
  kBlock,      // an object in which DeepSpeed refuses unknown keys; "ebb", too
  kOpenBlock,  // an object in which DeepSpeed passes over them
  kFlag,       // true or false
  kInteger,    // 5e8 is one
  kNumber,
  kNumberPair,  // [0.9, 0.999]
  kBytes,       // an integer, or text such as "4MiB"
  kText,
  kPaths,  // a path, or a list of them
  kWord,   // one of `words`, in any case
  kDType,  // "fp32", "bf16", "fp16" and PyTorch's spellings of them, in any case
  kAnything,
};

enum class Taken : uint8_t {
  kLiterally,
  kUpperLimit,    // what the plan needs, at most this
  kApproximated,  // nearly what the key says
  kRefused,       // would change results or where state lives and is not built
};

struct Key {
  std::string_view path;  // names joined by '.'; "*" stands for a name of the user's choice
  Kind kind = Kind::kBlock;
  std::string_view default_value;  // what holds when it is not given, as in the
                                   // JSON; "": nothing
  Taken taken = Taken::kLiterally;
  // What it is, in one line. kRefused: why; the end of the error.
  std::string_view meaning;

  // kInteger, kNumber, kNumberPair: what is allowed; an open end does not include its bound.
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  bool least_is_open = false, most_is_open = false;
  std::string_view words = "";  // kWord: all of them, "a|b|c"; other kinds: texts allowed besides
  // The values that change nothing: "a|b", or "<=1"; of an object "disabled" or "off" (value.cc).
  // They are never refused, nor upper limits or approximated.
  std::string_view harmless = "";
  // Parameters of an optimizer or scheduler: the types that have it, all if ""; those that need it.
  std::string_view only_for = "", required_for = "";
  std::string_view same_as = "";  // the key it stands for, which has its own row
  bool is_deprecated = false;     // of rows with same_as: worth a remark
  bool may_repeat = false;        // by another name as well; the one of `path` counts
};

std::span<const Key> Keys();

// DeepSpeed's keys that are accepted with a remark, whatever their value.
struct WithoutMeaning {
  std::string_view block;       // "zero_optimization."
  std::string_view names;       // "a|b"
  std::string_view why;         // the end of the remark
  std::string_view inner = "";  // names in the object that it is, where DeepSpeed refuses others
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

// Whether `list` has the word. Case counts.
bool HasWord(std::string_view list, std::string_view word);

// What the row allows, to follow "allowed: ".
std::string Allowed(const Key& key);

}  // namespace ebb::config
