// The order in which a trainer opens scopes in a step, from the model's declared forward order.
//
//   round 0: F0 F1 F2 F3  B3 B2 B1 B0 | round 1: F0 ... B0 | ...     by visit
//
// Backward ends at the first trainable visit.
#pragma once

#include <vector>

#include "ebb/sharding/model.h"

namespace ebb::sharding {

struct PlannedScope {
  bool backward = false;
  int round = 0;
  int visit = 0;  // index into ModelSpec::forward
  int unit = 0;
};

// The first visit whose unit has something to train: where backward ends. forward.size() if nothing
// is trainable.
int FirstTrainableVisit(const ModelSpec& model);
bool IsTrainable(const ModelSpec& model, UnitId unit);

std::vector<PlannedScope> ScopesOfStep(const ModelSpec& model, int rounds);
// One walk of an evaluation: forward only.
std::vector<PlannedScope> ScopesOfWalk(const ModelSpec& model);

}  // namespace ebb::sharding
