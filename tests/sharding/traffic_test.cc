// Bytes that a step moves between tiers, against formulas that know nothing of moves.
#include "ebb/sharding/report/traffic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <ostream>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::traffic_test {
namespace {

using Key = std::tuple<StateClass, Tier, Direction>;
using Rows = std::map<Key, int64_t>;

constexpr Direction kUp = Direction::kRead, kDown = Direction::kWrite;

Rows Predicted(const Plan& plan, bool carrying) {
  Rows table;
  for (const TrafficRow& row : PredictTraffic(plan, carrying))
    table[{row.state, row.tier, row.direction}] = static_cast<int64_t>(row.predicted_bytes);
  return table;
}

Tier TierOfShard(const Plan& plan, int unit) {
  return plan.table.TierOf(plan.table.Find(Purpose::kGradientShard, unit));
}

// Adds the reads of a sub-group's norms, which come before its update's.
template <class Add>
void AddNorms(const Plan& plan, const SubGroup& group, const Add& add) {
  using enum StateClass;
  const Decisions& d = plan.decisions;
  const Tier shard = TierOfShard(plan, group.unit);
  const bool on_host = group.tier != Tier::kDevice;
  const int64_t count = group.count(), gradient = count * SizeOf(d.shard_dtype(group.unit));
  if (group.tier == Tier::kNvme) {
    add(kMaster, Tier::kNvme, kUp, SwapAligned(d.MasterBytes(group.unit, count)));
    for (int k = 0; k < d.norm_states[static_cast<size_t>(group.unit)]; ++k)
      add(kOptimizer, Tier::kNvme, kUp, SwapAligned(d.StateBytes(group.unit, k, count)));
  }
  if (shard == Tier::kNvme) add(kGradient, Tier::kNvme, kUp, SwapAligned(gradient));
  if (on_host != (shard != Tier::kDevice))
    add(kGradient, Tier::kCpu, on_host ? kDown : kUp, gradient);
  if (!d.writes_parameters(group.unit) || !d.reads_parameters(group.unit)) return;
  const Tier tier = ParameterTierOf(plan.table, group);
  const int64_t bytes = count * SizeOf(d.compute_of(group.unit));
  if (tier == Tier::kNvme) add(kParameter, Tier::kNvme, kUp, SwapAligned(bytes));
  if (on_host != (tier != Tier::kDevice)) add(kParameter, Tier::kCpu, on_host ? kDown : kUp, bytes);
}

// Traffic by where everything lives, how often it is gathered and how often it is reduced.
Rows Formula(const Plan& plan, bool carrying) {
  Rows table;
  const auto add = [&](StateClass state, Tier tier, Direction direction, int64_t bytes) {
    if (bytes > 0) table[{state, tier, direction}] += bytes;
  };
  using enum StateClass;
  const Decisions& d = plan.decisions;
  const int64_t size = SizeOf(d.compute);
  std::vector<int> gathers(plan.layout.units.size()), contributions(plan.layout.units.size());
  const auto add_uses = [&](std::span<const Op> operations, int times) {
    for (const Op& operation : operations) {
      for (const Part& part : operation.parts) {
        const auto unit = static_cast<size_t>(part.unit);
        if (operation.role == Role::kGather) gathers[unit] += times;
        if (operation.role == Role::kReduce) contributions[unit] += times;
      }
    }
  };
  add_uses(plan.ops, 1);
  add_uses(plan.MiddleRound(), plan.step_rounds - d.rounds);
  for (size_t u = 0; u < plan.layout.units.size(); ++u) {
    const int number = static_cast<int>(u);
    const Tier tier = TierOfShard(plan, number);
    for (const bool trainable : {true, false}) {
      const int row = plan.table.Find(Purpose::kParameter, number, trainable);
      for (const Extent& piece : plan.table.ExtentsOf(row)) {
        const int64_t bytes = piece.count() * size;
        if (piece.place.tier != Tier::kDevice) add(kParameter, Tier::kCpu, kUp, gathers[u] * bytes);
        if (piece.place.tier != Tier::kNvme) continue;
        // The first gather takes parameters that a carried update has just written.
        const int reads = gathers[u] - (carrying && trainable && d.carried[u] ? 1 : 0);
        add(kParameter, Tier::kNvme, kUp, reads * SwapAligned(bytes));
      }
    }
    const int64_t shard = plan.layout.units[u].trainable.shard;
    if (tier != Tier::kDevice) {
      add(kGradient, Tier::kCpu, kDown, contributions[u] * shard * SizeOf(d.communication));
    }
    if (tier != Tier::kNvme) continue;
    const int64_t stored = SwapAligned(shard * SizeOf(d.shard_dtype(static_cast<int>(u))));
    add(kGradient, Tier::kNvme, kDown, contributions[u] * stored);
    add(kGradient, Tier::kNvme, kUp, (contributions[u] - 1) * stored);  // to be added to
    // Norms of the gradients that the trainer has left there.
    if (d.holds && contributions[u] > 0) add(kGradient, Tier::kNvme, kUp, stored);
  }
  for (int visit = 0; visit < plan.table.visits; ++visit) {
    const int64_t bytes = plan.table.ElementsOf(Purpose::kOutputAway, visit);
    if (bytes == 0) continue;
    for (const Direction direction : {kUp, kDown}) {
      add(kActivation, Tier::kCpu, direction, plan.step_rounds * bytes);
      if (d.activation_tier == Tier::kNvme)
        add(kActivation, Tier::kNvme, direction, plan.step_rounds * SwapAligned(bytes));
    }
  }
  // Gathers that take copies of masters, which are read for the update.
  for (const Op& operation : plan.ops) {
    if (operation.role != Role::kCastMasters) continue;
    for (const UpdateDetail& of : operation.updates) {
      const SubGroup& group = plan.table.sub_groups[static_cast<size_t>(of.sub_group)];
      table[{kParameter, Tier::kNvme, kUp}] -= SwapAligned(group.count() * size);
    }
  }
  // Updates find in the slot the data that the unit's last gather has read.
  if (d.reads_any_parameters() && d.timing == UpdateTiming::kEarly) {
    const int slots = plan.table.Find(Purpose::kParameterSlot);
    const int64_t first = plan.table.PlaceOf(slots).offset,
                  bytes = slots < 0 ? 0 : plan.table[slots].turns * plan.table[slots].turn_bytes;
    for (const Op& operation : plan.ops) {
      if (operation.role != Role::kWrite || operation.when != When::kAlways) continue;
      for (const Move move : operation.moves()) {
        const int64_t at = move.from.offset - first;
        if (move.state == kParameter && at >= 0 && at < bytes)
          table[{kParameter, Tier::kNvme, kUp}] -= move.bytes;
      }
    }
  }
  for (const SubGroup& group : plan.table.sub_groups) {
    const Tier shard = TierOfShard(plan, group.unit);
    const bool on_host = group.tier != Tier::kDevice;
    const int64_t count = group.count(), bytes = count * size;
    if (group.tier == Tier::kNvme) {
      for (const Direction direction : {kUp, kDown}) {
        add(kMaster, Tier::kNvme, direction, SwapAligned(d.MasterBytes(group.unit, count)));
        for (int k = 0; k < d.optimizer_states; ++k)
          add(kOptimizer, Tier::kNvme, direction, SwapAligned(d.StateBytes(group.unit, k, count)));
      }
    }
    if (shard == Tier::kNvme)
      add(kGradient, Tier::kNvme, kUp, SwapAligned(count * SizeOf(d.shard_dtype(group.unit))));
    if (on_host != (shard != Tier::kDevice)) {
      add(kGradient, Tier::kCpu, on_host ? kDown : kUp, count * SizeOf(d.shard_dtype(group.unit)));
    }
    if (d.norm_states[static_cast<size_t>(group.unit)] >= 0) AddNorms(plan, group, add);
    if (!d.writes_parameters(group.unit)) continue;
    const Tier tier = ParameterTierOf(plan.table, group);
    if (tier == Tier::kNvme) {
      add(kParameter, Tier::kNvme, kDown, SwapAligned(bytes));
      if (d.reads_parameters(group.unit)) add(kParameter, Tier::kNvme, kUp, SwapAligned(bytes));
    }
    if (on_host == (tier != Tier::kDevice)) continue;
    // Out of the update, and of masters that are split or parameters into it.
    add(kParameter, Tier::kCpu, on_host ? kUp : kDown, bytes);
    if (d.reads_parameters(group.unit)) add(kParameter, Tier::kCpu, on_host ? kDown : kUp, bytes);
  }
  std::erase_if(table, [](const auto& row) { return row.second == 0; });
  return table;
}

std::string ToString(const Rows& table) {
  std::string text;
  for (const auto& [key, bytes] : table) {
    const auto& [state, tier, direction] = key;
    text += std::string(Name(state)) + " " + std::string(Name(tier)) +
            (direction == kUp ? " read " : " write ") + std::to_string(bytes) + "\n";
  }
  return text;
}

TEST(Traffic, FollowsFromPlacementGathersAndReductions) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(static_cast<uint64_t>(seed), /*offloads=*/true);
    SCOPED_TRACE(random_case.description());
    for (const bool hold : {false, true}) {
      ASSERT_OK_AND_ASSIGN(const Plan plan, PlanStep(random_case.inputs(), 0, hold));
      if (plan.carries_updates) {
        // Without carried updates of the step before, and with those that it carries over.
        ASSERT_EQ(ToString(Predicted(plan, true)), ToString(Formula(plan, true)));
      } else {
        for (const bool carrying : {false, true})
          ASSERT_EQ(ToString(Predicted(plan, carrying)), ToString(Formula(plan, false)));
      }
    }
  }
}

