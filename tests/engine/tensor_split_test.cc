// Whole models that the engine cuts over tensor ranks (ParameterSpec::split), beside the same model
// on one rank. A block has a column-parallel and a row-parallel product:
//
//   y = sum over tensor ranks of down tanh(up (gain x) + up_bias)  +  down_bias
//
// The hidden elements do not divide by the tensor ranks. `gain` is whole. So is `down_bias`, of
// which each tensor rank has the gradient of some elements only, as under sequence parallelism.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::tensor_split_test {
namespace {

using Vector = std::vector<float>;

constexpr int kBlocks = 2, kWidth = 6, kHidden = 7, kSteps = 3;
enum Role { kUp, kUpBias, kDown, kGain, kDownBias, kRoles };
ParameterId Of(int block, Role role) {
  return static_cast<ParameterId>(block * kRoles + role);
}

ModelSpec Model(bool splits = true) {
  ModelSpec model;
  for (int b = 0; b < kBlocks; ++b) {
    const UnitId unit = model.AddUnit(absl::StrCat("block", b));
    const auto add = [&](const char* name, std::vector<int64_t> shape,
                         std::optional<Split> split = {}, bool sums_gradient = false) {
      if (!splits) split = {};
      model.Add(unit, {.name = absl::StrCat("block", b, ".", name),
                       .shape = std::move(shape),
                       .init = Normal(0.5f, 3),
                       .split = std::move(split),
                       .sums_gradient = sums_gradient && splits});
    };
    add("up", {kHidden, kWidth}, Split{.dimension = 0});
    add("up_bias", {kHidden}, Split{.dimension = 0});
    add("down", {kWidth, kHidden}, Split{.dimension = 1});
    add("gain", {kWidth});
    add("down_bias", {kWidth}, {}, /*sums_gradient=*/true);
    model.forward.push_back({.unit = unit});
  }
  return model;
}

class Trainer {
 public:
  explicit Trainer(Engine& engine) : engine_(engine), tensor_(engine.tensor()) {}

  absl::Status Train(int64_t number) {
    Step step = engine_.BeginStep();
    for (int m = 0; m < step.rounds(); ++m) {
      Vector x(kWidth);
      for (size_t i = 0; i < kWidth; ++i)
        x[i] = std::cos(static_cast<float>(i) * 1.7f + static_cast<float>(number) +
                        5 * static_cast<float>(engine_.data_rank() + m));
      std::vector<Kept> kept(kBlocks);
      for (int b = 0; b < kBlocks; ++b) x = Forward(step.Forward(UnitId{b}), b, x, kept[b]);
      float loss = 0;
      Vector dy(kWidth);
      for (size_t i = 0; i < kWidth; ++i) {
        const float error = x[i] - 0.3f * static_cast<float>(i);
        loss += error * error / 2;
        dy[i] = error * step.loss_scale();
      }
      step.AddLoss(reach_.Scalar(loss));
      for (int b = kBlocks; b-- > 0;) dy = Backward(step.Backward(UnitId{b}), b, kept[b], dy);
    }
    return step.Finish();
  }

 private:
  struct Kept {
    Vector x, z, h;
  };

  Vector Forward(const Scope& scope, int b, const Vector& x, Kept& kept) {
    const Vector up = Values(scope, b, kUp), bias = Values(scope, b, kUpBias),
                 down = Values(scope, b, kDown), gain = Values(scope, b, kGain);
    const size_t hidden = bias.size();
    kept = {x, x, Vector(hidden)};
    for (size_t i = 0; i < kWidth; ++i) kept.z[i] = gain[i] * x[i];
    Vector y(kWidth);
    for (size_t j = 0; j < hidden; ++j) {
      float sum = bias[j];
      for (size_t i = 0; i < kWidth; ++i) sum += up[j * kWidth + i] * kept.z[i];
      kept.h[j] = std::tanh(sum);
      for (size_t i = 0; i < kWidth; ++i) y[i] += down[i * hidden + j] * kept.h[j];
    }
    Sum(y);
    const Vector whole_bias = Values(scope, b, kDownBias);
    for (size_t i = 0; i < kWidth; ++i) y[i] += whole_bias[i];
    return y;
  }

