// The passes of one plan, one after the other, each on what those before it have made.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "ebb/sharding/lower/emit.h"
#include "tests/status.h"

namespace ebb::sharding {

// Not to be moved: the passes refer to each other.
struct PassesOf {
  explicit PassesOf(const PlanInputs& inputs, PlanKind kind = PlanKind::kStep)
      : plan(Planned(inputs, kind)),
        residency(PlanResidency(
            plan.scopes, Elements(plan), plan.decisions.kept_whole,
            {.has_secondary = plan.decisions.has_secondary() && kind == PlanKind::kStep})),
        reduction(PlanReduction(plan.scopes, plan.layout, plan.decisions,
                                static_cast<int>(inputs.model->forward.size()),
                                /*group_bytes=*/0)),
        in{.kind = kind,
           .model = *inputs.model,
           .plan = plan,
           .residency = residency,
           .reduction = reduction},
        swap_ins(PlanSwapIns(in)) {}
  PassesOf(const PassesOf&) = delete;

  const Plan plan;            // with its own residency and buckets; its pools fit these
  const Residency residency;  // each unit alone, one ahead
  const Reduction reduction;  // each alone
  const PassInputs in;
  const SwapIns swap_ins;

 private:
  static Plan Planned(const PlanInputs& inputs, PlanKind kind) {
    absl::StatusOr<Plan> plan = kind == PlanKind::kStep   ? PlanStep(inputs)
                                : kind == PlanKind::kWalk ? PlanWalk(inputs)
                                                          : PlanDrain(inputs);
    EXPECT_OK(plan);
    return *std::move(plan);
  }
  static std::vector<int64_t> Elements(const Plan& plan) {
    std::vector<int64_t> elements;
    for (const UnitLayout& unit : plan.layout.units) elements.push_back(unit.elements());
    return elements;
  }
};

}  // namespace ebb::sharding
