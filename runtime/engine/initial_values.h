// The values that a model begins with, from its initialisers into the slices of this rank.
#pragma once

#include "absl/status/status.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/engine/state_values.h"
#include "ebb/sharding/model.h"

namespace ebb {

struct InitialValues {
  const ModelSpec* model = nullptr;
  const Config* config = nullptr;
  bool own_optimizer = false;
  bool casts_masters = false;  // parameters are copies of masters in another dtype

  // Some optimizer states begin with other values than 0.
  bool OfStates() const;
  absl::Status Fill(StateValues& state) const;
};

}  // namespace ebb
