// Units with parameters of several dtypes: biases in fp32 beside weights in bf16, frozen
// bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ebb/runtime/engine/matrix_groups.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::mixed_dtypes_test {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 4;

ToyOptions SomeModel() {
  return {.width = 67, .own_dtypes = true};
}

struct Cell {
  int world = 2, stage = 3;
  Tier parameters = Tier::kDevice, optimizer = Tier::kDevice;
  int64_t coalesce = 0, prefetch = 1, persistence = 0;
  bool split = false;
};

Config ConfigOf(const Cell& cell, const std::string& path) {
  Config config = ConfigFor({.world = cell.world, .stage = cell.stage});
  config.compute = DType::kBFloat16;
  config.zero.offload_param.device = cell.parameters;
  config.zero.offload_optimizer.device = cell.optimizer;
  config.zero.offload_param.nvme_paths = config.zero.offload_optimizer.nvme_paths = {path};
  config.zero.offload_param.pin_memory = config.zero.offload_optimizer.pin_memory = false;
  config.zero.param_persistence_threshold = cell.persistence;
  config.zero.sub_group_size = 2048;
  config.ebb.coalesce_bytes = cell.coalesce;
  config.ebb.prefetch_depth = cell.prefetch;
  config.ebb.split_master = cell.split;
  return config;
}

ParameterValues Train(const Cell& cell) {
  const Scratch scratch;
  ParameterValues trained;
  OnThreads(cell.world, [&](World world) {
    ToyModel model(SomeModel());
    const Config config = ConfigOf(cell, scratch.path());
    ASSERT_OK_AND_ASSIGN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), model.spec(), config));
    ASSERT_OK_AND_ASSIGN(const std::vector<MemoryRow> predicted,
                         PredictMemory(model.spec(), cell.world, config));
    for (int step = 0; step < kSteps; ++step) {
      ASSERT_OK(model.Train(engine, world.rank(), step));
      ASSERT_OK(engine.Report().status());
      if (step == 0) ASSERT_OK(model.Evaluate(engine, world.rank()).status());
    }
    const bool on_disk = cell.parameters == Tier::kNvme || cell.optimizer == Tier::kNvme;
    std::map<std::pair<StateClass, Tier>, uint64_t> rows;
    for (const MemoryRow& row : predicted) rows[{row.state, row.tier}] = row.predicted_bytes;
    for (const MemoryRow& row : engine.memory()) {
      EXPECT_EQ(row.predicted_bytes, row.peak_bytes) << Name(row.state) << " " << Name(row.tier);
      if (on_disk && row.state == StateClass::kStaging)
        continue;  // that of calls for state counts too
      EXPECT_EQ(row.predicted_bytes, (rows[{row.state, row.tier}]))
          << Name(row.state) << " " << Name(row.tier);
    }
    for (const CommunicationRow& row : engine.communication())
      EXPECT_EQ(row.bytes, row.predicted_bytes) << row.operation;
    for (const TrafficRow& row : engine.traffic())
      EXPECT_EQ(row.bytes, row.predicted_bytes) << Name(row.state) << " " << Name(row.tier);
    ASSERT_OK_AND_ASSIGN(ParameterValues masters,
                         GatherAll(engine, model.spec(), StateClass::kMaster));
    if (world.rank() == 0) trained = std::move(masters);
  });
  return trained;
}

ParameterValues InitialBytes(const ModelSpec& model) {
  ParameterValues all;
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    const ParameterSpec& parameter = model.parameters[p];
    if (parameter.compute != DType::kInt8) continue;
    std::vector<float>& values = all.emplace_back(static_cast<size_t>(Elements(parameter.shape)));
    EXPECT_OK(parameter.init({.parameter = ParameterId{static_cast<int32_t>(p)},
                              .name = parameter.name,
                              .shape = parameter.shape,
                              .begin = 0,
                              .end = std::ssize(values)},
                             values));
  }
  return all;
}

// The matrix has the bits of all worlds, stages, tiers and times of updates.
TEST(MixedDTypes, TakeThePredictedMemoryAndKeepTheirBytes) {
  using enum Tier;
  const ModelSpec model = ToyModel(SomeModel()).spec();
  const ParameterValues expected = Train({.stage = 0});
  ParameterValues bytes;
  for (size_t p = 0; p < expected.size(); ++p)
    if (model.parameters[p].compute == DType::kInt8) bytes.push_back(expected[p]);
  EXPECT_EQ(bytes, InitialBytes(model));
  const Cell cells[] = {{.stage = 2, .optimizer = kCpu},
                        {.coalesce = 1 << 30, .prefetch = 3},
                        {.persistence = 100},
                        {.parameters = kNvme, .optimizer = kNvme, .coalesce = 1 << 30},
                        {.parameters = kNvme, .optimizer = kNvme, .split = true}};
  for (const Cell& cell : cells) {
    SCOPED_TRACE(::testing::Message() << "cell " << &cell - cells);
    EXPECT_EQ(Train(cell), expected);
  }
}

