// What a file leaves to the trainer, filled in before its values are read.
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

  // Every "auto" of which the trainer knows the value gets it. What is missing and must be there
  // does, too: a size of the batch, an optimizer, the steps of a schedule that needs them. Remarks
  // in one sentence on all that was filled in, in one on every "auto" that was left to its default.
  // The reading's values refer to this object afterwards. A value that the table does not allow is
  // a problem.
  void Fill(Reading& reading, Problems& problems);

 private:
  const Json* Find(std::string_view path) const;
  bool Put(std::string_view path, Values& values, Problems& problems);
  void FillAuto(Values& values, Problems& problems);
  void FillMissing(Values& values, Problems& problems);
  void Say(const std::string& shown, std::string how);

  std::vector<std::pair<std::string_view, Json>> known_;  // by the path of the key
  std::string filled_, left_;
  std::vector<TakenKey>* keys_ = nullptr;
};

}  // namespace ebb::config