  Vector Backward(BackwardScope scope, int b, const Kept& kept, const Vector& dy) {
    const Vector up = Values(scope, b, kUp), down = Values(scope, b, kDown),
                 gain = Values(scope, b, kGain);
    const size_t hidden = kept.h.size();
    Vector d_up(hidden * kWidth), d_bias(hidden), d_down(kWidth * hidden), dz(kWidth);
    for (size_t j = 0; j < hidden; ++j) {
      float dh = 0;
      for (size_t i = 0; i < kWidth; ++i) {
        dh += down[i * hidden + j] * dy[i];
        d_down[i * hidden + j] = dy[i] * kept.h[j];
      }
      d_bias[j] = dh * (1 - kept.h[j] * kept.h[j]);
      for (size_t i = 0; i < kWidth; ++i) {
        d_up[j * kWidth + i] = d_bias[j] * kept.z[i];
        dz[i] += up[j * kWidth + i] * d_bias[j];
      }
    }
    Sum(dz);
    Vector d_gain(kWidth), dx(kWidth), d_down_bias(kWidth);
    for (size_t i = 0; i < kWidth; ++i) {
      d_gain[i] = dz[i] * kept.x[i];
      dx[i] = dz[i] * gain[i];
      if (static_cast<int>(i) % tensor_.size() == tensor_.rank()) d_down_bias[i] = dy[i];
    }
    const Vector* const gradients[kRoles] = {&d_up, &d_bias, &d_down, &d_gain, &d_down_bias};
    for (int role = 0; role < kRoles; ++role)
      reach_.AddTo(scope.gradient(Of(b, static_cast<Role>(role))), *gradients[role]);
    return dx;
  }

  Vector Values(const Scope& scope, int b, Role role) const {
    return reach_.Values(scope.parameter(Of(b, role)));
  }
  void Sum(Vector& values) {
    const int64_t shape[] = {std::ssize(values)};
    tensor_.AllReduce({.data = values.data(), .shape = shape});
  }

  Engine& engine_;
  const TensorAxis tensor_;
  const Reach reach_{Device::Cpu(1)};
};

Config ConfigOf(int stage, int tensor) {
  Config config;
  config.compute = DType::kFloat32;
  config.micro_batch_size = 1;
  config.gradient_clipping = 0.1;
  config.optimizer.type = OptimizerType::kAdamW;
  config.optimizer.learning_rate = 0.01;
  config.zero.stage = stage;
  config.zero.param_persistence_threshold = 0;
  config.ebb.mesh.tensor = tensor;
  config.ebb.timeout_seconds = 120;
  return config;
}

struct Outcome {
  std::vector<StepReport> steps;
  std::vector<Vector> masters, moments;  // whole
  friend bool operator==(const Outcome& a, const Outcome& b) {
    return a.masters == b.masters && a.moments == b.moments;
  }
};

absl::StatusOr<std::vector<Vector>> GatherAll(Engine& engine, StateClass what,
                                              std::string_view state = "") {
  std::vector<Vector> all;
  for (size_t p = 0; p < engine.model().parameters.size(); ++p) {
    Vector& whole =
        all.emplace_back(static_cast<size_t>(Elements(WholeShape(engine.model().parameters[p]))));
    EBB_RETURN_IF_ERROR(engine.Gather(static_cast<ParameterId>(p), what, whole, -1, state));
  }
  return all;
}

absl::Status TrainHere(Engine& engine, Outcome& outcome) {
  Trainer trainer(engine);
  for (int step = 0; step < kSteps; ++step) {
    EBB_RETURN_IF_ERROR(trainer.Train(step));
    EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
    outcome.steps.push_back(report);
  }
  EBB_ASSIGN_OR_RETURN(outcome.masters, GatherAll(engine, StateClass::kMaster));
  EBB_ASSIGN_OR_RETURN(outcome.moments, GatherAll(engine, StateClass::kOptimizer, "exp_avg"));
  return absl::OkStatus();
}

// By rank of the world, with data x tensor ranks.
std::vector<Outcome> Train(const Config& config, int data, EngineOptions options = {}) {
  const int ranks = data * static_cast<int>(config.ebb.mesh.tensor);
  std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
  OnThreads(ranks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), Model(), config, options));
    return TrainHere(engine, outcomes[static_cast<size_t>(world.rank())]);
  });
  return outcomes;
}

// One rank with the samples of all data ranks as micro-batches.
Outcome OnOneRank(Config config, int data) {
  config.ebb.mesh.tensor = 1;
  config.gradient_accumulation_steps = data;
  return Train(config, 1).front();
}

double LargestDifference(const std::vector<Vector>& a, const std::vector<Vector>& b) {
  double largest = 0;
  for (size_t p = 0; p < a.size(); ++p)
    for (size_t i = 0; i < a[p].size(); ++i)
      largest = std::max(largest, std::abs(static_cast<double>(a[p][i]) - b[p][i]));
  return largest;
}

// AdamW's first steps are of the size of the rate, 0.01, whatever the gradient's. A gradient is off
// by some 1e-6 of itself where sums are in another order, and so is a step, of 0.01 in each of three.
constexpr double kTolerance = 3e-7;

