// Bytes that a plan's operations move, against formulas that know nothing of operations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "ebb/sharding/plan.h"
#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding::plan_bytes_test {
namespace {

struct Case {
  explicit Case(uint64_t seed) : random_case(seed), plan(*PlanStep(random_case.inputs())) {}

  const Config& config() const { return random_case.config; }
  // The bytes that one rank receives when the slices of all ranks become whole, or sends when they
  // are summed: (N-1)/N of the whole.
  int64_t RingBytes(int64_t whole_bytes) const {
    return whole_bytes / random_case.shards() * (random_case.shards() - 1);
  }
  // Likewise, of the ranks that hold a secondary copy.
  int64_t SecondaryRingBytes(int64_t whole_bytes) const {
    return whole_bytes / secondary() * (secondary() - 1);
  }
  // Ranks; 1: there are no secondary shards.
  int64_t secondary() const {
    return config().zero.stage == 3 ? config().zero.hpz_partition_size : 1;
  }
  int replicas() const { return random_case.world / random_case.shards(); }
  int64_t TrainableBytes(int unit, DType dtype) const {
    return plan.layout.units[unit].trainable.elements * SizeOf(dtype);
  }
  int Visits(int unit) const {
    return static_cast<int>(
        std::count_if(random_case.model.forward.begin(), random_case.model.forward.end(),
                      [&](const Visit& visit) { return static_cast<int>(visit.unit) == unit; }));
  }
  // Reductions of the unit's gradient in a step.
  int64_t Contributions(int unit) const {
    const int64_t rounds =
        config().gradient_accumulation_steps / config().ebb.micro_batches_per_round;
    return Visits(unit) * (config().reduces_at_round() ? rounds : 1);
  }
  // The number of gathers of a unit that is not kept whole: one for each use, except uses for which
  // it stays gathered.
  int Gathers(int unit) const {
    int gathers = 0, last = -1;
    int64_t since = 0;
    const std::vector<PlannedScope> scopes = ScopesOfStep(random_case.model, plan.step_rounds);
    for (int s = 0; s < std::ssize(scopes); ++s) {
      const PlannedScope& scope = scopes[s];
      since += plan.layout.units[scope.unit].elements();
      if (scope.unit != unit) continue;
      const bool waits = last >= 0 && !config().ebb.reshard_after_forward &&
                         !scopes[last].backward && scopes[last].round == scope.round;
      const bool intervals =
          last >= 0 && (last + 1 == s || waits) && since <= config().zero.max_reuse_distance;
      gathers += !intervals;
      last = s, since = 0;
    }
    return gathers;
  }

  RandomCase random_case;
  Plan plan;
};

TEST(PlanBytes, CollectivesMoveTheBytesOfRings) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const Case c(seed);
    SCOPED_TRACE(c.random_case.description());
    const Plan& plan = c.plan;
    int64_t gather = 0, secondary = 0, fill = 0, reduce = 0, gather_gradient = 0, refresh = 0;
    for (int u = 0; u < std::ssize(plan.layout.units); ++u) {
      const int64_t unit_bytes = plan.layout.units[u].elements() * SizeOf(c.config().compute);
      // With secondary shards all ranks meet for the first gather of a unit only, which fills them
      // for the others.
      const int gathers = plan.decisions.kept_whole[u] ? 0 : c.Gathers(u);
      const int later = c.secondary() > 1 ? std::max(gathers - 1, 0) : 0;
      gather += (gathers - later) * c.RingBytes(unit_bytes);
      secondary += later * c.SecondaryRingBytes(unit_bytes);
      fill += later > 0 ? 2 * unit_bytes / c.secondary() : 0;
      const DType sent = c.replicas() > 1 ? DType::kFloat32 : c.config().communication_dtype();
      reduce += c.Contributions(u) * c.RingBytes(c.TrainableBytes(u, sent));
      if (c.config().zero.stage == 0)
        gather_gradient += c.RingBytes(c.TrainableBytes(u, c.config().accumulation));
      if (c.config().zero.stage > 0 && plan.decisions.kept_whole[u])
        refresh += c.RingBytes(c.TrainableBytes(u, c.config().compute));
    }
    ASSERT_EQ(plan.BytesOf(Role::kGather), gather);
    ASSERT_EQ(plan.BytesOf(Role::kGatherSecondary), secondary);
    ASSERT_EQ(plan.BytesOf(Role::kFillSecondary), fill);
    ASSERT_EQ(plan.BytesOf(Role::kReduce), reduce);
    ASSERT_EQ(plan.BytesOf(Role::kGatherGradient), gather_gradient);
    ASSERT_EQ(plan.BytesOf(Role::kRefresh), refresh);
    ASSERT_EQ(plan.BytesOf(Role::kExchange), (c.random_case.world - 1) * kExchangeBytes);
    ASSERT_EQ(plan.BytesOf(Role::kMark), 0);
  }
}

