// Where one rank's slice is all of a gradient, the buffer that backward writes is the shard.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/instructions.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/pool.h"
#include "ebb/sharding/reduction.h"
#include "random_model.h"
#include "unit_chain.h"

namespace ebb::sharding::gradient_shard_test {
namespace {

constexpr int64_t kSizes[] = {3'000, 5'000, 700};

int64_t GradientBytes(const Plan& plan) {
  for (const MemoryRow& row : PredictMemory(plan)) {
    if (row.state == StateClass::kGradient && row.tier == Tier::kDevice)
      return static_cast<int64_t>(row.predicted_bytes);
  }
  return 0;
}

struct Setting {
  std::string name;
  Config config = {};
  int world = 1;
  bool is_shard = true;
};

// bf16, one round, one micro-batch: nothing is cut, cast or added up.
Config Plain() {
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = 1;
  config.zero.stage = 2;
  return config;
}

std::vector<Setting> Settings() {
  std::vector<Setting> settings;
  const auto add = [&](std::string name, bool is_shard, auto change, int world = 1) {
    settings.push_back(
        {.name = std::move(name), .config = Plain(), .world = world, .is_shard = is_shard});
    change(settings.back().config);
  };
  for (int stage = 0; stage <= 3; ++stage)
    add(absl::StrCat("Stage", stage), true, [&](Config& c) { c.zero.stage = stage; });
  add(
      "Replicas", true,
      [](Config& c) {
        c.compute = DType::kFloat32;
        c.ebb.shard_group = 1;
      },
      /*world=*/2);
  add("SummedInFp32OverAStep", true, [](Config& c) {
    c.communication = DType::kFloat32;
    c.gradient_accumulation_steps = 3;
    c.ebb.reduce_at = ReduceAt::kStep;
  });
  add("ParametersOnNvme", true, [](Config& c) {
    c.zero.stage = 3;
    c.zero.offload_param.device = Tier::kNvme;
  });
  add(
      "TwoShards", false, [](Config&) {}, /*world=*/2);
  add(
      "ReplicasThatRound", false, [](Config& c) { c.ebb.shard_group = 1; }, /*world=*/2);
  add("SeveralRounds", false, [](Config& c) { c.gradient_accumulation_steps = 2; });
  add("CastToSend", false,
      [](Config& c) { c.gradient_accumulation_steps = c.ebb.micro_batches_per_round = 2; });
  add("GradientsInRam", false, [](Config& c) {
    c.zero.offload_optimizer.device = Tier::kCpu;
    c.ebb.offload_gradients = Tier::kCpu;
  });
  return settings;
}

TEST(GradientShard, HasOneBufferWhereNothingIsCutCastOrAddedUp) {
  const ModelSpec model = UnitChain({kSizes, std::end(kSizes)});
  for (const Setting& setting : Settings()) {
    SCOPED_TRACE(setting.name);
    const absl::StatusOr<Plan> plan = PlanStep({.model = &model,
                                                .config = &setting.config,
                                                .world = setting.world,
                                                .optimizer_states = 2});
    ASSERT_TRUE(plan.ok()) << plan.status();
    int64_t shards = 0;
    for (size_t u = 0; u < std::size(kSizes); ++u) {
      const UnitPlacement& placement = plan->pools.placement.units[u];
      shards += PoolAligned(plan->layout.units[u].trainable.shard *
                            SizeOf(plan->decisions.shard_dtype(static_cast<int>(u))));
      const bool same = placement.gradient == Tier::kDevice &&
                        plan->pools.visits[u].gradient == plan->pools.units[u].gradient_shard;
      EXPECT_EQ(same, setting.is_shard) << "unit " << u;
      EXPECT_EQ(GradientIsShard(plan->decisions, plan->pools.placement, static_cast<int>(u)), same);
    }
    // The table has the shards and, elsewhere, whole gradients beside them.
    if (setting.is_shard) {
      EXPECT_EQ(GradientBytes(*plan), BufferBytes(shards));
    } else if (plan->pools.placement.units[0].gradient == Tier::kDevice) {
      EXPECT_GT(GradientBytes(*plan), BufferBytes(shards));
    }
  }
}

// A unit that is visited twice adds its gradients up in a shard; those around it have one buffer
// each.
TEST(GradientShard, IsDecidedByUnit) {
  ModelSpec model = UnitChain({kSizes, std::end(kSizes)});
  model.forward.push_back({.unit = UnitId{1}});
  const Config config = Plain();
  const absl::StatusOr<Plan> plan =
      PlanStep({.model = &model, .config = &config, .world = 1, .optimizer_states = 2});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(GradientIsShard(plan->decisions, plan->pools.placement, 0));
  EXPECT_FALSE(GradientIsShard(plan->decisions, plan->pools.placement, 1));
  EXPECT_TRUE(GradientIsShard(plan->decisions, plan->pools.placement, 2));
}

// Backward of such a unit waits for the update that reads the memory it writes. So does the zeroing
// of the gradient of a scope that is left out.
TEST(GradientShard, IsWrittenAfterTheUpdateOfTheStepBefore) {
  int kernels = 0;
  for (int number = 1; number <= Cases(300); ++number) {
    const RandomCase random_case(static_cast<uint64_t>(number), /*offloads=*/number % 2 == 0);
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs());
    ASSERT_TRUE(plan.ok()) << plan.status();
    const Fragment fragment = Lower(*plan, plan->carries_updates);
    std::vector<std::vector<Operand>> read_by_update(plan->layout.units.size());
    for (const Instruction& instruction : fragment.instructions) {
      if (instruction.code != Code::kUpdate) continue;
      read_by_update[static_cast<size_t>(instruction.parts.front().unit)].push_back(
          instruction.operands.front());
    }
    for (const Instruction& instruction : fragment.instructions) {
      if (instruction.scope < 0) continue;
      const PlannedScope& scope = plan->scopes[static_cast<size_t>(instruction.scope)];
      if (!scope.backward || !GradientIsShard(plan->decisions, plan->pools.placement, scope.unit))
        continue;
      const Operand& gradient = instruction.operands.back();
      for (const Operand& read : read_by_update[static_cast<size_t>(scope.unit)]) {
        if (read.place.pool != StateClass::kGradient) continue;  // a copy, for an update elsewhere
        ASSERT_TRUE(Writes(gradient.access));
        ASSERT_GE(read.place.offset, gradient.place.offset);
        ASSERT_LE(read.place.offset + read.bytes(), gradient.place.offset + gradient.bytes());
      }
      ++kernels;
    }
  }
  EXPECT_GT(kernels, 0);
}

}  // namespace
}  // namespace ebb::sharding::gradient_shard_test
