#include "ebb/runtime/engine/engine.h"

int main() {
  ebb::ModelSpec model;
  const ebb::UnitId unit = model.AddUnit("unit");
  model.Add(unit, {.name = "weight", .shape = {64}, .init = ebb::Constant(1)});
  model.forward.push_back({.unit = unit});
  return ebb::PredictMemory(model, /*world=*/2, ebb::Config{.micro_batch_size = 1}).ok() ? 0 : 1;
}
