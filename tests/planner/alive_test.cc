// Bytes in use at each operation, of lists that are written here and of plans.

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "ebb/runtime/engine/program.h"
#include "ebb/runtime/planner/model.h"
#include "ebb/runtime/planner/model_shape.h"
#include "ebb/sharding/memory_model.h"
#include "tests/status.h"

namespace ebb::sharding::alive_test {
namespace {

constexpr auto kGather = static_cast<size_t>(StateClass::kGather);

struct Use {
  Access access = Access::kRead;
  int64_t offset = 0, bytes = 0;
};

// One operation for each list.
std::vector<int64_t> AliveOf(const std::vector<std::vector<Use>>& ops) {
  std::vector<std::vector<Operand>> operands;
  for (const std::vector<Use>& uses : ops) {
    std::vector<Operand> of;
    for (const Use& use : uses)
      of.push_back(
          {.place = {.tier = Tier::kDevice, .pool = StateClass::kGather, .offset = use.offset},
           .access = use.access,
           .count = use.bytes});
    operands.push_back(std::move(of));
  }
  OpList list;
  for (const std::vector<Operand>& of : operands) {
    Op op;
    op.operands = of;
    list.ops.push_back(op);
  }
  std::vector<int64_t> alive;
  for (const ClassBytes& classes : AliveBytes(list, Tier::kDevice))
    alive.push_back(classes[kGather]);
  return alive;
}

TEST(AliveBytes, AValueIsInUseFromItsWriteToItsLastRead) {
  EXPECT_EQ(AliveOf({{{Access::kWrite, 0, 8}}, {}, {{Access::kRead, 0, 8}}, {}}),
            (std::vector<int64_t>{8, 8, 8, 0}));
}

TEST(AliveBytes, BetweenTwoValuesAPlaceIsFree) {
  EXPECT_EQ(AliveOf({{{Access::kWrite, 0, 8}},
                     {{Access::kRead, 0, 8}},
                     {},
                     {{Access::kWrite, 0, 8}},
                     {{Access::kRead, 0, 4}}}),
            (std::vector<int64_t>{8, 8, 0, 8, 4}));
}

TEST(AliveBytes, StateThatAStepReadsFirstIsAliveFromTheStepBefore) {
  EXPECT_EQ(AliveOf({{}, {{Access::kRead, 0, 8}}, {}, {{Access::kWrite, 0, 8}}, {}}),
            (std::vector<int64_t>{8, 8, 0, 8, 8}));
  EXPECT_EQ(AliveOf({{}, {{Access::kReadWrite, 0, 8}}, {}}), (std::vector<int64_t>{8, 8, 8}));
}

// One operation's list has both, in any order.
TEST(AliveBytes, AnOperationThatReadsAndWritesKeepsTheValue) {
  EXPECT_EQ(AliveOf({{{Access::kWrite, 0, 8}},
                     {{Access::kRead, 0, 8}, {Access::kWrite, 4, 4}},
                     {{Access::kRead, 0, 8}}}),
            (std::vector<int64_t>{8, 8, 8}));
}

TEST(AliveBytes, AreNeverMoreThanThePoolsHold) {
  const planner::Model model = planner::ModelOf(
      *planner::Complete({.layers = 6, .width = 64, .heads = 4, .vocabulary = 100, .context = 32}));
  const ModelSpec spec = *planner::SpecOf(model, {.context = 32});
  for (const int stage : {0, 1, 2, 3}) {
    Config config;
    config.micro_batch_size = 1;
    config.gradient_accumulation_steps = 2;
    config.compute = DType::kBFloat16;
    config.zero.stage = stage;
    config.zero.param_persistence_threshold = 0;
    ASSERT_OK_AND_ASSIGN(const Program program, PredictProgram(spec, 4, config));
    ClassBytes held = {}, most = {};
    for (const MemoryRow& row : program.memory())
      held[static_cast<size_t>(row.state)] = static_cast<int64_t>(row.predicted_bytes);
    const OpList list = ListOf(program.plan(), /*carrying=*/true);
    for (const ClassBytes& alive : AliveBytes(list, Tier::kDevice)) {
      for (size_t of = 0; of < most.size(); ++of) most[of] = std::max(most[of], alive[of]);
    }
    for (size_t of = 0; of < most.size(); ++of) {
      const std::string_view name = Name(static_cast<StateClass>(of));
      EXPECT_LE(most[of], held[of]) << name;
      EXPECT_GE(most[of], 0) << name;
    }
    // All of the masters are in use all the time, and at stage 3 two units are whole at once.
    const auto master = static_cast<size_t>(StateClass::kMaster);
    EXPECT_GT(most[master], held[master] - 4096);
    if (stage == 3) {
      EXPECT_GT(most[kGather], held[kGather] / 2);
    }
  }
}

}  // namespace
}  // namespace ebb::sharding::alive_test
