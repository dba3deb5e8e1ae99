#include "ebb/sharding/lower_tiers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "passes_of.h"
#include "unit_chain.h"

namespace ebb::sharding::lower_tiers_test {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

constexpr int64_t kElements = 50'000;

Config Plain(int rounds = 1) {
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = rounds;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.zero.offload_param.max_in_cpu = 0;
  return config;
}

// The operations of a plan of three units on two ranks, boundaries between them.
struct Lowered {
  explicit Lowered(const Config& of, int64_t boundary = 0, int units = 3)
      : model(UnitChain(std::vector<int64_t>(static_cast<size_t>(units), kElements), boundary)),
        config(of),
        passes({.model = &model, .config = &config, .world = 2, .optimizer_states = 2}),
        plan(passes.Lowered()) {}

  std::vector<const Operation*> Of(std::initializer_list<OperationKind> kinds) const {
    std::vector<const Operation*> found;
    for (const Operation& operation : plan.operations)
      if (std::find(kinds.begin(), kinds.end(), operation.kind) != kinds.end())
        found.push_back(&operation);
    return found;
  }
  // Operations of the moment in which a scope closes.
  std::vector<OperationKind> AtClose(int scope) const {
    std::vector<OperationKind> kinds;
    for (const Moment& moment : plan.moments) {
      if (moment.kind != Moment::kClose || moment.scope != scope) continue;
      for (int index : moment.operations())
        kinds.push_back(plan.operations[static_cast<size_t>(index)].kind);
    }
    return kinds;
  }

  const ModelSpec model;
  const Config config;
  const PassesOf passes;
  const Plan plan;
};

TEST(LowerTiers, AReductionOnTheDeviceLeavesItsSumInTheShard) {
  const Lowered lowered(Plain());
  EXPECT_THAT(lowered.AtClose(3), ElementsAre(OperationKind::kReduce, OperationKind::kNorm));
  for (const Operation* reduce : lowered.Of({OperationKind::kReduce})) {
    const int unit = reduce->parts.front().unit;
    EXPECT_EQ(reduce->operands[1].place, lowered.plan.pools.GradientShard(unit));
  }
}

TEST(LowerTiers, ContributionsOfRoundsAreAddedToTheShard) {
  Config config = Plain(/*rounds=*/2);
  config.ebb.micro_batches_per_round = 1;
  const Lowered lowered(config);
  const std::vector<const Operation*> sums = lowered.Of({OperationKind::kAccumulate});
  ASSERT_EQ(sums.size(), 6u);
  for (size_t i = 0; i < sums.size(); ++i) {
    EXPECT_EQ(sums[i]->operands[1].access, i < 3 ? Access::kWrite : Access::kReadWrite);
    EXPECT_EQ(sums[i]->parts.front().last, i >= 3);
  }
}

TEST(LowerTiers, AShardOnNvmeIsSummedInASlot) {
  Config config = Plain();
  config.zero.offload_optimizer.device = Tier::kNvme;
  config.ebb.offload_gradients = Tier::kNvme;
  const Lowered lowered(config);
  EXPECT_THAT(lowered.AtClose(3), ElementsAre(OperationKind::kReduce, OperationKind::kDownload,
                                              OperationKind::kNorm, OperationKind::kWrite));
  const SlotRing& slots = lowered.plan.pools.gradient_slots;
  int use = 0;
  for (const Operation* norm : lowered.Of({OperationKind::kNorm}))
    EXPECT_EQ(norm->operands[0].place, slots.Slot(use++));
}

TEST(LowerTiers, StatesOnNvmePassThroughTheSlotOfTheirUpdate) {
  Config config = Plain();
  config.zero.offload_optimizer.device = Tier::kNvme;
  const Lowered lowered(config);
  const WorkSlots& slots = lowered.plan.pools.host_work;
  int use = 0;
  for (const Operation& operation : lowered.plan.operations) {
    if (operation.kind != OperationKind::kUpdate) continue;
    const Place slot = slots.ring.Slot(use++);
    EXPECT_EQ(operation.stream, StreamId::kHostUpdate);
    EXPECT_EQ(operation.operands[1].place, slot.Plus(slots.master));
    EXPECT_EQ(operation.operands[3].place, slot.Plus(slots.states));
    EXPECT_EQ(operation.operands[4].place, slot.Plus(slots.states + slots.states_stride));
    // Read before, and written behind it.
    const auto touches = [&](OperationKind kind, const Operation& other) {
      return other.kind == kind &&
             std::any_of(other.operands.begin(), other.operands.end(), [&](const Operand& each) {
               return each.place == operation.operands[1].place;
             });
    };
    const auto* const begin = lowered.plan.operations.data();
    const auto* const end = begin + lowered.plan.operations.size();
    EXPECT_TRUE(std::any_of(begin, &operation, [&](const Operation& other) {
      return touches(OperationKind::kRead, other);
    }));
    EXPECT_TRUE(std::any_of(&operation, end, [&](const Operation& other) {
      return touches(OperationKind::kWrite, other);
    }));
  }
  EXPECT_EQ(use, std::ssize(lowered.plan.pools.placement.sub_groups));
}

TEST(LowerTiers, ParametersReadForGathersAreUploadedToTheirSlice) {
  Config config = Plain();
  config.zero.offload_param.device = config.zero.offload_optimizer.device = Tier::kNvme;
  const Lowered lowered(config);
  std::vector<Place> read, uploaded, slices, gathered;
  for (const Operation& operation : lowered.plan.operations) {
    if (operation.kind == OperationKind::kRead && operation.stream == StreamId::kReadParameters) {
      for (const Move& move : operation.moves) read.push_back(move.to);
    } else if (operation.kind == OperationKind::kUpload) {
      for (const Move& move : operation.moves) {
        uploaded.push_back(move.from);
        slices.push_back(move.to);
      }
    } else if (operation.kind == OperationKind::kGather) {
      gathered.push_back(operation.operands[0].place);
    }
  }
  EXPECT_FALSE(read.empty());
  EXPECT_THAT(uploaded, ElementsAreArray(read));
  EXPECT_THAT(gathered, ElementsAreArray(slices));
}

// The first of three rounds takes the slots that the others take.
TEST(LowerTiers, SlotsOfBoundariesBeginAnewInEveryRound) {
  Config config = Plain(/*rounds=*/3);
  config.ebb.micro_batches_per_round = 1;
  config.ebb.offload_activations = Tier::kNvme;
  const Lowered lowered(config, /*boundary=*/4'096, /*units=*/7);
  std::vector<Place> slots;
  for (const Operation* write : lowered.Of({OperationKind::kWrite, OperationKind::kRead}))
    slots.push_back(write->kind == OperationKind::kWrite ? write->moves.front().from
                                                         : write->moves.front().to);
  ASSERT_GT(slots.size(), 0u);
  ASSERT_EQ(slots.size() % 3, 0u);
  for (size_t i = 0; i < slots.size(); ++i) EXPECT_EQ(slots[i], slots[i % (slots.size() / 3)]);
}

}  // namespace
}  // namespace ebb::sharding::lower_tiers_test