// For all other purposes the dtype of such a parameter is the config's.
TEST(MixedDTypes, ParametersOfOneDTypeTrainAsTheConfigsDo) {
  const Scratch scratch;
  ToyModel own({.width = 67});
  ModelSpec fp32 = own.spec();
  for (ParameterSpec& parameter : fp32.parameters) parameter.compute = DType::kFloat32;
  const auto train = [&](const ModelSpec& spec, DType compute) {
    ParameterValues values;
    Config config = ConfigOf({}, scratch.path());
    config.compute = compute;
    config.ebb.check_overflow = false;
    OnThreads(2, [&](World world) {
      ToyModel model({.width = 67});
      ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, Device::Cpu(1), spec, config));
      for (int step = 0; step < kSteps; ++step) ASSERT_OK(model.Train(engine, world.rank(), step));
      ASSERT_OK_AND_ASSIGN(ParameterValues masters, GatherAll(engine, spec, StateClass::kMaster));
      if (world.rank() == 0) values = std::move(masters);
    });
    return values;
  };
  EXPECT_EQ(train(fp32, DType::kBFloat16), train(own.spec(), DType::kFloat32));
}

TEST(MixedDTypes, ScopesShowEachParameterInItsDType) {
  OnThreads(2, [&](World world) {
    ToyModel model(SomeModel());
    ASSERT_OK_AND_ASSIGN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), model.spec(), ConfigOf({}, "")));
    const ToyModel::Layer& layer = model.layer(0);
    const std::vector<ParameterView> views = engine.Views(model.unit(0));
    EXPECT_EQ(views.size(), 3u);
    const DType dtypes[] = {DType::kBFloat16, DType::kFloat32, DType::kInt8};
    Step step = engine.BeginStep();
    for (int v = 0; v < model.visits(); ++v) model.Forward(step, v, world.rank(), 0);
    BackwardScope scope = step.Backward(model.unit(0));
    for (size_t i = 0; i < views.size(); ++i) {
      EXPECT_EQ(static_cast<size_t>(views[i].parameter), i);
      EXPECT_EQ(views[i].value.dtype, dtypes[i]);
      EXPECT_EQ(views[i].value.data, scope.parameter(views[i].parameter).data);
      EXPECT_EQ(views[i].gradient.has_value(), dtypes[i] != DType::kInt8);
    }
    EXPECT_EQ(scope.gradient(layer.weight).dtype, DType::kBFloat16);
    EXPECT_EQ(scope.gradient(*layer.bias).dtype, DType::kFloat32);
    scope.Close();
    EXPECT_EQ(scope.parameter(*layer.bias).size(), 0);
  });
}

TEST(MixedDTypes, BytesAreReadAndWrittenAsTheyAre) {
  OnThreads(2, [&](World world) {
    ToyModel model(SomeModel());
    ASSERT_OK_AND_ASSIGN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), model.spec(), ConfigOf({}, "")));
    const ParameterId scale = *model.layer(0).scale;
    ASSERT_OK(engine.Write(StateClass::kMaster, [&](const Slice& slice, std::span<float> values) {
      for (size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<float>((slice.begin + static_cast<int64_t>(i)) % 256);
      return absl::OkStatus();
    }));
    std::vector<float> whole(67);
    ASSERT_OK(engine.Gather(scale, StateClass::kParameter, whole));
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(whole[i], static_cast<float>(i % 256));
    const absl::Status refused =
        engine.Write(StateClass::kMaster, [](const Slice&, std::span<float> values) {
          std::ranges::fill(values, 0.5f);
          return absl::OkStatus();
        });
    EXPECT_THAT(refused,
                Says("parameter 's0' is bytes (ParameterSpec::compute is int8), so its values "
                     "must be whole numbers from 0 to 255, not 0.5"));
  });
}

TEST(MixedDTypes, AnotherOrderGoesOnBitForBit) {
  OnThreads(2, [&](World world) {
    ToyModel model(SomeModel());
    ASSERT_OK_AND_ASSIGN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), model.spec(), ConfigOf({}, "")));
    ASSERT_OK_AND_ASSIGN(Engine other,
                         Engine::Create(world, Device::Cpu(1), model.spec(), ConfigOf({}, "")));
    for (int step = 0; step < kSteps; ++step) {
      std::vector<Visit> forward = model.spec().forward;
      ASSERT_OK(engine.Reorder(forward));
      for (Engine* each : {&engine, &other}) {
        ASSERT_OK(model.Train(*each, world.rank(), step));
        ASSERT_OK(each->Report().status());
      }
    }
    ASSERT_OK_AND_ASSIGN(const auto bits, MasterBits(engine, model.spec()));
    ASSERT_OK_AND_ASSIGN(const auto expected, MasterBits(other, model.spec()));
    EXPECT_EQ(bits, expected);
    const absl::Status refused = engine.Reorder({{.unit = UnitId{99}}});
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    ASSERT_OK(other.CopyParametersFrom(engine));
    ASSERT_OK_AND_ASSIGN(const auto copied, MasterBits(other, model.spec()));
    EXPECT_EQ(copied, bits);
  });
}

