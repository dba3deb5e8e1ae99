// The rows of the table of keys: for each key its name, the field of Config that holds its value,
// its meaning, and details such as its range.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/keys.h"
#include "ebb/runtime/config/value.h"

namespace ebb::config {

// Keys of a parameter group have the fields of the group with this name.
inline constexpr char kAnyGroup[] = "*";
inline constexpr std::string_view kGroupPrefix = "ebb.parameter_groups.*.";

template <class Block>
Block& BlockOf(Config& config) {
  if constexpr (std::is_same_v<Block, ParameterGroupConfig>) {
    return config.ebb.parameter_groups[kAnyGroup];
  } else {
    return std::get<Block&>(std::tie(config, config.optimizer, config.scheduler, config.loss_scale,
                                     config.zero, config.zero.offload_param,
                                     config.zero.offload_optimizer, config.aio,
                                     config.activation_checkpointing, config.ebb, config.ebb.mesh));
  }
}

template <class T>
struct Unwrapped {
  using Type = T;
};
template <class T>
struct Unwrapped<std::optional<T>> {
  using Type = T;
};

template <class T>
constexpr Kind KindOf() {
  if (std::is_same_v<T, bool>) return Kind::kFlag;
  if (std::is_integral_v<T>) return Kind::kInteger;
  if (std::is_same_v<T, double>) return Kind::kNumber;
  if (std::is_same_v<T, std::string>) return Kind::kText;
  if (std::is_same_v<T, std::vector<int64_t>>) return Kind::kRatio;
  return std::is_same_v<T, DType> ? Kind::kDType : Kind::kPaths;
}

template <class T>
T FromJson(const Json& value) {
  if constexpr (KindOf<T>() == Kind::kInteger) {
    return static_cast<T>(*ToBytes(value));
  } else if constexpr (KindOf<T>() == Kind::kDType) {
    return *ToDType(value.get<std::string>());
  } else if constexpr (KindOf<T>() == Kind::kRatio) {
    if (!value.is_array()) return T(static_cast<size_t>(*ToBytes(value)), 1);
    T ratio;
    for (const Json& part : value) ratio.push_back(*ToBytes(part));
    return ratio;
  } else if constexpr (KindOf<T>() == Kind::kPaths) {
    return value.is_string() ? T{value.get<std::string>()} : value.get<T>();
  } else {
    return value.get<T>();
  }
}

template <class T>
Json ToJson(const std::optional<T>& value) {
  if (!value.has_value()) return Json();
  if constexpr (KindOf<T>() == Kind::kDType) {
    return std::string(Name(*value));
  } else if constexpr (KindOf<T>() == Kind::kRatio) {
    return value->size() < 2 || *value == T(value->size(), 1) ? Json(value->size()) : Json(*value);
  } else if constexpr (KindOf<T>() == Kind::kPaths) {
    // A single path becomes a text, unless the reader would take that differently.
    return value->size() == 1 && value->front() != "auto" ? Json(value->front()) : Json(*value);
  } else {
    return *value;
  }
}

// The way between the value of a key and the field that holds it.
struct Field {
  Kind kind;
  std::string words = "";
  // Both are empty for a key without a field.
  std::function<void(const Json&, Config&)> take = {};  // the value has passed Check
  std::function<Json(Config&)> give = {};

  Field(Kind without_field) : kind(without_field) {}
  template <class Block, class T, class Value = typename Unwrapped<T>::Type>
  Field(T Block::*member)
      : kind(KindOf<Value>()),
        take([=](const Json& value, Config& config) {
          BlockOf<Block>(config).*member = FromJson<Value>(value);
        }),
        give([=](Config& config) { return ToJson<Value>(BlockOf<Block>(config).*member); }) {}
};

// One of the words of "a|b", in any case. They name the values from `first` on.
template <class Block, class T, class Value = typename Unwrapped<T>::Type>
Field Choice(T Block::*member, std::string_view words, Value first = {}) {
  const std::vector<std::string> all =
      absl::StrSplit(absl::string_view(words.data(), words.size()), '|');
  Field field(Kind::kWord);
  field.words = words;
  field.take = [=](const Json& word, Config& config) {
    const auto named = std::find(all.begin(), all.end(), FindWord(words, word.get<std::string>()));
    BlockOf<Block>(config).*member =
        static_cast<Value>(static_cast<int>(first) + (named - all.begin()));
  };
  field.give = [=](Config& config) {
    const std::optional<Value> value = BlockOf<Block>(config).*member;
    if (!value.has_value()) return Json();
    // A value below `first` is above all words, too.
    const size_t index = static_cast<size_t>(*value) - static_cast<size_t>(first);
    return index < all.size() ? Json(all[index]) : Json();
  };
  return field;
}

// The word "all" stands for one number.
template <class Block>
Field OrAll(int64_t Block::*member, int64_t all) {
  Field field(member);
  field.words = "all";
  field.take = [=, number = field.take](const Json& value, Config& config) {
    number(value.is_string() ? Json(all) : value, config);
  };
  field.give = [=, number = field.give](Config& config) {
    return BlockOf<Block>(config).*member == all ? Json("all") : number(config);
  };
  return field;
}

// The word "auto" stands for a value that is chosen later. An optional field that has its value by
// now is written as that.
template <class Block, class T>
Field OrAuto(T Block::*member, bool Block::*is_auto = nullptr) {
  Field field(member);
  field.words = "auto";
  field.take = [=, number = field.take](const Json& value, Config& config) {
    const bool is_word = value.is_string() && !FindWord("auto", value.get<std::string>()).empty();
    if (is_auto != nullptr) BlockOf<Block>(config).*is_auto = is_word;
    if (!is_word) number(value, config);
  };
  field.give = [=, number = field.give](Config& config) {
    const Json value = number(config);
    if (is_auto == nullptr || !(BlockOf<Block>(config).*is_auto)) return value;
    return std::is_same_v<T, std::optional<int64_t>> && !value.is_null() ? value : Json("auto");
  };
  return field;
}

// Text that lives as long as the program.
std::string_view Kept(std::string text);

struct Row : Key {
  Field field;
  // The default, if the type of the optimizer is one of `own_default_for`.
  std::string_view own_default_for = "", own_default = "";
  Json if_default = {};  // the field's value in Config()

