// The order of a round as a model declares it: by ModelSpec::order, or else by ModelSpec::forward,
//
//   F0 F1 F2 F3  B3 B2 B1 B0     by visit
//
// Backward ends at the first trainable visit, and a visit may lack one of the two.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "ebb/sharding/model.h"

namespace ebb::sharding {

bool IsTrainable(const ModelSpec& model, UnitId unit);
// The first visit of a unit with something to train. forward.size() if nothing is trainable.
int FirstTrainableVisit(const ModelSpec& model);

// All that opens and closes in a round.
std::vector<ScopeEvent> EventsOfRound(const ModelSpec& model);

// By visit: whether it has a backward; whether that backward takes gradients.
std::vector<bool> VisitsWithBackward(const ModelSpec& model);
std::vector<bool> VisitsWithGradients(const ModelSpec& model);

// The rules of ModelSpec::order and of Visit's flags. The model passes all other checks.
absl::Status CheckOrder(const ModelSpec& model);

}  // namespace ebb::sharding
