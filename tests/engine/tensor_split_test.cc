// Whole models that the engine cuts over tensor ranks, beside the same model on one rank.
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
#include "tests/engine/tensor_model.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::tensor_split_test {
namespace {

constexpr int kSteps = 3;

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
  TensorTrainer trainer(engine);
  for (int step = 0; step < kSteps; ++step) {
    EBB_RETURN_IF_ERROR(trainer.Train(step));
    EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
    outcome.steps.push_back(report);
  }
  EBB_ASSIGN_OR_RETURN(outcome.masters, GatherAll(engine, StateClass::kMaster));
  const std::string state = engine.optimizer_states(Of(0, kUp)).front();
  EBB_ASSIGN_OR_RETURN(outcome.moments, GatherAll(engine, StateClass::kOptimizer, state));
  return absl::OkStatus();
}

// By rank of the world, with data x tensor ranks.
std::vector<Outcome> Train(const Config& config, int data, EngineOptions options = {}) {
  const int ranks = data * static_cast<int>(config.ebb.mesh.tensor);
  std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
  OnThreads(ranks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), TensorModel(), config, options));
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
    const Config config = TensorConfig(1, tensor);
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
  const Outcome first = Train(TensorConfig(1, 2), 2).front();
  for (const int stage : {0, 2, 3}) {
    EXPECT_EQ(Train(TensorConfig(stage, 2), 2).front(), first) << "stage " << stage;
  }
  Config in_ram = TensorConfig(3, 2);
  in_ram.zero.offload_param.device = in_ram.zero.offload_optimizer.device = Tier::kCpu;
  EXPECT_EQ(Train(in_ram, 2).front(), first) << "RAM";
  EXPECT_EQ(Train(OnNvme(TensorConfig(3, 2), scratch.path()), 2).front(), first) << "NVMe";
  Config replicas = TensorConfig(2, 2);
  replicas.ebb.shard_group = 1;
  EXPECT_EQ(Train(replicas, 2).front(), first) << "replicas";
}

// One sample's gradients in fp64, from the whole parameters.
std::vector<std::vector<double>> ReferenceGradients(const std::vector<Vector>& masters) {
  using Numbers = std::vector<double>;
  const auto of = [&](int block, TensorRole role) -> const Vector& {
    return masters[static_cast<size_t>(Of(block, role))];
  };
  const Vector input = TensorInput(0, 0);
  std::vector<Numbers> inputs = {Numbers(input.begin(), input.end())}, hidden;
  for (int b = 0; b < kBlocks; ++b) {
    Numbers y(of(b, kDownBias).begin(), of(b, kDownBias).end()), h(kHidden);
    for (size_t j = 0; j < kHidden; ++j) {
      double sum = of(b, kUpBias)[j];
      for (size_t i = 0; i < kWidth; ++i)
        sum += double{of(b, kUp)[j * kWidth + i]} * of(b, kGain)[i] * inputs.back()[i];
      h[j] = std::tanh(sum);
      for (size_t i = 0; i < kWidth; ++i) y[i] += of(b, kDown)[i * kHidden + j] * h[j];
    }
    inputs.push_back(std::move(y));
    hidden.push_back(std::move(h));
  }
  std::vector<Numbers> gradients;
  for (const Vector& parameter : masters) gradients.emplace_back(parameter.size());
  Numbers dy = inputs.back();
  for (size_t i = 0; i < kWidth; ++i) dy[i] -= TensorTarget(i);
  for (int b = kBlocks; b-- > 0;) {
    const auto to = [&](TensorRole role) -> Numbers& {
      return gradients[static_cast<size_t>(Of(b, role))];
    };
    const Numbers& x = inputs[static_cast<size_t>(b)];
    Numbers dx(kWidth);
    to(kDownBias) = dy;
    for (size_t j = 0; j < kHidden; ++j) {
      const double h = hidden[static_cast<size_t>(b)][j];
      double dh = 0;
      for (size_t i = 0; i < kWidth; ++i) {
        dh += of(b, kDown)[i * kHidden + j] * dy[i];
        to(kDown)[i * kHidden + j] = dy[i] * h;
      }
      const double d_sum = to(kUpBias)[j] = dh * (1 - h * h);
      for (size_t i = 0; i < kWidth; ++i) {
        const double gain = of(b, kGain)[i], up = of(b, kUp)[j * kWidth + i];
        to(kUp)[j * kWidth + i] = d_sum * gain * x[i];
        to(kGain)[i] += d_sum * up * x[i];
        dx[i] += d_sum * up * gain;
      }
    }
    dy = std::move(dx);
  }
  return gradients;
}