TEST(TensorSplit, AWholeModelTrainsOnTensorRanksAsOnOne) {
  for (const auto& [data, tensor] : {std::pair(1, 2), {2, 2}, {1, 3}, {2, 3}}) {
    SCOPED_TRACE(absl::StrCat(data, " x ", tensor));
    const Config config = ConfigOf(1, tensor);
    const Outcome one = OnOneRank(config, data);
    const std::vector<Outcome> outcomes = Train(config, data);
    for (const Outcome& outcome : outcomes) {
      EXPECT_LT(LargestDifference(outcome.masters, one.masters), kTolerance);
      ASSERT_EQ(outcome.steps.size(), size_t{kSteps});
      for (size_t s = 0; s < kSteps; ++s) {
        ASSERT_GT(one.steps[s].gradient_norm, 0.2);  // it clips
        EXPECT_NEAR(outcome.steps[s].gradient_norm / one.steps[s].gradient_norm, 1, 2e-6);
        EXPECT_NEAR(outcome.steps[s].loss / one.steps[s].loss, 1, 1e-6);
        EXPECT_EQ(outcome.steps[s].gradient_norm, outcomes[0].steps[s].gradient_norm);
      }
      EXPECT_EQ(outcome, outcomes[0]);  // all ranks gather the same
    }
  }
}

// Bit for bit, at one width.
TEST(TensorSplit, StagesAndTiersChangeNoBit) {
  const Scratch scratch;
  const Outcome first = Train(ConfigOf(1, 2), 2).front();
  for (const int stage : {0, 2, 3}) {
    EXPECT_EQ(Train(ConfigOf(stage, 2), 2).front(), first) << "stage " << stage;
  }
  Config in_ram = ConfigOf(3, 2);
  in_ram.zero.offload_param.device = in_ram.zero.offload_optimizer.device = Tier::kCpu;
  EXPECT_EQ(Train(in_ram, 2).front(), first) << "RAM";
  EXPECT_EQ(Train(OnNvme(ConfigOf(3, 2), scratch.path()), 2).front(), first) << "NVMe";
  Config replicas = ConfigOf(2, 2);
  replicas.ebb.shard_group = 1;
  EXPECT_EQ(Train(replicas, 2).front(), first) << "replicas";
}

TEST(TensorSplit, ValuesOfRankZeroAreThoseOfTheInitialisers) {
  EngineOptions of_rank_0;
  of_rank_0.initial_values_of_rank_0 = true;
  EXPECT_EQ(Train(ConfigOf(3, 2), 2, of_rank_0).front(), Train(ConfigOf(3, 2), 2).front());
}

// Each rank sees slices of the whole, and each element is on one data rank of one tensor rank, or of
// each if the parameter is whole.
TEST(TensorSplit, StateIsReadAndWrittenByElementsOfTheWhole) {
  constexpr int kTensor = 3, kData = 2;
  std::mutex mutex;
  std::vector<std::vector<int>> seen;
  for (const ParameterSpec& parameter : Model().parameters)
    seen.emplace_back(static_cast<size_t>(Elements(parameter.shape)), 0);
  OnThreads(kTensor * kData, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), Model(), ConfigOf(3, kTensor)));
    EXPECT_EQ(engine.world().size(), kTensor * kData);
    EXPECT_EQ(engine.data_ranks(), kData);
    const auto number = [](const Slice& slice, int64_t element) {
      return static_cast<float>(100 * static_cast<int>(slice.parameter) + element);
    };
    EBB_RETURN_IF_ERROR(
        engine.Write(StateClass::kMaster, [&](const Slice& slice, std::span<float> values) {
          for (size_t i = 0; i < values.size(); ++i)
            values[i] = number(slice, slice.begin + static_cast<int64_t>(i));
          return absl::OkStatus();
        }));
    EBB_RETURN_IF_ERROR(
        engine.Read(StateClass::kMaster, [&](const Slice& slice, std::span<const float> values) {
          const std::lock_guard lock(mutex);
          EXPECT_EQ(Elements(slice.shape), std::ssize(seen[static_cast<size_t>(slice.parameter)]));
          for (size_t i = 0; i < values.size(); ++i) {
            const int64_t element = slice.begin + static_cast<int64_t>(i);
            EXPECT_EQ(values[i], number(slice, element));
            ++seen[static_cast<size_t>(slice.parameter)][static_cast<size_t>(element)];
          }
          return absl::OkStatus();
        }));
    EBB_ASSIGN_OR_RETURN(const std::vector<Vector> whole, GatherAll(engine, StateClass::kMaster));
    for (size_t p = 0; p < whole.size(); ++p)
      for (size_t i = 0; i < whole[p].size(); ++i)
        EXPECT_EQ(whole[p][i], static_cast<float>(100 * p + i));
    return absl::OkStatus();
  });
  for (size_t p = 0; p < seen.size(); ++p)
    for (const int times : seen[p])
      EXPECT_EQ(times, Model().parameters[p].split ? 1 : kTensor) << Model().parameters[p].name;
}

