#include "ebb/sharding/swap_ins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "passes_of.h"
#include "random_model.h"
#include "unit_chain.h"

namespace ebb::sharding::swap_ins_test {
namespace {

using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::IsEmpty;

constexpr int kUnits = 6;

ModelSpec Chain() {
  return UnitChain(std::vector<int64_t>(kUnits, 50'000));
}

// All on NVMe, with two slots for parameters.
Config OnNvme(bool early) {
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = 1;
  config.gradient_clipping = early ? 0 : 1;
  config.ebb.check_overflow = !early;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.zero.offload_param.device = config.zero.offload_optimizer.device = Tier::kNvme;
  config.zero.offload_param.max_in_cpu = 0;
  config.zero.offload_param.buffer_count = 2;
  return config;
}

PlanInputs InputsOf(const ModelSpec& model, const Config& config) {
  return {.model = &model, .config = &config, .world = 1, .optimizer_states = 2};
}

TEST(SwapIns, TakeSlotsRoundRobinAndKnowTheirSlotsLastUser) {
  for (int seed = 1; seed <= Cases(200); ++seed) {
    const RandomCase random_case(static_cast<uint64_t>(seed), /*offloads=*/true);
    SCOPED_TRACE(random_case.description());
    for (const PlanKind kind : {PlanKind::kStep, PlanKind::kWalk}) {
      const PassesOf passes(random_case.inputs(), kind);
      const int slots = passes.plan.pools.parameter_slots.count;
      std::map<int, int> users;  // by slot
      for (size_t t = 0; t < passes.swap_ins.reads.size(); ++t) {
        const SwapIn& swap_in = passes.swap_ins.reads[t];
        const auto user = users.find(swap_in.number % slots);
        ASSERT_EQ(swap_in.after, user == users.end() ? -1 : user->second);
        users[swap_in.number % slots] = static_cast<int>(t);
      }
    }
  }
}

TEST(SwapIns, PiecesLieBesideEachOtherInTheirSlot) {
  for (int seed = 1; seed <= Cases(200); ++seed) {
    const RandomCase random_case(static_cast<uint64_t>(seed), /*offloads=*/true);
    SCOPED_TRACE(random_case.description());
    const PassesOf passes(random_case.inputs());
    const Plan& plan = passes.plan;
    for (const SwapIn& swap_in : passes.swap_ins.reads) {
      std::vector<std::pair<int64_t, int64_t>> pieces;
      for (int unit : swap_in.units) {
        for (const bool trainable : {true, false}) {
          for (const ParameterPiece& piece :
               plan.pools.placement.units[static_cast<size_t>(unit)].pieces(trainable)) {
            if (piece.place.tier != Tier::kNvme) continue;
            const int64_t at = InSlot(plan, swap_in, unit, trainable, piece.begin).offset;
            pieces.emplace_back(at, at + piece.count() * SizeOf(plan.decisions.compute));
            const int64_t last = InSlot(plan, swap_in, unit, trainable, piece.end - 1).offset;
            ASSERT_EQ(last, pieces.back().second - SizeOf(plan.decisions.compute));
          }
        }
      }
      std::sort(pieces.begin(), pieces.end());
      const SlotRing& slots = plan.pools.parameter_slots;
      int64_t end = slots.Slot(swap_in.number).offset;
      for (const auto& [from, to] : pieces) {
        ASSERT_GE(from, end);
        end = to;
      }
      ASSERT_LE(end, slots.Slot(swap_in.number).offset + slots.bytes);
    }
  }
}

TEST(SwapIns, FirstVisitsUseTheParametersThatLateUpdatesWrite) {
  const ModelSpec model = Chain();
  const Config config = OnNvme(/*early=*/false);
  const PassesOf passes(InputsOf(model, config));
  ASSERT_THAT(passes.swap_ins.reads.size(), Gt(kUnits));
  for (size_t t = 0; t < passes.swap_ins.reads.size(); ++t) {
    const SwapIn& swap_in = passes.swap_ins.reads[t];
    if (t < kUnits) {
      EXPECT_EQ(swap_in.updated, swap_in.units);
      EXPECT_EQ(passes.swap_ins.of_update[static_cast<size_t>(swap_in.units.front())],
                static_cast<int>(t));
    } else {
      EXPECT_THAT(swap_in.updated, IsEmpty());
    }
    EXPECT_THAT(swap_in.shared, IsEmpty());
  }
}

TEST(SwapIns, ADrainHasOneForEachCarriedUpdate) {
  const ModelSpec model = Chain();
  const Config config = OnNvme(/*early=*/false);
  const PassesOf drain(InputsOf(model, config), PlanKind::kDrain);
  std::vector<int> updated;
  for (const SwapIn& swap_in : drain.swap_ins.reads)
    updated.insert(updated.end(), swap_in.updated.begin(), swap_in.updated.end());
  EXPECT_THAT(updated, ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST(SwapIns, AWalkCarriesAndSharesNothing) {
  const ModelSpec model = Chain();
  const Config config = OnNvme(/*early=*/true);
  const PassesOf walk(InputsOf(model, config), PlanKind::kWalk);
  EXPECT_EQ(walk.swap_ins.reads.size(), static_cast<size_t>(kUnits));
  for (const SwapIn& swap_in : walk.swap_ins.reads) {
    EXPECT_THAT(swap_in.updated, IsEmpty());
    EXPECT_THAT(swap_in.shared, IsEmpty());
  }
}

// The slot of a shared read is taken again only after the update that shares it.
TEST(SwapIns, EarlyUpdatesShareTheLastReadOfTheirUnit) {
  for (const bool split : {false, true}) {
    const ModelSpec model = Chain();
    Config config = OnNvme(/*early=*/true);
    config.ebb.split_master = split;
    const PassesOf passes(InputsOf(model, config));
    std::vector<size_t> last(kUnits);
    for (size_t t = 0; t < passes.swap_ins.reads.size(); ++t)
      for (int unit : passes.swap_ins.reads[t].units) last[static_cast<size_t>(unit)] = t;
    int shared = 0;
    for (size_t t = 0; t < passes.swap_ins.reads.size(); ++t) {
      for (int unit : passes.swap_ins.reads[t].shared) {
        ++shared;
        EXPECT_EQ(last[static_cast<size_t>(unit)], t);
        EXPECT_FALSE(passes.swap_ins.carried[static_cast<size_t>(unit)]);
        EXPECT_EQ(passes.swap_ins.of_update[static_cast<size_t>(unit)], static_cast<int>(t));
        const SubGroup& group = passes.plan.pools.placement.sub_groups[static_cast<size_t>(
            passes.plan.pools.placement.units[static_cast<size_t>(unit)].first_sub_group)];
        EXPECT_EQ(
            passes.swap_ins.shares_masters(
                passes.plan.pools.placement.units[static_cast<size_t>(unit)].first_sub_group),
            !split && SharesMasters(passes.plan.decisions, passes.plan.pools.placement, group));
      }
    }
    EXPECT_GT(shared, 0) << split;
  }
}

// A round in the middle always reads parameters, and only some updates can use them.
TEST(SwapIns, ReadsThatTheRoundBeforeIssuesAheadShareParametersOnly) {
  for (const bool split : {false, true}) {
    const ModelSpec model = Chain();
    Config config = OnNvme(/*early=*/true);
    config.zero.offload_param.buffer_count = 2 * kUnits;
    config.ebb.split_master = split;
    const auto shared_of = [&](int64_t rounds) {
      config.gradient_accumulation_steps = rounds;
      const PassesOf passes(InputsOf(model, config));
      size_t shared = 0;
      for (const SwapIn& swap_in : passes.swap_ins.reads) shared += swap_in.shared.size();
      return shared;
    };
    if (split) {
      EXPECT_EQ(shared_of(5), shared_of(1));
    } else {
      EXPECT_LT(shared_of(5), shared_of(1));
    }
  }
}

// If all parameters fit into RAM, none is on the disk, even if the config names one.
TEST(CarriedUpdates, AreOfParametersOnNvmeAlone) {
  const ModelSpec model = Chain();
  Config config = OnNvme(/*early=*/false);
  for (const bool fits : {false, true}) {
    config.zero.offload_param.max_in_cpu = fits ? 1'000'000'000 : 0;
    const absl::StatusOr<Plan> step = PlanStep(InputsOf(model, config));
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_EQ(step->carries_updates, !fits);
  }
}

}  // namespace
}  // namespace ebb::sharding::swap_ins_test