// The length of what is off, over all parameters.
double ErrorOf(const std::vector<Vector>& gradients,
               const std::vector<std::vector<double>>& reference) {
  double squares = 0;
  for (size_t p = 0; p < reference.size(); ++p)
    for (size_t i = 0; i < reference[p].size(); ++i)
      squares += std::pow(gradients[p][i] - reference[p][i], 2);
  return std::sqrt(squares);
}

TEST(TensorSplit, GradientsAreAsFarFromFp64AsThoseOfOneRank) {
  double one = 0;
  for (const int tensor : {1, 2, 3, 7}) {
    std::vector<Vector> masters, gradients;
    OnThreads(tensor, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), TensorModel(),
                                                         TensorConfig(1, tensor)));
      EBB_ASSIGN_OR_RETURN(std::vector<Vector> values, GatherAll(engine, StateClass::kMaster));
      EBB_ASSIGN_OR_RETURN(std::vector<Vector> found, TensorTrainer(engine).Gradients(0));
      if (world.rank() > 0) return absl::OkStatus();
      masters = std::move(values);
      gradients = std::move(found);
      return absl::OkStatus();
    });
    const double error = ErrorOf(gradients, ReferenceGradients(masters));
    if (tensor == 1) one = error;
    EXPECT_GT(one, 0);
    EXPECT_LT(one, 1e-6);  // they are those gradients
    EXPECT_LE(error, 4 * one) << tensor;
  }
}

// Whole parameters, under clipping, on each tensor rank.
TEST(TensorSplit, ReplicasAreEqualAfterManySteps) {
  constexpr int kTensor = 3, kData = 2;
  Config config = TensorConfig(2, kTensor);
  config.ebb.shard_group = 1;  // each data rank has all states
  std::vector<Vector> replicas(kTensor * kData);
  OnThreads(kTensor * kData, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), TensorModel(), config));
    TensorTrainer trainer(engine);
    for (int step = 0; step < 50; ++step) EBB_RETURN_IF_ERROR(trainer.Train(step));
    return engine.Read(StateClass::kMaster, [&](const Slice& slice, std::span<const float> values) {
      Vector& all = replicas[static_cast<size_t>(world.rank())];
      if (!TensorModel()[slice.parameter].split)
        all.insert(all.end(), values.begin(), values.end());
      return absl::OkStatus();
    });
  });
  for (int rank = 0; rank < kTensor * kData; ++rank) {
    EXPECT_FALSE(replicas[static_cast<size_t>(rank)].empty());
    EXPECT_EQ(replicas[static_cast<size_t>(rank)],
              replicas[static_cast<size_t>(rank / kTensor * kTensor)]);
  }
}

// Their ratios follow from the norms of whole parameters. A step is as long as a fraction of the
// parameter's norm, some 0.03, so that the roundings of its gradient, 1e-6 of it, are far below.
TEST(TensorSplit, LambAndLarsTakeNormsOfWholeParameters) {
  for (const OptimizerType type : {OptimizerType::kLamb, OptimizerType::kLars}) {
    Config config = TensorConfig(1, 2);
    config.optimizer.type = type;
    if (type == OptimizerType::kLars) config.optimizer.momentum = 0.5;
    config.gradient_clipping = 0;
    const Outcome one = OnOneRank(config, 2);
    std::optional<std::vector<Vector>> first;
    for (const int stage : {0, 1, 3}) {
      for (const bool in_ram : {false, true}) {
        if (stage == 0 && in_ram) continue;
        SCOPED_TRACE(absl::StrCat(static_cast<int>(type), " at stage ", stage, " ", in_ram));
        config.zero.stage = stage;
        config.zero.offload_optimizer.device = in_ram ? Tier::kCpu : Tier::kDevice;
        for (const Outcome& outcome : Train(config, 2)) {
          EXPECT_LT(LargestDifference(outcome.masters, one.masters), 1e-6);
          if (!first) first = outcome.masters;
          EXPECT_EQ(outcome.masters, *first);
        }
      }
    }
  }
}

