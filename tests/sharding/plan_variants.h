// Random cases of the tests of plans, and the plans that an engine may run on the pools of one.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "ebb/sharding/plan.h"
#include "random_model.h"
#include "tests/status.h"

namespace ebb::sharding {

inline int ConfiguredRounds(const Config& config) {
  return static_cast<int>(config.gradient_accumulation_steps / config.ebb.micro_batches_per_round);
}

// Every other case has something offloaded, every third declares an order.
inline RandomCase CaseOf(int number) {
  return RandomCase(static_cast<uint64_t>((number + 1) / 2), /*offloads=*/number % 2 == 0,
                    /*orders=*/number % 3 == 0);
}

struct Variant {
  Plan plan;
  bool walk = false;
};

// The config's own step first, then what else may run on its pools.
inline std::vector<Variant> Variants(const RandomCase& random_case) {
  std::vector<Variant> variants;
  const auto add = [&](absl::StatusOr<Plan> plan, bool walk) {
    ASSERT_OK(plan);
    variants.push_back({*std::move(plan), walk});
  };
  Random random(random_case.seed + 1'000'000);
  const PlanInputs inputs = random_case.inputs();
  add(PlanStep(inputs), false);
  add(PlanWalk(inputs), true);
  add(PlanStep(inputs, 1), false);
  add(PlanStep(inputs, 0, /*hold_updates=*/true), false);
  if (ConfiguredRounds(random_case.config) > 1) {
    add(PlanStep(inputs, static_cast<int>(random.Between(2, 6))), false);
    add(PlanStep(inputs, static_cast<int>(random.Between(2, 6)), random.OneIn(2)), false);
  }
  return variants;
}

}  // namespace ebb::sharding