// A reduced byte is read once or twice: added and measured in one pass, read by the update.
TEST(PlanBytes, KernelsReadAndWriteEachByteOnce) {
  for (int seed = 1; seed <= Cases(300); ++seed) {
    const Case c(seed);
    SCOPED_TRACE(c.random_case.description());
    const Decisions& d = c.plan.decisions;
    int64_t cast = 0, round = 0, all_reduce = 0, accumulate = 0, norm = 0, update = 0, norms = 0;
    for (int u = 0; u < std::ssize(c.plan.layout.units); ++u) {
      const Section& section = c.plan.layout.units[u].trainable;
      const int64_t contributions = c.Contributions(u);
      const DType sent = c.replicas() > 1 ? DType::kFloat32 : d.communication;
      if (d.gradient != d.communication || sent != d.communication)
        cast += contributions * section.elements * (SizeOf(d.gradient) + SizeOf(sent));
      if (sent != d.communication)
        round += contributions * section.shard * (SizeOf(sent) + SizeOf(d.communication));
      all_reduce += contributions * section.shard * SizeOf(sent);
      const bool sums = d.accumulates[u];
      // The first contribution is the shard, if it comes in the shard's dtype.
      const bool first_is_shard = sums && d.communication == d.accumulation;
      if (sums) {
        // The slice is read; the shard is written, and read but for the first time.
        const int64_t added = contributions - (first_is_shard ? 1 : 0);
        accumulate +=
            section.shard * (added * SizeOf(d.communication) +
                             (2 * added - (first_is_shard ? 0 : 1)) * SizeOf(d.accumulation));
      }
      if (!sums || (first_is_shard && contributions == 1))
        norm += section.shard * SizeOf(d.communication);
      const int64_t owned = d.stage == 0 ? section.elements : section.shard;
      const int64_t copy = d.compute == DType::kFloat32 ? 0 : SizeOf(d.compute);
      // LAMB reads both states before, LARS none.
      int states_of_norms = -1;
      for (const PlacedParameter& placement : section.placements) {
        if (c.random_case.own_optimizer) break;
        const OptimizerType type = c.random_case.OptimizerOf(placement.parameter);
        if (type == OptimizerType::kLamb) states_of_norms = 2;
        if (type == OptimizerType::kLars) states_of_norms = std::max(states_of_norms, 0);
      }
      if (states_of_norms >= 0) {
        norms += owned * (4 + 4 * states_of_norms +
                          SizeOf(d.accumulates[u] ? d.accumulation : d.communication));
      }
      update += owned * (2 * 4 + 2 * 4 * c.random_case.optimizer_states +
                         SizeOf(d.accumulates[u] ? d.accumulation : d.communication) + copy);
    }
    ASSERT_EQ(c.plan.BytesOf(Role::kCast), cast);
    ASSERT_EQ(c.plan.BytesOf(Role::kRound), round);
    // Each operation's share is a whole number of bytes.
    ASSERT_NEAR(static_cast<double>(c.plan.BytesOf(Role::kAllReduce)),
                2.0 * (c.replicas() - 1) / c.replicas() * static_cast<double>(all_reduce),
                static_cast<double>(c.plan.ops.size()));
    ASSERT_EQ(c.plan.BytesOf(Role::kAccumulate), accumulate);
    ASSERT_EQ(c.plan.BytesOf(Role::kNorm), norm);
    ASSERT_EQ(c.plan.BytesOf(Role::kUpdate), update);
    ASSERT_EQ(c.plan.BytesOf(Role::kParameterNorms), norms);
  }
}

// Equal layers of 4,096 elements on 4 ranks: no padding anywhere.
constexpr int64_t kLayers = 5, kElements = 4'096, kWorld = 4;

Plan LayersPlan(int stage, int rounds, int64_t secondary = 1) {
  const ModelSpec model = UnitChain(std::vector<int64_t>(kLayers, kElements));
  Config config;
  config.compute = DType::kBFloat16;
  config.gradient_accumulation_steps = rounds;
  config.zero.stage = stage;
  config.zero.param_persistence_threshold = 0;
  config.zero.hpz_partition_size = secondary;
  const PlanInputs inputs{
      .model = &model, .config = &config, .world = kWorld, .optimizer_states = 2};
  const absl::StatusOr<Plan> plan = PlanStep(inputs);
  EXPECT_OK(plan);
  return *plan;
}

TEST(PlanBytes, EqualLayersHaveThePublishedVolumes) {
  constexpr int64_t kParameters = kLayers * kElements, kOthers = kWorld - 1;
  constexpr int64_t kRing =
      kOthers * kParameters / kWorld * 2;  // bytes of all of the model in bf16
  for (int rounds : {1, 3}) {
    SCOPED_TRACE(rounds);
    // Stage 0 sums in fp32 and gathers that; the reduction of stages 0 and 1 is once a step.
    EXPECT_EQ(LayersPlan(0, rounds).BytesOf(Role::kReduce), kRing);
    EXPECT_EQ(LayersPlan(0, rounds).BytesOf(Role::kGatherGradient), 2 * kRing);
    EXPECT_EQ(LayersPlan(1, rounds).BytesOf(Role::kReduce), kRing);
    EXPECT_EQ(LayersPlan(1, rounds).BytesOf(Role::kRefresh), kRing);
    EXPECT_EQ(LayersPlan(2, rounds).BytesOf(Role::kReduce), rounds * kRing);
    EXPECT_EQ(LayersPlan(2, rounds).BytesOf(Role::kRefresh), kRing);
    // Forward and backward, but the last layer stays for its backward, and the first one from a
    // round's end to the next.
    const int64_t layer = kRing / kLayers;
    EXPECT_EQ(LayersPlan(3, rounds).BytesOf(Role::kGather),
              rounds * (2 * kRing - layer) - (rounds - 1) * layer);
    EXPECT_EQ(LayersPlan(3, rounds).BytesOf(Role::kReduce), rounds * kRing);
    EXPECT_EQ(LayersPlan(3, rounds).BytesOf(Role::kRefresh), 0);
    // ZeRO++'s hpZ: all ranks gather the model once a step, whatever its rounds; all else stays in
    // groups of 2.
    const Plan plan = LayersPlan(3, rounds, /*secondary=*/2);
    EXPECT_EQ(plan.BytesOf(Role::kGather), kRing);
    const int64_t others = rounds * (2 * kLayers - 1) - (rounds - 1) - kLayers;  // of layers
    EXPECT_EQ(plan.BytesOf(Role::kGatherSecondary), others * kElements / 2 * 2);
  }
}

}  // namespace
}  // namespace ebb::sharding::plan_bytes_test
