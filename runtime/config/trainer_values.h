// The values that a file leaves to the trainer. They are filled in before the file's values are
// read.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/problems.h"
#include "ebb/runtime/config/reader.h"
#include "ebb/runtime/config/value.h"

namespace ebb::config {

class TrainersShare {
 public:
  explicit TrainersShare(const TrainerValues& trainer);

  // Gives every "auto" its value if the trainer knows it, and also fills in required keys that are
  // missing: a size of the batch, an optimizer, the steps of a schedule that needs them. One remark
  // names all filled-in keys, another one every "auto" that got its default. The reading's values
  // refer to this object afterwards. A value that the table does not allow is a problem.
  void Fill(Reading& reading, Problems& problems);

 private:
  const Json* Find(std::string_view path) const;
  bool Put(std::string_view path, Values& values, Problems& problems);
  void FillAuto(Values& values, Problems& problems);
  void FillMissing(Values& values, Problems& problems);
  void Say(const std::string& shown, std::string how);

  std::vector<std::pair<std::string_view, Json>> known_;  // by the key's path
  std::string filled_, left_;
  std::vector<TakenKey>* keys_ = nullptr;
};

}  // namespace ebb::config
