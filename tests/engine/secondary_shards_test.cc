// ZeRO++'s hpZ: gathers within a group of ranks from parts that the first gather of a step has left
// there. Nothing that a trainer does shows whether they are there, but the tables of memory and
// bytes.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::secondary_shards_test {
namespace {

struct Cell {
  int world = 4, shard_group = 0;
  DType dtype = DType::kFloat32;
  Tier parameters = Tier::kDevice, states = Tier::kDevice;
  int64_t prefetch = 1, micro_batches = 2;
  bool early = false;
};

Config ConfigOf(const Cell& cell, int64_t secondary) {
  Config config = ConfigFor({.world = cell.world, .stage = 3});
  config.zero.hpz_partition_size = secondary;
  config.compute = cell.dtype;
  config.ebb.shard_group = cell.shard_group;
  config.ebb.prefetch_depth = cell.prefetch;
  config.ebb.coalesce_bytes = 0;
  config.ebb.check_overflow = !cell.early;
  config.ebb.asynchronous_step = AsynchronousStep::kAuto;
  config.gradient_accumulation_steps = cell.micro_batches;
  config.loss_scale.initial_scale_power = 8;
  config.zero.offload_param.device = cell.parameters;
  config.zero.offload_param.max_in_cpu = 0;
  config.zero.offload_optimizer.device = cell.states;
  config.zero.offload_param.nvme_paths =
      config.zero.offload_optimizer.nvme_paths = {::testing::TempDir()};
  config.zero.offload_param.pin_memory = config.zero.offload_optimizer.pin_memory = false;
  return config;
}

std::string Describe(const Cell& cell) {
  return absl::StrCat(cell.world, " ranks in groups of ", cell.shard_group, ", ",
                      std::string(Name(cell.dtype)), ", parameters ",
                      std::string(Name(cell.parameters)), ", states ",
                      std::string(Name(cell.states)), ", prefetch ", cell.prefetch,
                      ", micro-batches ", cell.micro_batches, cell.early ? ", early" : ", late");
}

// Trains, and does between the steps whatever could leave an old copy behind.
std::vector<std::vector<uint32_t>> BitsOf(const Cell& cell, int64_t secondary) {
  std::vector<std::vector<uint32_t>> bits(static_cast<size_t>(cell.world));
  OnThreads(cell.world, [&](World world) {
    const int rank = world.rank();
    ToyModel model({});
    ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, Device::Cpu(1), model.spec(),
                                                       ConfigOf(cell, secondary)));
    ASSERT_OK(model.Train(engine, rank, 0));
    // Some of its gathers are on their way, and are given up.
    { const Evaluation left = engine.BeginEvaluation(); }
    ASSERT_OK(model.Train(engine, rank, 1));
    ASSERT_OK_AND_ASSIGN(const double loss, model.Evaluate(engine, rank));
    ASSERT_OK(engine.Write(StateClass::kParameter, Normal(0.5f, /*seed=*/7)));
    ASSERT_OK(model.Train(engine, rank, 2));
    // Off the declared order, from a backward on and within forward.
    for (const bool in_forward : {false, true}) {
      Step step = engine.BeginStep({.hold_updates = true});
      for (int visit = 0; visit < model.visits(); ++visit) {
        model.Forward(step, visit, rank, 3);
        if (in_forward && visit == 1) step.Forward(model.unit(0));
      }
      for (int visit = model.visits() - 1; visit >= 0; --visit)
        model.Backward(step, visit, rank, 3);
      if (!in_forward) step.Forward(model.unit(1));
    }  // dropped
    ASSERT_OK(engine.Write(StateClass::kMaster, Normal(0.5f, /*seed=*/8)));
    ASSERT_OK(engine.Suspend());
    ASSERT_OK(engine.Resume());
    // Skipped where overflows are looked for: the same parameters once more.
    const bool overflows = !cell.early && rank == 1;
    ASSERT_OK(model.Train(engine, rank, 4, {}, overflows));
    ASSERT_OK(model.Train(engine, rank, 5, {.hold_updates = true}));
    // Other rounds than the config's.
    ASSERT_OK(model.Train(engine, rank, 6, {.micro_batches = 1}));
    ASSERT_OK(model.Train(engine, rank, 7));
    ASSERT_OK_AND_ASSIGN(bits[static_cast<size_t>(rank)], MasterBits(engine, model.spec()));
    ASSERT_OK_AND_ASSIGN(const double last, model.Evaluate(engine, rank));
    for (const double number : {loss, last})
      bits[static_cast<size_t>(rank)].push_back(
          static_cast<uint32_t>(std::bit_cast<uint64_t>(number)));
  });
  return bits;
}

void PrintTo(const Cell& cell, std::ostream* out) {
  *out << Describe(cell);
}

