// What a file leaves to the trainer, filled in before its values are read.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/reader.h"
#include "ebb/runtime/config/value.h"

namespace ebb::config {

class TrainersShare {
 public:
  explicit TrainersShare(const TrainerValues& trainer);

  // Every "auto" of which the trainer knows the value gets it. What is missing and must be there does,
  // too: a size of the batch, an optimizer, the steps of a schedule that needs them. `values` refers to
  // this object afterwards. A value that the table does not allow is an error.
  absl::Status Fill(Values& values);

  // One sentence on all that was filled in, one on every "auto" that was left to its default.
  void Remark(std::vector<std::string>& remarks) const;

 private:
  const Json* Find(std::string_view path) const;
  absl::Status Put(std::string_view path, Values& values);
  absl::Status FillAuto(Values& values);
  absl::Status FillMissing(Values& values);

  // By the path of the key.
  std::vector<std::pair<std::string_view, Json>> known_;
  std::string filled_, left_;
};

}  // namespace ebb::config
