// Checks a document against the table: every key known, every value allowed, a remark for every key
// that is not taken literally.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/document.h"
#include "ebb/runtime/config/keys.h"
#include "ebb/runtime/config/value.h"

namespace ebb::config {

struct Given {
  const Json* value = nullptr;  // in the document, or from the trainer; null: "auto"
  std::string shown = "";       // the path in the file
};

// The values of a document, by the path of the key's row; null counts as not given. An optimizer of
// a parameter group is found under "optimizer...", as at the top level, in the group's own Values.
struct Values {
  std::map<std::string_view, Given> given;
  std::map<std::string, Values> groups;  // of ebb.parameter_groups, by name

  const Given* Find(std::string_view path) const;
  // The value, unless it is not given or "auto".
  const Json* Value(std::string_view path) const;
  // The type of the optimizer or the scheduler, also if it is the default.
  std::string_view Type(std::string_view block) const;
};

// How a key of the file was taken.
struct TakenKey {
  std::string shown, value;
  std::string how;
  const Key* key = nullptr;  // null: not in the table
};

struct Reading {
  Values values;
  std::vector<TakenKey> keys;                  // in the file's order
  std::vector<std::string> remarks, warnings;  // Config's
};

// Converts values as DeepSpeed does, such as "true" to true. The document outlives the result.
Reading ReadValues(Document& document, std::optional<UnknownKeys> unknown_keys);

// Appends a remark, once.
void Remark(std::vector<std::string>& remarks, std::string sentence);

}  // namespace ebb::config
