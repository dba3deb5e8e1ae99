#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/hash/hash.h"
#include "ebb/sharding/lower/lower_updates.h"
#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/waits.h"
#include "passes_of.h"
#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::lower_test {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

bool IsOfExchange(Role kind) {
  using enum Role;
  for (Role of :
       {kSeal, kExchange, kConclude, kSealNorms, kExchangeNorms, kConcludeNorms, kCopyControl})
    if (kind == of) return true;
  return false;
}

// The exchange of a plan, in the order of the reduce stream.
std::vector<const Op*> ExchangeOf(const Plan& plan) {
  std::vector<const Op*> found;
  for (const Op& operation : plan.ops)
    if (operation.number >= 0 && IsOfExchange(operation.role)) found.push_back(&operation);
  return found;
}

bool HasNormsOn(const Plan& plan, bool device) {
  const std::vector<SubGroup>& groups = plan.table.sub_groups;
  return std::any_of(groups.begin(), groups.end(), [&](const SubGroup& group) {
    return (group.tier == Tier::kDevice) == device &&
           plan.decisions.norm_states[static_cast<size_t>(group.unit)] >= 0;
  });
}

std::vector<Role> Expected(const Plan& plan, bool walk) {
  using enum Role;
  std::vector<Role> kinds = {kSeal, kCopyControl, kExchange, kCopyControl, kConclude};
  if (walk) return kinds;
  kinds.push_back(kCopyControl);
  if (!plan.decisions.has_norms()) return kinds;
  if (HasNormsOn(plan, /*device=*/true)) kinds.push_back(kCopyControl);
  kinds.push_back(kSealNorms);
  if (LayOutNormRecords(plan.layout, plan.decisions).exchanged())
    kinds.insert(kinds.end(), {kCopyControl, kExchangeNorms, kCopyControl});
  kinds.insert(kinds.end(), {kConcludeNorms, kCopyControl});
  return kinds;
}

