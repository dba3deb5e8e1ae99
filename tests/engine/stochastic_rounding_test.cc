// Engines with bf16 parameters as masters. The update of an element does not depend on world,
// stage, tier or cut, and training converges as with fp32 masters.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ebb/optim/update.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/layout.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::stochastic_rounding_test {
namespace {

constexpr int kSteps = 3;

// Large enough that shards end within parameters, and for several sub-groups.
ToyOptions SomeModel() {
  return {.width = 67, .groups = true};
}

// Equal in every world, unlike a model's gradients: their sums have other roundings.
float Gradient(ParameterId p, int64_t element, int step) {
  return std::sin(0.7f * static_cast<float>(element + 31 * step) + static_cast<float>(p));
}

absl::Status WriteGradients(Engine& engine, int step) {
  return engine.Write(StateClass::kGradient, [&](const Slice& slice, std::span<float> values) {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = Gradient(slice.parameter, slice.begin + static_cast<int64_t>(i), step);
    return absl::OkStatus();
  });
}

struct Cell {
  int world = 1, stage = 0;
  Tier parameters = Tier::kDevice, optimizer = Tier::kDevice;
  int64_t shard_group = 0;
  bool own = false;  // an optimizer of the trainer's
};

Config ConfigOf(const Cell& cell, const std::string& path) {
  Config config = OnNvme(ConfigFor({.world = cell.world, .stage = cell.stage}), path);
  config.compute = DType::kBFloat16;
  config.communication = DType::kFloat32;
  config.gradient_clipping = 0;
  config.zero.offload_param.device = cell.parameters;
  config.zero.offload_optimizer.device = cell.optimizer;
  config.zero.sub_group_size = 2048;
  config.ebb.shard_group = cell.shard_group;
  config.ebb.stochastic_rounding = true;
  // One's own optimizer replaces the weight decay.
  ParameterGroupConfig& bias = config.ebb.parameter_groups["bias"];
  if (cell.own) {
    bias.lr_factor = 0.5;
  } else {
    bias.weight_decay = 0;
  }
  return config;
}

// w -= lr * g, in one rounding.
OptimizerSpec OwnSgd() {
  return {.update = [](const UpdateSlice& slice) {
    for (size_t i = 0; i < slice.master.size(); ++i) {
      slice.master[i] =
          std::fma(-static_cast<float>(slice.learning_rate), slice.gradient[i], slice.master[i]);
    }
    return absl::OkStatus();
  }};
}

ParameterValues Train(const Cell& cell, const std::string& path) {
  ParameterValues trained;
  OnThreads(cell.world, [&](World world) {
    ToyModel model(SomeModel());
    EngineOptions options;
    if (cell.own) options.optimizer = OwnSgd();
    ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, Device::Cpu(1), model.spec(),
                                                       ConfigOf(cell, path), options));
    for (int number = 0; number < kSteps; ++number) {
      Step step = engine.BeginStep({.hold_updates = true});
      for (int v = 0; v < model.visits(); ++v) model.Forward(step, v, world.rank(), number);
      for (int v = model.visits(); v-- > 0;) model.Backward(step, v, world.rank(), number);
      ASSERT_OK(step.Reduce());
      ASSERT_OK(WriteGradients(engine, number));
      ASSERT_OK(step.Finish());
    }
    for (const MemoryRow& row : engine.memory()) {
      EXPECT_NE(row.state, StateClass::kMaster);
      EXPECT_EQ(row.predicted_bytes, row.peak_bytes) << Name(row.state) << " " << Name(row.tier);
    }
    ASSERT_OK_AND_ASSIGN(const ParameterValues parameters,
                         GatherAll(engine, model.spec(), StateClass::kParameter));
    ASSERT_OK_AND_ASSIGN(ParameterValues masters,
                         GatherAll(engine, model.spec(), StateClass::kMaster));
    EXPECT_EQ(masters, parameters);
    if (world.rank() == 0) trained = std::move(masters);
  });
  return trained;
}

// The kernels' results for each unit whole, with the place of its first element.
ParameterValues Expected() {
  const ToyModel model(SomeModel());
  const ModelSpec& spec = model.spec();
  const sharding::ModelLayout layout = *sharding::LayOut(spec, 1);
  ParameterValues values(spec.parameters.size());
  ThreadTeam team(1);
  for (size_t u = 0; u < spec.units.size(); ++u) {
    for (const sharding::Section* section : {&layout.units[u].trainable, &layout.units[u].frozen}) {
      for (const sharding::PlacedParameter& placement : section->placements) {
        const auto p = static_cast<size_t>(placement.parameter);
        const ParameterSpec& parameter = spec.parameters[p];
        const auto count = static_cast<size_t>(placement.elements);
        values[p].resize(count);
        const Slice whole{.parameter = placement.parameter,
                          .name = parameter.name,
                          .shape = parameter.shape,
                          .begin = 0,
                          .end = placement.elements};
        EXPECT_OK(parameter.init(whole, values[p]));
        std::vector<BFloat16> rounded(count);
        for (size_t i = 0; i < count; ++i) rounded[i] = RoundHalfAway(values[p][i]);
        std::vector<float> gradient(count), first(count), second(count);
        OptimizerConfig optimizer = ConfigOf({}, "").optimizer;
        if (parameter.group == "bias") optimizer.weight_decay = 0;
        for (int step = 0; parameter.trainable && step < kSteps; ++step) {
          for (size_t i = 0; i < count; ++i)
            gradient[i] = Gradient(placement.parameter, static_cast<int64_t>(i), step);
          optim::Update(team, optimizer,
                        {.gradient = gradient.data(),
                         .states = {{first.data()}, {second.data()}},
                         .parameter = rounded.data(),
                         .parameter_dtype = DType::kBFloat16,
                         .rounding = {.unit = sharding::Hasher().Add(spec.units[u].name).hash(),
                                      .index = placement.offset},
                         .count = placement.elements},
                        {.step = step + 1, .learning_rate = optimizer.learning_rate});
        }
        for (size_t i = 0; i < count; ++i) values[p][i] = static_cast<float>(rounded[i]);
      }
    }
  }
  return values;
}

