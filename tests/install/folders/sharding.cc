#include "ebb/sharding/model.h"

int main() {
  ebb::ModelSpec model;
  const ebb::UnitId unit = model.AddUnit("unit");
  model.Add(unit, {.name = "weight", .shape = {64}, .init = ebb::Normal(1, /*seed=*/1)});
  model.forward.push_back({.unit = unit});
  return ebb::Validate(model).ok() ? 0 : 1;
}