template <class Check>
void ForEachPlan(Check check) {
  for (int number = 1; number <= 60; ++number) {
    const RandomCase random(static_cast<uint64_t>(number), /*offloads=*/number % 2 == 0);
    SCOPED_TRACE(random.description());
    const absl::StatusOr<Plan> step = PlanStep(random.inputs()), walk = PlanWalk(random.inputs());
    ASSERT_OK(step);
    ASSERT_OK(walk);
    for (const Plan* plan : {&*step, &*walk}) {
      const bool has_backward =
          std::any_of(plan->scopes.begin(), plan->scopes.end(),
                      [](const PlannedScope& scope) { return scope.backward; });
      check(*plan, /*walk=*/!has_backward);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(LowerExchange, EachPartIsAnOperationOfItsOwn) {
  ForEachPlan([](const Plan& plan, bool walk) {
    std::vector<Role> kinds;
    for (const Op* operation : ExchangeOf(plan)) kinds.push_back(operation->role);
    ASSERT_THAT(kinds, ElementsAreArray(Expected(plan, walk)));
  });
}

// A record goes from the cell where it is sealed to the cells that are concluded from, through the
// staging pool.
TEST(LowerExchange, EachPartReadsTheOutputOfThePartBefore) {
  ForEachPlan([](const Plan& plan, bool) {
    const std::vector<const Op*> parts = ExchangeOf(plan);
    const ControlCells cells(static_cast<int>(plan.layout.units.size()));
    for (size_t i = 1; i < parts.size(); ++i) {
      const std::span<const Operand> before = parts[i - 1]->operands, here = parts[i]->operands;
      const bool ends = before.back().place.pool == StateClass::kControl &&
                        before.back().place.offset == cells.device_constants();
      const bool follows = std::any_of(before.begin(), before.end(), [&](const Operand& written) {
        return Writes(written.access) &&
               std::any_of(here.begin(), here.end(), [&](const Operand& read) {
                 return Reads(read.access) && read.place == written.place &&
                        read.bytes() == written.bytes();
               });
      });
      ASSERT_EQ(follows, !ends) << "part " << i;
    }
  });
}

// Every gradient whose name it may look for: where updates wait for the verdict, in memory.
TEST(LowerExchange, ARecordIsCompletedAfterTheGradientsThatItChecks) {
  int looks = 0;
  ForEachPlan([&](const Plan& plan, bool walk) {
    const Op& seal = *ExchangeOf(plan).front();
    std::vector<Place> shards, expected;
    for (const Operand& operand : seal.operands)
      if (operand.place.pool == StateClass::kGradient && operand.access != Access::kNone)
        shards.push_back(operand.place);
    for (int unit = 0; unit < plan.table.units; ++unit) {
      const int shard = plan.table.Find(Purpose::kGradientShard, unit);
      const bool reads = !walk && plan.decisions.timing != UpdateTiming::kEarly &&
                         SectionOf(plan, unit, /*trainable=*/true).shard > 0 &&
                         plan.table.TierOf(shard) != Tier::kNvme;
      if (reads) expected.push_back(plan.table.OwnSlice(shard));
    }
    ASSERT_EQ(shards.size(), expected.size());
    for (size_t i = 0; i < shards.size(); ++i) ASSERT_TRUE(shards[i] == expected[i]);
    looks += static_cast<int>(expected.size());
  });
  EXPECT_GT(looks, 0);
}

// On the host they need no copy: an update there waits for the verdict alone.
TEST(LowerExchange, UpdatesReadConstantsWhereTheyRun) {
  int on_host = 0, on_device = 0;
  ForEachPlan([&](const Plan& plan, bool) {
    const ControlCells cells(static_cast<int>(plan.layout.units.size()));
    for (const Op& operation : plan.ops) {
      if (operation.role != Role::kUpdate) continue;
      const bool early = operation.updates.front().early;
      const bool device = operation.stream == StreamId::kUpdate;
      (device ? on_device : on_host) += 1;
      const int64_t cell = device ? (early ? cells.device_early() : cells.device_constants())
                                  : (early ? cells.early() : cells.constants());
      ASSERT_TRUE(std::any_of(
          operation.operands.begin(), operation.operands.end(), [&](const Operand& operand) {
            return operand.place.pool == StateClass::kControl && operand.place.offset == cell;
          }));
    }
  });
  EXPECT_GT(on_host, 0);
  EXPECT_GT(on_device, 0);
}

// A step goes on after an evaluation with the same data. Memory is modelled as one number for each
// cell, which stands for its writer and the contents that the writer read.

class CellMemory {
 public:
  explicit CellMemory(const Cells& cells)
      : cells_(cells), contents_(static_cast<size_t>(cells.count()), 0) {}

  void Run(const Op& op) {
    uint64_t content = absl::HashOf(op.role);
    ForEach(op, Reads, [&](size_t cell) { content = absl::HashOf(content, contents_[cell]); });
    Write(op, content);
  }
  // Writes like another list. Secondary shards stay, because lists share the parameters.
  void Overwrite(const Op& op) {
    if (op.role != Role::kFillSecondary) Write(op, kOther);
  }
  template <class Visit>
  void ForEach(const Op& op, bool (*touches)(Access), Visit visit) const {
    std::vector<CellRange> ranges;
    for (const Operand& operand : op.operands) {
      if (touches(operand.access) && operand.place.pool != StateClass::kControl)
        cells_.Find(operand, ranges);
    }
    for (const auto& [begin, end] : ranges)
      for (int cell = begin; cell < end; ++cell) visit(static_cast<size_t>(cell));
  }
  uint64_t operator[](size_t cell) const { return contents_[cell]; }

 private:
  static constexpr uint64_t kOther = 1;
  void Write(const Op& op, uint64_t content) {
    ForEach(op, Writes, [&](size_t cell) { contents_[cell] = content; });
  }

  const Cells& cells_;
  std::vector<uint64_t> contents_;
};

// Cells that the rest of the list reads with their contents at `next`.
std::vector<size_t> FindExpected(const CellMemory& memory, const OpList& list, int next,
                                 int cells) {
  std::vector<uint8_t> is_written(static_cast<size_t>(cells), 0);
  std::vector<size_t> expected;
  for (const Op& op : std::span(list.ops).subspan(next)) {
    memory.ForEach(op, Reads, [&](size_t cell) {
      if (!is_written[cell]) expected.push_back(cell);
    });
    memory.ForEach(op, Writes, [&](size_t cell) { is_written[cell] = 1; });
  }
  return expected;
}

TEST(Interruption, BringsAgainTheDataThatTheRestOfAStepReads) {
  constexpr int kMoments = 4;  // of each case
  int64_t brought = 0;
  for (int number = 1; number <= Cases(200); ++number) {
    const RandomCase random_case(static_cast<uint64_t>(number), /*offloads=*/number % 2 == 0,
                                 /*orders=*/number % 3 == 0);
    SCOPED_TRACE(random_case.description());
    const Plan step = *PlanStep(random_case.inputs()), walk_plan = *PlanWalk(random_case.inputs());
    const OpList list = ListOf(step, /*carrying=*/false),
                 walk = ListOf(walk_plan, /*carrying=*/false);
    const OpList* const all[] = {&list, &walk};
    const Cells cells(all, step);
    Random random(random_case.seed);
    for (int i = 0; i < kMoments; ++i) {
      const auto at = static_cast<size_t>(random.Between(1, std::ssize(list.moments) - 1));
      // Between scopes, and where no boundary of the engine's is under way.
      const bool is_open = list.moments[at - 1].kernels >= 0;
      const bool has_boundaries = HasBoundaries(step.table);
      if (is_open || has_boundaries) continue;
      const int next = list.moments[at].begin;
      CellMemory memory(cells);
      for (int index = 0; index < next; ++index) memory.Run(list.ops[static_cast<size_t>(index)]);
      const CellMemory before = memory;
      for (const Op& op : walk.ops) memory.Overwrite(op);
      for (const int index : FindToBringAgain(cells, list, next)) {
        memory.Run(list.ops[static_cast<size_t>(index)]);
        ++brought;
      }
      for (const size_t cell : FindExpected(memory, list, next, cells.count()))
        ASSERT_EQ(memory[cell], before[cell]) << "before operation " << next;
    }
  }
  EXPECT_GT(brought, 0);
}

TEST(Interruption, AStepWithoutPrefetchHasNothingToBringAgainBetweenScopes) {
  for (int number = 1; number <= Cases(50); ++number) {
    RandomCase random_case(static_cast<uint64_t>(number));
    random_case.config.zero.stage = 3;
    random_case.config.ebb.prefetch_depth = 0;
    random_case.config.ebb.reshard_after_forward = true;
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> step = PlanStep(random_case.inputs());
    if (!step.ok()) continue;
    const OpList list = ListOf(*step, /*carrying=*/false);
    const OpList* const all[] = {&list};
    const Cells cells(all, *step);
    EXPECT_TRUE(FindToBringAgain(cells, list, list.moments.front().end).empty());
    EXPECT_TRUE(FindToBringAgain(cells, list, list.moments.back().begin).empty());
  }
}

// Units of updates, in the order of issue.
std::vector<int> UpdatedUnits(const Config& config) {
  const ModelSpec model = UnitChain({4096, 4096, 4096, 4096, 4096, 4096});
  const absl::StatusOr<Plan> plan =
      PlanStep({.model = &model, .config = &config, .optimizer_states = 2});
  EXPECT_OK(plan);
  std::vector<int> units;
  for (const Op& op : plan->ops)
    if (op.role == Role::kUpdate) units.push_back(op.parts.front().unit);
  units.erase(std::unique(units.begin(), units.end()), units.end());  // several sub-groups
  return units;
}

// The second of three comes behind all gradients, in forward order. Parameters on NVMe have carried
// updates instead.
TEST(EarlyUpdates, OfStatesBelowTheDeviceWaitForTheLastGradientOneOfThree) {
  Config config;
  config.micro_batch_size = 1;
  config.gradient_accumulation_steps = 1;
  config.compute = DType::kBFloat16;
  config.gradient_clipping = 0;
  config.ebb.check_overflow = false;
  config.bf16_check_grad_overflow = false;
  config.ebb.coalesce_bytes = 0;
  config.zero.stage = 1;
  EXPECT_THAT(UpdatedUnits(config), ElementsAre(5, 4, 3, 2, 1, 0)) << "on the device";
  for (const Tier states : {Tier::kCpu, Tier::kNvme}) {
    config.zero.offload_optimizer = {.device = states, .nvme_paths = {"/disk"}};
    EXPECT_THAT(UpdatedUnits(config), ElementsAre(5, 3, 2, 0, 1, 4));
  }
  config.gradient_clipping = 1;
  EXPECT_THAT(UpdatedUnits(config), ElementsAre(0, 1, 2, 3, 4, 5)) << "late";
}

}  // namespace
}  // namespace ebb::sharding::lower_test