TEST(StochasticRounding, IsTheSameInEveryWorldStageAndTier) {
  using enum Tier;
  const Scratch scratch;
  const ParameterValues expected = Expected();
  for (const Cell& cell :
       {Cell{.world = 1, .stage = 0}, Cell{.world = 3, .stage = 0}, Cell{.world = 2, .stage = 1},
        Cell{.world = 4, .stage = 1, .shard_group = 2},
        Cell{.world = 3, .stage = 2, .optimizer = kCpu},
        Cell{.world = 2, .stage = 2, .optimizer = kNvme}, Cell{.world = 1, .stage = 3},
        Cell{.world = 4, .stage = 3}, Cell{.world = 2, .stage = 3, .parameters = kCpu},
        Cell{.world = 2, .stage = 3, .parameters = kNvme},
        Cell{.world = 3, .stage = 3, .parameters = kNvme, .optimizer = kNvme},
        Cell{.world = 2, .stage = 3, .parameters = kCpu, .optimizer = kNvme}}) {
    SCOPED_TRACE(::testing::Message()
                 << "world " << cell.world << ", stage " << cell.stage << ", parameters "
                 << Name(cell.parameters) << ", optimizer " << Name(cell.optimizer));
    EXPECT_TRUE(Train(cell, scratch.path()) == expected);
  }
}

TEST(StochasticRounding, ATrainersOptimizerRoundsAlikeInEveryWorld) {
  using enum Tier;
  const Scratch scratch;
  const ParameterValues expected = Train({.own = true}, scratch.path());
  ASSERT_FALSE(expected.empty());
  EXPECT_FALSE(expected == Expected());
  for (const Cell& cell :
       {Cell{.world = 3, .stage = 1, .own = true}, Cell{.world = 2, .stage = 3, .own = true},
        Cell{.world = 2, .stage = 3, .parameters = kNvme, .optimizer = kNvme, .own = true},
        Cell{.world = 3, .stage = 2, .optimizer = kCpu, .own = true}}) {
    EXPECT_TRUE(Train(cell, scratch.path()) == expected) << cell.world << " " << cell.stage;
  }
}

// Values between those of bf16: a write from outside rounds them like the cast of parameters.
TEST(StochasticRounding, ValuesFromOutsideAreRoundedToTheNearest) {
  const Scratch scratch;
  for (const Tier tier : {Tier::kDevice, Tier::kNvme}) {
    const Cell cell{.world = 2, .stage = 3, .parameters = tier, .optimizer = tier};
    OnThreads(cell.world, [&](World world) {
      ToyModel model(SomeModel());
      const ModelSpec& spec = model.spec();
      ASSERT_OK_AND_ASSIGN(
          Engine source,
          Engine::Create(world, Device::Cpu(1), spec, ConfigFor({.world = cell.world, .stage = 1}),
                         {.name = "source"}));
      ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, Device::Cpu(1), spec,
                                                         ConfigOf(cell, scratch.path())));
      ASSERT_OK(source.Write(StateClass::kMaster, Normal(0.7f, 99)));
      ASSERT_OK_AND_ASSIGN(ParameterValues expected, GatherAll(source, spec, StateClass::kMaster));
      for (std::vector<float>& values : expected) {
        for (float& value : values) value = static_cast<float>(RoundHalfAway(value));
      }
      ASSERT_OK(engine.CopyParametersFrom(source));
      EXPECT_EQ(*GatherAll(engine, spec, StateClass::kMaster), expected);
      ASSERT_OK(engine.Write(StateClass::kMaster, Constant(0)));
      ASSERT_OK(engine.Write(StateClass::kMaster, Normal(0.7f, 99)));
      EXPECT_EQ(*GatherAll(engine, spec, StateClass::kParameter), expected);
      // And back, where nothing is lost.
      ASSERT_OK(source.CopyParametersFrom(engine));
      EXPECT_EQ(*GatherAll(source, spec, StateClass::kMaster), expected);
    });
  }
}

}  // namespace
}  // namespace ebb::testing::stochastic_rounding_test