TEST(Traffic, ADrainMovesTheBytesOfItsUpdatesAlone) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const RandomCase random_case(static_cast<uint64_t>(seed), /*offloads=*/true);
    SCOPED_TRACE(random_case.description());
    const absl::StatusOr<Plan> plan = PlanStep(random_case.inputs(), 0, /*hold_updates=*/true),
                               drain = PlanDrain(random_case.inputs());
    ASSERT_TRUE(plan.ok() && drain.ok()) << plan.status() << drain.status();
    // A first step and then the drain move the same bytes as a step in steady state, and read once
    // more the parameters that the update would have handed on.
    Rows both = Predicted(*plan, /*carrying=*/false);
    for (const auto& [key, bytes] : Predicted(*drain, /*carrying=*/true)) both[key] += bytes;
    for (auto& [key, bytes] : Predicted(*plan, /*carrying=*/true)) both[key] -= bytes;
    for (const auto& [key, bytes] : both) {
      const bool read_again = key == Key{StateClass::kParameter, Tier::kNvme, kUp};
      int64_t expected = 0;
      for (size_t u = 0; read_again && u < plan->layout.units.size(); ++u) {
        if (!plan->decisions.carried[u]) continue;
        const int row = plan->table.Find(Purpose::kParameter, static_cast<int>(u));
        for (const Extent& piece : plan->table.ExtentsOf(row)) {
          if (piece.place.tier == Tier::kNvme)
            expected += SwapAligned(piece.count() * SizeOf(plan->decisions.compute));
        }
      }
      ASSERT_EQ(bytes, expected) << Name(std::get<0>(key));
    }
  }
}