class SecondaryShards : public ::testing::TestWithParam<Cell> {};
TEST_P(SecondaryShards, ChangeNoBitWithAnyCallsBetweenSteps) {
  const Cell& cell = GetParam();
  EXPECT_EQ(BitsOf(cell, 2), BitsOf(cell, 1));
}
INSTANTIATE_TEST_SUITE_P(
    Cells, SecondaryShards,
    ::testing::Values(
        Cell{.dtype = DType::kFloat16, .prefetch = 0},
        Cell{.dtype = DType::kBFloat16, .early = true},
        // Replicas beside it.
        Cell{.world = 8, .shard_group = 4, .dtype = DType::kFloat16, .states = Tier::kCpu},
        Cell{.parameters = Tier::kNvme, .states = Tier::kNvme, .prefetch = 3}));

// The tables: counted bytes equal predicted ones, and the model crosses the groups once.
TEST(SecondaryShardsTest, TakeTheMemoryAndMoveTheBytesThatArePredicted) {
  for (const int world : {4, 8}) {
    for (const int64_t micro_batches : {1, 3}) {
      for (const Tier tier : {Tier::kDevice, Tier::kCpu}) {
        const Cell cell{.world = world,
                        .shard_group = world == 8 ? 4 : 0,
                        .parameters = tier,
                        .states = tier,
                        .micro_batches = micro_batches};
        SCOPED_TRACE(Describe(cell));
        OnThreads(world, [&](World ranks) {
          ToyModel model({});
          uint64_t gathered[2] = {}, secondary[2] = {}, uploaded[2] = {};
          for (const int on : {0, 1}) {
            ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(ranks, Device::Cpu(1), model.spec(),
                                                               ConfigOf(cell, 1 + on)));
            for (int step = 0; step < 3; ++step) ASSERT_OK(model.Train(engine, ranks.rank(), step));
            for (const MemoryRow& row : engine.memory()) {
              EXPECT_EQ(row.peak_bytes, row.predicted_bytes) << Name(row.state);
              EXPECT_TRUE(row.state != StateClass::kSecondary || on == 1);
            }
            for (const CommunicationRow& row : engine.communication()) {
              EXPECT_EQ(row.bytes, row.predicted_bytes) << row.operation;
              if (row.operation == "gather") gathered[on] = row.bytes;
              if (row.operation == "gather_secondary") secondary[on] = row.bytes;
            }
            for (const TrafficRow& row : engine.traffic()) {
              EXPECT_EQ(row.bytes, row.predicted_bytes);
              if (row.state == StateClass::kParameter && row.direction == Direction::kRead)
                uploaded[on] = row.bytes;
            }
          }
          EXPECT_EQ(secondary[0], 0u);
          // 3 of 4 slices over all ranks; 1 of 2 parts within a group.
          EXPECT_EQ(gathered[1] + secondary[1] * 3 / 2, gathered[0]);
          EXPECT_LT(gathered[1] * (micro_batches == 1 ? 1 : 4), gathered[0]);
          // Parameters that are copied on the device come up once a step.
          EXPECT_TRUE(tier == Tier::kDevice || uploaded[1] < uploaded[0]);
        });
      }
    }
  }
}

// Units take one slot after each other. A unit may be opened again in the place of another that was
// gathered from its secondary shards, which changes neither the shards nor the values shown.
TEST(SecondaryShardsTest, AreKeptBesideScopesThatAreOpenedAgain) {
  constexpr int kUnits = 4;
  ModelSpec model;
  std::vector<ParameterId> weights;
  for (int u = 0; u < kUnits; ++u) {
    const UnitId unit = model.AddUnit(absl::StrCat("u", u));
    weights.push_back(model.Add(unit, {.name = absl::StrCat("w", u),
                                       .shape = {u == 0 ? 64 : 1024},
                                       .init = Constant(static_cast<float>(u + 1))}));
    model.forward.push_back({.unit = unit});
  }
  Config config = ConfigOf({.prefetch = 0, .micro_batches = 1}, 2);
  config.zero.param_persistence_threshold = 64;  // the first unit's
  config.optimizer.learning_rate = 0;
  OnThreads(4, [&](World world) {
    ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, Device::Cpu(1), model, config));
    const auto look = [&](const Scope& scope, int u) {
      const std::vector<float> values = Values(scope.parameter(weights[static_cast<size_t>(u)]));
      EXPECT_EQ(values, std::vector<float>(values.size(), static_cast<float>(u + 1)))
          << "unit " << u;
      EXPECT_FALSE(values.empty());
    };
    for (int number = 0; number < 2; ++number) {
      Step step = engine.BeginStep();
      for (int u = 0; u < kUnits; ++u) {
        look(step.Forward(UnitId{u}), u);
        if (u > 1) look(step.Forward(UnitId{u - 1}), u - 1);
      }
      for (int u = kUnits - 1; u >= 0; --u) {
        if (u > 0) look(step.Forward(UnitId{kUnits - u}), kUnits - u);
        BackwardScope scope = step.Backward(UnitId{u});
        look(scope, u);
        scope.gradient(weights[static_cast<size_t>(u)]);
      }
      ASSERT_OK(step.Finish());
    }
    for (const CommunicationRow& row : engine.communication()) {
      EXPECT_EQ(row.bytes, row.predicted_bytes) << row.operation;
      EXPECT_TRUE(row.operation != "gather_secondary" || row.bytes > 0);
    }
  });
}

}  // namespace
}  // namespace ebb::testing::secondary_shards_test
