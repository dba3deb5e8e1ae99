// The first values of a model: initialisers fill the slices of this rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/state/state_values.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/layout.h"
#include "ebb/sharding/model.h"

namespace ebb {

// Whether the initial values of a parameter of bytes are bytes.
absl::Status CheckBytes(const ParameterSpec& parameter, std::span<const float> values);

struct InitialValues {
  const EngineInputs& inputs;
  // By parameter: a hash of the values of this rank's slice, of those that are whole over tensor.
  std::vector<int64_t> filled = {};

  // Some optimizer states begin with other values than 0.
  bool OfStates() const;
  // From this rank's initialisers.
  absl::Status Fill(StateValues& state);
  // Collective: from rank 0's. All ranks call `broadcast` equally often; it gives rank 0's values.
  using Broadcast = absl::FunctionRef<absl::Status(std::span<float>)>;
  absl::Status FillAsRank0(StateValues& state, bool is_rank_0, Broadcast broadcast);

 private:
  absl::Status AskInTurn(const sharding::Section& section, int64_t begin,
                         std::span<float> values) const;
  absl::Status FillFrom(const sharding::Interval& interval, std::span<float> values) const;
  // FillAsRank0 of a model that is cut over tensor ranks: rank 0 is asked for parameters whole.
  absl::Status FillBlocksAsRank0(StateValues& state, bool is_rank_0, Broadcast broadcast);
  // Stores values of this rank's slice, from element `first` of the section on, and the optimizer's
  // states.
  absl::Status Store(StateValues& state, int unit, bool trainable, int64_t first,
                     std::span<const float> values);
  void Hash(const sharding::Section& section, int64_t first, std::span<const float> values);
};

}  // namespace ebb