// Equal layers, all on NVMe, in layer-major order: one round of all micro-batches. In bytes per
// owned element of the layers but the last, which stays gathered from forward to backward.
struct PlainCase {
  const char* name;
  bool early = false, split = false, without_masters = false;
  int64_t states, parameters_read, parameters_written;
};
void PrintTo(const PlainCase& plain, std::ostream* out) {
  *out << plain.name;
}

class TrafficOfAllOnNvme : public ::testing::TestWithParam<PlainCase> {};

TEST_P(TrafficOfAllOnNvme, IsTheLeastThatTheSchemeNeeds) {
  const PlainCase& c = GetParam();
  constexpr int64_t kLayers = 24, kWorld = 4, kShard = 64 * kCutElements;
  const ModelSpec model = UnitChain(std::vector<int64_t>(kLayers, kWorld * kShard));
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = config.ebb.micro_batches_per_round = 8;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.zero.offload_param.device = config.zero.offload_optimizer.device = Tier::kNvme;
  config.zero.offload_param.max_in_cpu = 0;
  config.ebb.coalesce_bytes = 0;
  config.ebb.split_master = c.split;
  config.ebb.stochastic_rounding = c.without_masters;
  config.gradient_clipping = c.early ? 0 : 1;
  config.ebb.check_overflow = !c.early;
  const absl::StatusOr<Plan> plan =
      PlanStep({.model = &model, .config = &config, .world = kWorld, .optimizer_states = 2});
  ASSERT_OK(plan);
  int64_t states = 0, read = 0, written = 0;
  for (const TrafficRow& row : PredictTraffic(*plan)) {
    if (row.tier != Tier::kNvme) continue;
    const int64_t bytes = static_cast<int64_t>(row.predicted_bytes);
    if (row.state != StateClass::kParameter) {
      states += bytes;
    } else {
      (row.direction == kUp ? read : written) += bytes;
    }
  }
  // Whole blocks of the disk, so that nothing is rounded up.
  EXPECT_EQ(states, 2 * c.states * kLayers * kShard);
  EXPECT_EQ(written, c.parameters_written * kLayers * kShard);
  EXPECT_EQ(read, (c.parameters_read * kLayers - 2) * kShard);
}

