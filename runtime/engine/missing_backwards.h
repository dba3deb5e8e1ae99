// Which declared backwards of a step have not come. Where one does not come its gradient is zero, or
// lacks a round, which ebb.strict makes an error of the step.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class MissingBackwards {
 public:
  // A step of this plan begins. The plan outlives the step.
  void Begin(const sharding::Plan& plan);
  // A scope was opened, declared or not. Rounds come in their order: what those before `round` lack by
  // now is missing.
  void Opened(bool backward, int unit, int round);
  // No scope comes any more: so are the rest of the last round, and all rounds after it.
  void End();
  // The first that is missing, in the order of backward; OK if none is.
  absl::Status Error() const;

 private:
  void EndRound();

  const sharding::Plan* plan_ = nullptr;
  std::vector<int> declared_, came_;  // backwards of a round, by unit; declared: of trainable ones
  int round_ = 0;                     // of the scopes that come now
  bool any_ = false;                  // scope of this round has come
  // The first that is missing.
  bool found_ = false;
  int missing_round_ = 0, missing_unit_ = -1, missing_came_ = 0;  // unit -1: the whole round
};

}  // namespace ebb