  // The details, below, complete the row.
  template <class... Details>
  Row(std::string_view name, Field its_field, std::string_view its_meaning,
      const Details&... details)
      : field(std::move(its_field)) {
    path = name, kind = field.kind, meaning = its_meaning;
    words = Kept(field.words);
    (details(*this), ...);
  }
};

template <auto member>
inline constexpr auto kSet = [](auto value) { return [value](Row& row) { row.*member = value; }; };
inline constexpr auto For = kSet<&Key::only_for>;
inline constexpr auto RequiredBy = kSet<&Key::required_for>;
inline constexpr auto IfAbsent = kSet<&Key::if_absent>;
inline constexpr auto Unless = kSet<&Key::harmless>;
inline constexpr auto Default = kSet<&Key::default_value>;  // only if it is spelled differently
inline constexpr auto Words = kSet<&Key::words>;
inline constexpr auto SameAs = kSet<&Key::same_as>;
inline constexpr auto kDeprecated = kSet<&Key::is_deprecated>(true);
inline constexpr auto kMayRepeat = kSet<&Key::may_repeat>(true);
inline constexpr auto kMustAgree = kSet<&Key::must_agree>(true);
inline constexpr auto kInBytes = kSet<&Key::kind>(Kind::kBytes);
inline constexpr auto kUpperLimit = kSet<&Key::taken>(Taken::kUpperLimit);
inline constexpr auto kApproximated = kSet<&Key::taken>(Taken::kApproximated);

constexpr auto From(double least, double most = std::numeric_limits<double>::infinity()) {
  return [=](Row& row) { row.least = least, row.most = most; };
}
constexpr auto Above(double bound, double most = std::numeric_limits<double>::infinity()) {
  return [=](Row& row) { row.least = bound, row.most = most, row.least_is_open = true; };
}
// From `least`, which is allowed, to `bound`, which is not.
constexpr auto Below(double least, double bound) {
  return [=](Row& row) { row.least = least, row.most = bound, row.most_is_open = true; };
}
constexpr auto DefaultFor(std::string_view types, std::string_view value) {
  return [=](Row& row) { row.own_default_for = types, row.own_default = value; };
}
// Every other value is refused.
constexpr auto RefusedUnless(std::string_view harmless) {
  return [=](Row& row) {
    row.taken = Taken::kRefused, row.harmless = harmless;
    if (row.kind != Kind::kAnything) row.default_value = harmless;
  };
}

inline Row OtherName(std::string_view name, std::string_view path) {
  return {name, Kind::kAnything, "another name of a key", SameAs(path)};
}

inline constexpr auto kUnlessFalse = RefusedUnless("false");

const std::vector<Row>& Rows();
const Row& FindRow(std::string_view path);  // which the table has

// The value of the row's field. Null: it is not given.
Json ValueOf(const Row& row, Config& config);

inline constexpr double kLargestInt = 2147483647;  // for numbers that are counted in an int

// The reason why keys about data are refused or have no meaning.
inline constexpr std::string_view kTrainersData = "the data are the trainer's";

// The parts of the table: the rows of one block of the JSON each, with names within the block.
struct Section {
  std::string_view prefix;  // "zero_optimization.", or "" for the top level
  std::vector<Row> rows;
};
std::vector<Section> TrainingSections();      // batch, precision, gradients, optimizer, scheduler
std::vector<Section> ZeroSections();          // zero_optimization and the tiers of state
std::vector<Section> EbbSections();           // "ebb"
std::vector<Section> SurroundingsSections();  // features that are not built

}  // namespace ebb::config
