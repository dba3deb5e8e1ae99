#include "ebb/sharding/plan.h"
#include "ebb/sharding/plan_table.h"

int main() {
  ebb::ModelSpec model;
  const ebb::UnitId unit = model.AddUnit("unit");
  model.Add(unit, {.name = "weight", .shape = {64}, .init = ebb::Normal(1, /*seed=*/1)});
  model.forward.push_back({.unit = unit});
  const auto config = ebb::Config{.micro_batch_size = 1}.ForWorld(2);
  if (!config.ok()) return 1;
  const auto plan = ebb::sharding::PlanStep({.model = &model, .config = &*config, .world = 2});
  return plan.ok() && plan->operations.size() > 0 ? 0 : 2;
}