TEST(TensorSplit, ValuesOfRankZeroAreThoseOfTheInitialisers) {
  EngineOptions of_rank_0;
  of_rank_0.initial_values_of_rank_0 = true;
  EXPECT_EQ(Train(TensorConfig(3, 2), 2, of_rank_0).front(), Train(TensorConfig(3, 2), 2).front());
}

// Each rank sees slices of the whole, and each element is on one data rank of one tensor rank, or of
// each if the parameter is whole.
TEST(TensorSplit, StateIsReadAndWrittenByElementsOfTheWhole) {
  constexpr int kTensor = 3, kData = 2;
  std::mutex mutex;
  std::vector<std::vector<int>> seen;
  for (const ParameterSpec& parameter : TensorModel().parameters)
    seen.emplace_back(static_cast<size_t>(Elements(parameter.shape)), 0);
  OnThreads(kTensor * kData, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), TensorModel(),
                                                       TensorConfig(3, kTensor)));
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
      EXPECT_EQ(times, TensorModel().parameters[p].split ? 1 : kTensor)
          << TensorModel().parameters[p].name;
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
  const Config config = TensorConfig(1, 2);
  const Outcome cut = Train(config, 2, own).front();
  EXPECT_EQ(updated, kSteps * kBlocks * kWidth * kHidden);
  Config one = config;
  one.ebb.mesh.tensor = 1;
  one.gradient_accumulation_steps = 2;
  EXPECT_LT(LargestDifference(cut.masters, Train(one, 1, own).front().masters), kTolerance);
}

TEST(TensorSplit, ParametersAreCopiedBetweenMeshes) {
  const Scratch scratch;
  for (const auto& [from, to] : {std::pair(2, 2), {2, 1}, {1, 2}, {4, 2}, {2, 4}}) {
    SCOPED_TRACE(absl::StrCat("tensor ", from, " to ", to));
    OnThreads(4, [&](World world) -> absl::Status {
      Outcome outcome;
      EBB_ASSIGN_OR_RETURN(Engine trained, Engine::Create(world, Device::Cpu(1), TensorModel(),
                                                          TensorConfig(3, from)));
      EBB_RETURN_IF_ERROR(TrainHere(trained, outcome));
      EBB_ASSIGN_OR_RETURN(Engine copy, Engine::Create(world, Device::Cpu(1), TensorModel(),
                                                       OnNvme(TensorConfig(3, to), scratch.path()),
                                                       {.name = "copy"}));
      EBB_RETURN_IF_ERROR(copy.CopyParametersFrom(trained));
      EBB_ASSIGN_OR_RETURN(const std::vector<Vector> copied, GatherAll(copy, StateClass::kMaster));
      EXPECT_EQ(copied, outcome.masters);
      return absl::OkStatus();
    });
  }
}

// Nothing of it costs anything without tensor ranks.
TEST(TensorSplit, OneTensorRankHasThePlanOfAModelWithoutSplits) {
  const auto cut = PredictProgram(TensorModel(), 4, TensorConfig(3, 1)),
             plain = PredictProgram(TensorModel(/*splits=*/false), 4, TensorConfig(3, 1));
  ASSERT_OK(cut.status());
  ASSERT_OK(plain.status());
  EXPECT_EQ(cut->table(), plain->table());
}

TEST(TensorSplit, WhatIsPredictedIsWhatIsCounted) {
  const auto program = PredictProgram(TensorModel(), 4, TensorConfig(3, 2));
  ASSERT_OK(program.status());
  OnThreads(4, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), TensorModel(), TensorConfig(3, 2)));
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
        Engine::Create(part, Device::Cpu(1), TensorModel(), TensorConfig(1, 1), {.verdict = world})
            .status(),
        Says("parameter 'block0.up' has a split", "ebb.mesh.tensor"));
    ModelSpec narrow = TensorModel();
    narrow.parameters[kUpBias].split->multiple = kHidden;
    EXPECT_THAT(Engine::Create(world, Device::Cpu(1), narrow, TensorConfig(1, 2)).status(),
                Says("parameter 'block0.up_bias'", "use at most 1 tensor rank"));
    // A view that is too small, on all ranks alike: the error of the step.
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), TensorModel(), TensorConfig(1, 2)));
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
