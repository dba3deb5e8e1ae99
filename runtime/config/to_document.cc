#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ebb/runtime/config/convert.h"
#include "ebb/runtime/config/fields.h"
#include "ebb/runtime/config/message.h"

namespace ebb::config {
namespace {

constexpr std::string_view kGroup = "ebb.parameter_groups.*.";

// Puts each given field at its path below an object.
class FieldWriter {
 public:
  explicit FieldWriter(Json& object) : object_(object) {}

  template <class Field>
  void operator()(std::string_view path, Field&& field) {
    Put(path, ToJson(field));
  }

 private:
  void Put(std::string_view path, Json value) {
    if (path.starts_with(kGroup)) path.remove_prefix(kGroup.size());
    if (value.is_null()) return;
    Json* block = &object_;
    for (size_t dot; (dot = path.find('.')) != std::string_view::npos;
         path.remove_prefix(dot + 1)) {
      block = &(*block)[std::string(path.substr(0, dot))];
    }
    (*block)[std::string(path)] = std::move(value);
  }

  static Json ToJson(bool value) { return value; }
  static Json ToJson(int value) { return value; }
  static Json ToJson(int64_t value) { return value; }
  static Json ToJson(double value) { return value; }
  static Json ToJson(DType value) { return std::string(Name(value)); }
  static Json ToJson(const std::string& value) { return value.empty() ? Json() : Json(value); }
  static Json ToJson(NotZero field) { return field.value == 0 ? Json() : Json(field.value); }
  static Json ToJson(OrAll field) {
    return field.value == field.all ? Json("all") : Json(field.value);
  }
  static Json ToJson(OrAuto<std::optional<int64_t>> field) {
    if (field.value.has_value()) return *field.value;
    return field.is_auto ? Json("auto") : Json();
  }
  static Json ToJson(OrAuto<double> field) {
    return field.is_auto ? Json("auto") : Json(field.value);
  }
  static Json ToJson(Pair field) { return Json::array({field.first, field.second}); }
  static Json ToJson(IsType field) { return field.value == field.type; }
  static Json ToJson(Switch field) {
    return std::string(field.value ? field.word_if_true : field.word_if_false);
  }
  template <class Enum>
  static Json ToJson(Choice<Enum> field) {
    const std::string_view word = Word(field.spellings, field.value);
    return word.empty() ? Json() : Json(std::string(word));
  }
  template <class Enum>
  static Json ToJson(OptionalChoice<Enum> field) {
    return field.value.has_value() ? ToJson(Choice<Enum>{*field.value, field.spellings}) : Json();
  }
  // A single path becomes a text, unless the reader would take that differently.
  static Json ToJson(const std::vector<std::string>& paths) {
    if (paths.empty()) return Json();
    return paths.size() == 1 && paths[0] != "auto" ? Json(paths[0]) : Json(paths);
  }
  template <class T>
  static Json ToJson(const std::optional<T>& value) {
    return value.has_value() ? ToJson(*value) : Json();
  }

  Json& object_;
};

}  // namespace

Json ToDocument(Config config) {
  Json document = Json::object();
  FieldWriter write(document);
  VisitFields(config, write);
  for (auto& [name, group] : config.ebb.parameter_groups) {
    Json& object = document["ebb"]["parameter_groups"][name] = Json::object();
    FieldWriter write_group(object);
    VisitGroup(group, write_group);
    if (group.optimizer.has_value()) VisitOptimizer(*group.optimizer, write_group);
  }
  return document;
}

}  // namespace ebb::config