std::string RefusalOf(const ModelSpec& model, DType compute = DType::kBFloat16) {
  Config config = ConfigOf({.world = 1}, "");
  config.compute = compute;
  return std::string(PredictProgram(model, 1, config).status().message());
}

TEST(MixedDTypes, AnImpossibleDTypeIsRefusedWithTheParametersName) {
  ModelSpec model = ToyModel(SomeModel()).spec();
  model.parameters[2].trainable = true;
  EXPECT_THAT(RefusalOf(model), HasSubstr("(\"s0\") is bytes (ParameterSpec::compute is int8), "
                                          "which have no gradient: set trainable to false"));
  model = ToyModel(SomeModel()).spec();
  model.compute_dtypes = {DType::kBFloat16};
  EXPECT_THAT(RefusalOf(model), HasSubstr("parameter 'b0' is fp32 (ParameterSpec::compute), but "
                                          "the trainer takes bf16"));
  model.compute_dtypes.clear();
  model.gradient_dtypes = {DType::kBFloat16};
  EXPECT_THAT(RefusalOf(model), HasSubstr("parameter 'b0' is fp32 (ParameterSpec::compute) and its "
                                          "gradient fp32, but the trainer takes bf16"));
}

TEST(MixedDTypes, Fp16IsTrainedOnlyWhereThereIsALossScale) {
  ModelSpec model = ToyModel({.width = 67}).spec();
  model.parameters[1].compute = DType::kFloat16;
  for (const DType compute : {DType::kBFloat16, DType::kFloat32})
    EXPECT_THAT(
        RefusalOf(model, compute),
        HasSubstr(absl::StrCat("parameter 'b0' is fp16 (ParameterSpec::compute) and "
                               "trainable, but the configuration is ",
                               std::string(Name(compute)),
                               ", which has no loss scale: give the parameter bf16 or fp32, "
                               "set trainable to false")));
  EXPECT_EQ(RefusalOf(model, DType::kFloat16), "");
  model.parameters[1].trainable = false;
  EXPECT_EQ(RefusalOf(model), "");
}

// The elements that AdamW trains, and those of Muon.
struct Trained {
  int64_t small = 0, all = 0, of_muon = 0;
};

// The log of two ranks that create an engine.
std::string LogOf(const OptimizerConfig& optimizer, Trained& trained) {
  Config config = ConfigFor({.world = 2, .stage = 1});
  config.optimizer = optimizer;
  Config with_groups = config;
  const ModelSpec model = ToyModel({.width = 67}).spec();
  const auto grouped = WithMatrixGroups(model, with_groups);
  EXPECT_OK(grouped.status());
  trained = {};
  for (const ParameterSpec& parameter : grouped->parameters) {
    if (!parameter.trainable) continue;
    const int64_t size = Elements(parameter.shape);
    const bool of_muon = parameter.matrix_update == MatrixUpdate::kYes;
    (of_muon ? trained.of_muon : trained.all) += size;
    if (!of_muon && size < 4096) trained.small += size;
  }
  ::testing::internal::CaptureStderr();
  OnThreads(2, [&](World world) {
    ASSERT_OK(Engine::Create(world, Device::Cpu(1), model, config).status());
  });
  return ::testing::internal::GetCapturedStderr();
}

TEST(MixedDTypes, WhatKeepsFp32StatesBeside8BitOnesIsLoggedOnce) {
  Trained trained;
  const std::string log = LogOf({.states = OptimizerStates::k8Bit}, trained);
  ASSERT_LT(0, trained.small);
  const auto line = [&] {
    return absl::StrCat("with ", trained.small, " of ", trained.all,
                        " elements, are small and keep fp32 states "
                        "(optimizer.params.min_8bit_size 4096)");
  };
  EXPECT_THAT(log, HasSubstr(line() + "\n"));
  EXPECT_EQ(log.find(line()), log.rfind(line()));
  EXPECT_THAT(LogOf({.states = OptimizerStates::kBFloat16}, trained),
              ::testing::Not(HasSubstr("keep fp32 states")));
  const std::string of_muon =
      LogOf({.type = OptimizerType::kMuon, .states = OptimizerStates::k8Bit}, trained);
  ASSERT_LT(0, trained.of_muon);
  EXPECT_THAT(of_muon, HasSubstr(absl::StrCat(line(), "; Muon's momentum of ", trained.of_muon,
                                              " elements has 32 bits\n")));
}

}  // namespace
}  // namespace ebb::testing::mixed_dtypes_test
