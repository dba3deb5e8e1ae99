// Functions to write the rows of the table: one call names the kind, and further calls add details.
#pragma once

#include <limits>
#include <span>
#include <string_view>

#include "ebb/runtime/config/keys.h"

namespace ebb::config {

struct Row : Key {
  constexpr Row From(double from, double to = std::numeric_limits<double>::infinity()) const {
    Row row = *this;
    row.least = from, row.most = to;
    return row;
  }
  constexpr Row Above(double bound, double to = std::numeric_limits<double>::infinity()) const {
    Row row = From(bound, to);
    row.least_is_open = true;
    return row;
  }
  // From `from`, which is allowed, to `bound`, which is not.
  constexpr Row Within(double from, double bound) const {
    Row row = From(from, bound);
    row.most_is_open = true;
    return row;
  }
  constexpr Row Or(std::string_view word) const {
    Row row = *this;
    row.words = word;
    return row;
  }
  constexpr Row Unless(std::string_view values) const {
    Row row = *this;
    row.harmless = values;
    return row;
  }
  constexpr Row Of(std::string_view types) const {
    Row row = *this;
    row.only_for = types;
    return row;
  }
  constexpr Row IfAbsent(std::string_view what) const {
    Row row = *this;
    row.if_absent = what;
    return row;
  }
  constexpr Row MayRepeat() const {
    Row row = *this;
    row.may_repeat = true;
    return row;
  }
  constexpr Row RequiredBy(std::string_view types) const {
    Row row = *this;
    row.required_for = types;
    return row;
  }
};

constexpr Row MakeRow(Kind kind, std::string_view path, std::string_view default_value, Taken taken,
                      std::string_view meaning) {
  Row row;
  row.path = path, row.kind = kind, row.default_value = default_value;
  row.taken = taken, row.meaning = meaning;
  return row;
}

constexpr Row Block(std::string_view path, Taken taken, std::string_view meaning) {
  return MakeRow(Kind::kBlock, path, "", taken, meaning);
}
constexpr Row OpenBlock(std::string_view path, Taken taken, std::string_view meaning) {
  return MakeRow(Kind::kOpenBlock, path, "", taken, meaning);
}
constexpr Row Flag(std::string_view path, std::string_view default_value, Taken taken,
                   std::string_view meaning) {
  Row row = MakeRow(Kind::kFlag, path, default_value, taken, meaning);
  // A switch that must not be changed is refused in its other position only.
  if (taken == Taken::kRefused) row.harmless = default_value;
  return row;
}
constexpr Row Integer(std::string_view path, std::string_view default_value, Taken taken,
                      std::string_view meaning) {
  return MakeRow(Kind::kInteger, path, default_value, taken, meaning);
}
constexpr Row Number(std::string_view path, std::string_view default_value, Taken taken,
                     std::string_view meaning) {
  return MakeRow(Kind::kNumber, path, default_value, taken, meaning);
}
constexpr Row NumberPair(std::string_view path, std::string_view default_value, Taken taken,
                         std::string_view meaning) {
  return MakeRow(Kind::kNumberPair, path, default_value, taken, meaning);
}
constexpr Row Bytes(std::string_view path, std::string_view default_value, Taken taken,
                    std::string_view meaning) {
  return MakeRow(Kind::kBytes, path, default_value, taken, meaning).From(0);
}
constexpr Row Text(std::string_view path, std::string_view default_value, Taken taken,
                   std::string_view meaning) {
  return MakeRow(Kind::kText, path, default_value, taken, meaning);
}
constexpr Row Paths(std::string_view path, std::string_view default_value, Taken taken,
                    std::string_view meaning) {
  return MakeRow(Kind::kPaths, path, default_value, taken, meaning);
}
constexpr Row Word(std::string_view path, std::string_view words, std::string_view default_value,
                   Taken taken, std::string_view meaning) {
  return MakeRow(Kind::kWord, path, default_value, taken, meaning).Or(words);
}
constexpr Row Type(std::string_view path, std::string_view default_value, Taken taken,
                   std::string_view meaning) {
  return MakeRow(Kind::kDType, path, default_value, taken, meaning);
}
constexpr Row Anything(std::string_view path, Taken taken, std::string_view meaning) {
  return MakeRow(Kind::kAnything, path, "", taken, meaning);
}
constexpr Row OtherName(std::string_view path, std::string_view same_as) {
  Row row = MakeRow(Kind::kAnything, path, "", Taken::kLiterally, "another name of a key");
  row.same_as = same_as;
  return row;
}
constexpr Row OldName(std::string_view path, std::string_view same_as) {
  Row row = OtherName(path, same_as);
  row.meaning = "an old name of a key";
  row.is_deprecated = true;
  return row;
}

// The reason why keys about data are refused or have no meaning.
inline constexpr std::string_view kTrainersData = "the data are the trainer's";

// The parts of the table, by subject.
std::span<const Key> TrainingKeys();      // batch, precision, gradients, optimizer, scheduler
std::span<const Key> ZeroKeys();          // zero_optimization and the tiers of state
std::span<const Key> SurroundingsKeys();  // features that are not built
std::span<const Key> EbbKeys();           // "ebb"

}  // namespace ebb::config
