// Checks a document against the table: every key known, every value allowed, a remark for every key
// that is not taken literally.
#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/document.h"
#include "ebb/runtime/config/keys.h"
#include "ebb/runtime/config/problems.h"
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
  std::map<std::string_view, Json> of_trainer;  // by the key's path
  std::vector<TakenKey> keys;                   // in the file's order
  std::vector<std::string> remarks, warnings;   // Config's
};

// Converts values as DeepSpeed does, such as "true" to true. The document outlives the result.
Reading ReadValues(Document& document, std::optional<UnknownKeys> unknown_keys);

// Gives every "auto" its value if the trainer knows it, and also fills in required keys that are
// missing: a size of the batch, an optimizer, the steps of a schedule that needs them. One remark
// names all filled-in keys, another one every "auto" that got its default. A value that the table
// does not allow is a problem.
void FillFromTrainer(const TrainerValues& trainer, Reading& reading, Problems& problems);

// Appends a remark, once.
void Remark(std::vector<std::string>& remarks, std::initializer_list<std::string_view> sentence);

}  // namespace ebb::config