// States in blocks on NVMe, parameters in RAM: bytes of an element and a step.
TEST(TrafficOfStates, InBlocksIsHalfOrLess) {
  constexpr int64_t kLayers = 4, kWorld = 4, kShard = 1024 * kCutElements,
                    kElements = kLayers * kShard;
  ModelSpec model = UnitChain(std::vector<int64_t>(kLayers, kWorld * kShard));
  for (UnitSpec& unit : model.units) unit.state_block = kScaleBlock;
  for (const bool split : {false, true}) {
    Config config;
    config.compute = DType::kBFloat16;
    config.zero.stage = 3;
    config.zero.offload_param.device = Tier::kCpu;
    config.zero.offload_optimizer.device = Tier::kNvme;
    config.ebb.split_master = split;
    ASSERT_OK_AND_ASSIGN(const Plan plan,
                         PlanStep({.model = &model,
                                   .config = &config,
                                   .world = kWorld,
                                   .optimizer_states = 2,
                                   .state_encodings = {kDynamic8, kDynamicUnsigned8}}));
    int64_t moved = 0;
    for (const TrafficRow& row : PredictTraffic(plan))
      moved += row.tier == Tier::kNvme ? static_cast<int64_t>(row.predicted_bytes) : 0;
    EXPECT_LE(static_cast<double>(moved), (split ? 8.2 : 12.2) * kElements);
    EXPECT_LE(static_cast<double>(plan.table.bytes.Of(Tier::kNvme, StateClass::kOptimizer)),
              2.1 * kElements);
  }
}

// Forward and backward each read, and the update spares one read. A late update hands its
// parameters on to the next forward; an early one reads for the backward before it. Split masters
// and none are a matter of the parameters, which are read for one more.
INSTANTIATE_TEST_SUITE_P(Timings, TrafficOfAllOnNvme,
                         ::testing::Values(PlainCase{.name = "Late",
                                                     .states = 12,
                                                     .parameters_read = 2,
                                                     .parameters_written = 2},
                                           PlainCase{.name = "LateSplit",
                                                     .split = true,
                                                     .states = 10,
                                                     .parameters_read = 4,
                                                     .parameters_written = 2},
                                           PlainCase{.name = "LateWithoutMasters",
                                                     .without_masters = true,
                                                     .states = 8,
                                                     .parameters_read = 4,
                                                     .parameters_written = 2},
                                           PlainCase{.name = "Early",
                                                     .early = true,
                                                     .states = 12,
                                                     .parameters_read = 2,
                                                     .parameters_written = 2},
                                           PlainCase{.name = "EarlySplit",
                                                     .early = true,
                                                     .split = true,
                                                     .states = 10,
                                                     .parameters_read = 4,
                                                     .parameters_written = 2},
                                           PlainCase{.name = "EarlyWithoutMasters",
                                                     .early = true,
                                                     .without_masters = true,
                                                     .states = 8,
                                                     .parameters_read = 4,
                                                     .parameters_written = 2}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ebb::sharding::traffic_test