TEST(TensorSplit, AnOptimizerOfTheTrainersSeesSlicesOfTheWhole) {
  std::mutex mutex;
  int64_t updated = 0;
  EngineOptions own;
  own.optimizer = {.states = {"exp_avg"}, .update = [&](const UpdateSlice& update) {
                     const std::lock_guard lock(mutex);
                     if (update.slice.name.ends_with(".down")) {
                       EXPECT_EQ(Elements(update.slice.shape), kWidth * kHidden);
                       EXPECT_EQ(std::ssize(update.master), update.slice.end - update.slice.begin);
                       updated += std::ssize(update.master);
                     }
                     for (size_t i = 0; i < update.master.size(); ++i)
                       update.master[i] -= 0.1f * update.gradient[i];
                     return absl::OkStatus();
                   }};
  const Config config = ConfigOf(1, 2);
  const Outcome cut = Train(config, 2, own).front();
  EXPECT_EQ(updated, kSteps * kBlocks * kWidth * kHidden);
  Config one = config;
  one.ebb.mesh.tensor = 1;
  one.gradient_accumulation_steps = 2;
  EXPECT_LT(LargestDifference(cut.masters, Train(one, 1, own).front().masters), kTolerance);
}

TEST(TensorSplit, ParametersAreCopiedBetweenEnginesOfOneMesh) {
  OnThreads(4, [&](World world) -> absl::Status {
    Outcome outcome;
    EBB_ASSIGN_OR_RETURN(Engine trained,
                         Engine::Create(world, Device::Cpu(1), Model(), ConfigOf(3, 2)));
    EBB_RETURN_IF_ERROR(TrainHere(trained, outcome));
    EBB_ASSIGN_OR_RETURN(Engine copy, Engine::Create(world, Device::Cpu(1), Model(), ConfigOf(1, 2),
                                                     {.name = "copy"}));
    EBB_RETURN_IF_ERROR(copy.CopyParametersFrom(trained));
    EBB_ASSIGN_OR_RETURN(const std::vector<Vector> copied, GatherAll(copy, StateClass::kMaster));
    EXPECT_EQ(copied, outcome.masters);
    return absl::OkStatus();
  });
}

// Nothing of it costs anything without tensor ranks.
TEST(TensorSplit, OneTensorRankHasThePlanOfAModelWithoutSplits) {
  const auto cut = PredictProgram(Model(), 4, ConfigOf(3, 1)),
             plain = PredictProgram(Model(/*splits=*/false), 4, ConfigOf(3, 1));
  ASSERT_OK(cut.status());
  ASSERT_OK(plain.status());
  EXPECT_EQ(cut->table(), plain->table());
}

TEST(TensorSplit, WhatIsPredictedIsWhatIsCounted) {
  const auto program = PredictProgram(Model(), 4, ConfigOf(3, 2));
  ASSERT_OK(program.status());
  OnThreads(4, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), Model(), ConfigOf(3, 2)));
    Outcome outcome;
    EBB_RETURN_IF_ERROR(TrainHere(engine, outcome));
    EXPECT_EQ(engine.program().table(), program->table());
    for (const MemoryRow& row : engine.memory())
      EXPECT_LE(row.peak_bytes, row.predicted_bytes) << Name(row.state);
    return absl::OkStatus();
  });
}

TEST(TensorSplit, WrongUsesAreRefusedByName) {
  OnThreads(2, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const World part, world.Split(world.rank(), 0));
    EXPECT_THAT(
        Engine::Create(part, Device::Cpu(1), Model(), ConfigOf(1, 1), {.verdict = world}).status(),
        Says("parameter 'block0.up' has a split", "ebb.mesh.tensor"));
    ModelSpec narrow = Model();
    narrow.parameters[kUpBias].split->multiple = kHidden;
    EXPECT_THAT(Engine::Create(world, Device::Cpu(1), narrow, ConfigOf(1, 2)).status(),
                Says("parameter 'block0.up_bias'", "use at most 1 tensor ranks"));
    // A view that is too small, on all ranks alike: the error of the step.
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), Model(), ConfigOf(1, 2)));
    Step step = engine.BeginStep();
    float block[2] = {}, blocks[3] = {};
    const int64_t two[] = {2}, three[] = {3};
    engine.tensor().AllGather({.data = block, .shape = two}, {.data = blocks, .shape = three});
    EXPECT_THAT(step.Finish(), Says("TensorAxis::AllGather between a block of 2 elements"));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace ebb::testing::tensor_split_test
