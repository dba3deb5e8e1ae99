// A trainer that divides the blocks of tensor_block.h over tensor ranks by hand, on data 2 x tensor 2,
// beside the same model on one rank. Tensor ranks have the hidden elements between them: rows of
// `up`, elements of `up_bias`, columns of `down`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/engine/tensor_block.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/made_files.h"
#include "tests/offload/scratch.h"
#include "tests/offload/test_overrides.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::tensor_parallel_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int kHidden = 10, kTensor = 2, kData = 2, kSteps = 3;

// The number of an element of a parameter in the whole model's.
int64_t OfWhole(const std::string& name, int64_t element, int tensor, int tensor_ranks) {
  const int64_t hidden = kHidden / tensor_ranks;
  if (name.ends_with(".up")) return tensor * hidden * kWidth + element;
  if (name.ends_with(".up_bias")) return tensor * hidden + element;
  if (name.ends_with(".down"))
    return element / hidden * kHidden + tensor * hidden + element % hidden;
  return element;
}

ModelSpec Model(int tensor, int tensor_ranks) {
  const int64_t hidden = kHidden / tensor_ranks;
  ModelSpec model;
  for (int b = 0; b < kBlocks; ++b) {
    const UnitId unit = model.AddUnit(absl::StrCat("block", b));
    const auto add = [&](const char* name, std::vector<int64_t> shape, OverTensor over_tensor) {
      const auto init = [=](const Slice& slice, std::span<float> values) {
        const std::string of(slice.name);
        for (size_t i = 0; i < values.size(); ++i) {
          const int64_t at =
              OfWhole(of, slice.begin + static_cast<int64_t>(i), tensor, tensor_ranks);
          values[i] = 0.5f * std::sin(static_cast<float>(at + 7 * b + 3) *
                                      static_cast<float>(1 + of.size()));
        }
        return absl::OkStatus();
      };
      model.Add(unit, {.name = absl::StrCat("block", b, ".", name),
                       .shape = std::move(shape),
                       .init = init,
                       .over_tensor = over_tensor});
    };
    add("up", {hidden, kWidth}, OverTensor::kLocal);
    add("up_bias", {hidden}, OverTensor::kLocal);
    add("down", {kWidth, hidden}, OverTensor::kLocal);
    add("gain", {kWidth}, OverTensor::kWhole);
    add("down_bias", {kWidth}, OverTensor::kWhole);
    model.forward.push_back({.unit = unit});
  }
  return model;
}

// One rank does this in a step, in the first block.
struct Fault {
  int rank = -1;  // in the world
  int64_t step = -1;
  float in_up = 0;             // added to a gradient that it has alone
  float in_gain = 0;           // added to a gradient that is whole over tensor
  bool wrong_request = false;  // asks a scope for another unit's parameter
};

// A rank does this beside the steps that all make.
struct Apart {
  std::function<absl::Status(Engine& engine, int rank)> before_step = nullptr;  // the second
  std::function<void(EngineOptions& options, ModelSpec& model, int rank)> change = nullptr;
};

class Trainer {
 public:
  // `data`, `tensor`: this rank's coordinates; without `sums` one rank has all of the model.
  Trainer(int data, int tensor, std::optional<Communicator> sums)
      : data_(data),
        tensor_(tensor),
        hidden_(sums.has_value() ? kHidden / kTensor : kHidden),
        sums_(std::move(sums)) {}

  absl::Status Train(Engine& engine, int64_t number, const Fault* fault) {
    Step step = engine.BeginStep();
    for (int m = 0; m < step.rounds(); ++m) {
      const int sample = data_ + m;
      Vector x = TensorInput(number, sample), dy;
      std::vector<TensorKept> kept(kBlocks);
      for (int b = 0; b < kBlocks; ++b) x = Forward(step.Forward(UnitId{b}), b, x, kept[b]);
      step.AddLoss(reach_.Scalar(TensorLoss(x, step.loss_scale(), dy)));
      for (int b = kBlocks; b-- > 0;) {
        BackwardScope scope = step.Backward(UnitId{b});
        dy = Backward(scope, b, kept[b], dy, b == 0 ? fault : nullptr);
      }
    }
    return step.Finish();
  }

  // The mean over samples of the first output.
  absl::StatusOr<EvaluationSum> Evaluate(Engine& engine) {
    Evaluation evaluation = engine.BeginEvaluation();
    for (int m = 0; m < engine.config().gradient_accumulation_steps; ++m) {
      Vector x = TensorInput(/*number=*/100, data_ + m);
      TensorKept kept;
      for (int b = 0; b < kBlocks; ++b) x = Forward(evaluation.Forward(UnitId{b}), b, x, kept);
      evaluation.AddLoss(reach_.Scalar(x[0]));
    }
    EBB_ASSIGN_OR_RETURN(const Evaluation::Sums sums, evaluation.FinishSums());
    return sums[0];
  }

 private:
  Vector Forward(const Scope& scope, int b, const Vector& x, TensorKept& kept) {
    return BlockForward(
        ValuesOf(scope, b), x, [this](Vector& values) { Sum(values); }, kept);
  }

  Vector Backward(BackwardScope& scope, int b, const TensorKept& kept, const Vector& dy,
                  const Fault* fault) {
    TensorGradients d =
        BlockBackward(ValuesOf(scope, b), kept, dy, [this](Vector& values) { Sum(values); });
    if (fault != nullptr) {
      d.up[0] += fault->in_up;
      d.gain[0] += fault->in_gain;
      if (fault->wrong_request) scope.gradient(Of(1, kUp));
    }
    const Vector* const gradients[kRoles] = {&d.up, &d.up_bias, &d.down, &d.gain, &dy};
    for (int role = 0; role < kRoles; ++role)
      reach_.AddTo(scope.gradient(Of(b, static_cast<TensorRole>(role))), *gradients[role]);
    return d.x;
  }

  TensorBlock ValuesOf(const Scope& scope, int b) const {
    const auto values = [&](TensorRole role) {
      Vector of = reach_.Values(scope.parameter(Of(b, role)));
      of.resize(std::max<size_t>(of.size(), hidden_ * kWidth));  // empty in a wrong scope
      return of;
    };
    return {.hidden = hidden_,
            .up = values(kUp),
            .up_bias = values(kUpBias),
            .down = values(kDown),
            .gain = values(kGain),
            .down_bias = values(kDownBias)};
  }

  // Over tensor ranks, in their order.
  void Sum(Vector& values) {
    if (!sums_.has_value()) return;
    const Vector mine = values;
    const CollectiveSpan span = {
        .send = mine.data(), .receive = values.data(), .count = std::ssize(values)};
    Stream stream = Device::Cpu(1).CallerStream();
    ExpectOk(sums_->AllReduce(stream, {&span, 1}, DType::kFloat32));
    stream.WaitIdle();
  }

  const int data_, tensor_;
  const size_t hidden_;
  std::optional<Communicator> sums_;
  const Reach reach_{Device::Cpu(1)};
};

Config ConfigOf(DType compute, int stage, int shard_group = 0) {
  Config config;
  config.compute = compute;
  config.micro_batch_size = 1;
  config.gradient_clipping = 0.1;
  config.optimizer.type = OptimizerType::kSgd;
  config.optimizer.learning_rate = 0.5;
  config.zero.stage = stage;
  config.ebb.shard_group = shard_group;
  config.zero.param_persistence_threshold = 0;
  config.loss_scale.initial_scale_power = 8;
  config.loss_scale.hysteresis = 1;
  config.ebb.timeout_seconds = 120;
  return config;
}

// Ways to have tensor ranks. kVerdictOfParts: the ranks of each part are neighbours, so a rank has
// another number in the mesh than in the world. kApart: without a verdict.
enum class Way { kVerdict, kVerdictOfParts, kMesh, kApart };

struct Outcome {
  absl::Status created, finished, reported;  // of the step with the fault, if there is one
  std::vector<StepReport> steps;
  EvaluationSum evaluation;
  std::vector<Vector> masters;  // of the whole model's parameters, where this rank has them
  std::vector<Vector> whole;    // this rank's replicas of those that are whole over tensor
};

absl::Status Run(Engine& engine, Trainer& trainer, int rank, const ModelSpec& model, int tensor,
                 int tensor_ranks, const Fault& fault, Outcome& outcome, const Apart& apart = {}) {
  for (int step = 0; step < kSteps; ++step) {
    if (step == 1 && apart.before_step != nullptr)
      EBB_RETURN_IF_ERROR(apart.before_step(engine, rank));
    const bool fails = fault.rank == rank && fault.step == step;
    const absl::Status finished = trainer.Train(engine, step, fails ? &fault : nullptr);
    const absl::StatusOr<StepReport> report = engine.Report();
    if (report.ok()) {
      outcome.steps.push_back(*report);
    } else {
      outcome.finished = finished;
      outcome.reported = report.status();
    }
  }
  EBB_ASSIGN_OR_RETURN(outcome.evaluation, trainer.Evaluate(engine));
  const ModelSpec all = Model(0, 1);
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    Vector part(static_cast<size_t>(Elements(model.parameters[p].shape)));
    EBB_RETURN_IF_ERROR(engine.Gather(static_cast<ParameterId>(p), StateClass::kMaster, part));
    Vector& of_whole =
        outcome.masters.emplace_back(static_cast<size_t>(Elements(all.parameters[p].shape)),
                                     std::numeric_limits<float>::quiet_NaN());
    for (size_t i = 0; i < part.size(); ++i)
      of_whole[static_cast<size_t>(OfWhole(model.parameters[p].name, static_cast<int64_t>(i),
                                           tensor, tensor_ranks))] = part[i];
    if (model.parameters[p].over_tensor == OverTensor::kWhole) outcome.whole.push_back(part);
  }
  return absl::OkStatus();
}

// By rank of the world. Its ranks 0 and 1 are the tensor ranks of the first sample, or with
// kVerdictOfParts the data ranks of the first part.
std::vector<Outcome> Train(Way way, Config config, const Fault& fault = {},
                           OverTensor of_gain = OverTensor::kWhole, const Apart& apart = {}) {
  config.ebb.mesh.tensor = kTensor;
  const Mesh mesh = MeshOf(config, kData * kTensor);
  if (way != Way::kMesh) config.ebb.mesh.tensor = 1;
  std::vector<Outcome> outcomes(static_cast<size_t>(mesh.ranks()));
  OnThreads(mesh.ranks(), [&](World world) -> absl::Status {
    Outcome& outcome = outcomes[static_cast<size_t>(world.rank())];
    const int in_mesh = way == Way::kVerdictOfParts
                            ? world.rank() % kData * kTensor + world.rank() / kData
                            : world.rank();
    const int data = mesh.index(in_mesh, kDataAxes),
              tensor = mesh.coordinate(in_mesh, Axis::kTensor);
    EBB_ASSIGN_OR_RETURN(
        const World layer,
        world.Split(/*colour=*/mesh.with(in_mesh, Axis::kTensor, 0), /*key=*/in_mesh));
    EBB_ASSIGN_OR_RETURN(Communicator sums, layer.NewCommunicator());
    ModelSpec model = Model(tensor, kTensor);
    for (int b = 0; b < kBlocks; ++b)
      model.parameters[static_cast<size_t>(Of(b, kGain))].over_tensor = of_gain;
    World of_engine = world;
    EngineOptions options;
    if (way != Way::kMesh) {
      EBB_ASSIGN_OR_RETURN(of_engine, world.Split(/*colour=*/tensor, /*key=*/data));
      if (way != Way::kApart) options.verdict = world;
    }
    if (apart.change != nullptr) apart.change(options, model, world.rank());
    absl::StatusOr<Engine> engine =
        Engine::Create(of_engine, Device::Cpu(1), model, config, std::move(options));
    outcome.created = engine.status();
    if (!engine.ok()) return absl::OkStatus();
    EXPECT_EQ(engine->world().size(), kData);
    EXPECT_EQ(engine->world().rank(), data);
    if (way != Way::kApart) {
      EXPECT_EQ(engine->mesh(), mesh);
      EXPECT_EQ(engine->rank_in_mesh(), in_mesh);
    }
    Trainer trainer(data, tensor, std::move(sums));
    return Run(*engine, trainer, world.rank(), model, tensor, kTensor, fault, outcome, apart);
  });
  return outcomes;
}

// The whole model on one rank, which has the samples of all data ranks as micro-batches.
Outcome TrainOnOneRank(Config config, const Fault& fault = {}) {
  config.ebb.shard_group = 0;
  config.gradient_accumulation_steps = kData;
  Outcome outcome;
  OnThreads(1, [&](World world) -> absl::Status {
    const ModelSpec model = Model(0, 1);
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), model, config));
    Trainer trainer(0, 0, std::nullopt);
    return Run(engine, trainer, /*rank=*/0, model, 0, 1, fault, outcome);
  });
  return outcome;
}

double LargestDifference(const std::vector<Outcome>& outcomes, const Outcome& one) {
  double largest = 0;
  for (const Outcome& outcome : outcomes) {
    for (size_t p = 0; p < outcome.masters.size(); ++p) {
      for (size_t i = 0; i < outcome.masters[p].size(); ++i) {
        const double difference = std::abs(static_cast<double>(outcome.masters[p][i]) -
                                           static_cast<double>(one.masters[p][i]));
        if (difference > largest) largest = difference;  // NaN: another tensor rank has it
      }
    }
  }
  return largest;
}

struct Case {
  Way way{};
  int stage = 0;
  int shard_group = 0;  // 1: each data rank has all of the states
};
class TensorParallelTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Ways, TensorParallelTest,
                         ::testing::Values(Case{Way::kVerdict, 1}, Case{Way::kVerdict, 3},
                                           Case{Way::kMesh, 0}, Case{Way::kMesh, 3},
                                           Case{Way::kMesh, 2, 1}),
                         [](const auto& test) {
                           return absl::StrCat(test.param.way == Way::kMesh ? "Mesh" : "Verdict",
                                               "Stage", test.param.stage,
                                               test.param.shard_group > 0 ? "Replicas" : "");
                         });

// Steps have a length of 0.05 in all, as the clipped gradient of norm 0.1 times the rate. A gradient
// is a sum of some 30 products of fp32, so it is off by at most 30 roundings of 6e-8 where sums are
// in another order, three steps by 3e-7, and a master below 0.7 by 6e-8 in each step.
constexpr double kTolerance = 4e-7;

TEST_P(TensorParallelTest, ItClipsByTheNormOfTheWholeModelAsOneRankDoes) {
  const Config config = ConfigOf(DType::kFloat32, GetParam().stage, GetParam().shard_group);
  const Outcome one = TrainOnOneRank(config);
  const std::vector<Outcome> outcomes = Train(GetParam().way, config);
  EXPECT_LT(LargestDifference(outcomes, one), kTolerance);
  for (const Outcome& outcome : outcomes) {
    ASSERT_OK(outcome.created);
    ASSERT_EQ(outcome.steps.size(), one.steps.size());
    for (size_t s = 0; s < one.steps.size(); ++s) {
      ASSERT_GT(one.steps[s].gradient_norm, 0.2);  // it clips
      EXPECT_NEAR(outcome.steps[s].gradient_norm / one.steps[s].gradient_norm, 1, 1e-6);
      EXPECT_NEAR(outcome.steps[s].loss / one.steps[s].loss, 1, 1e-6);
      EXPECT_EQ(outcome.steps[s].gradient_norm, outcomes[0].steps[s].gradient_norm);
      EXPECT_EQ(outcome.steps[s].loss, outcomes[0].steps[s].loss);
    }
    EXPECT_EQ(outcome.evaluation.count, kData);
    EXPECT_NEAR(outcome.evaluation.sum / one.evaluation.sum, 1, 1e-5);
    EXPECT_EQ(outcome.evaluation.sum, outcomes[0].evaluation.sum);
    EXPECT_EQ(outcome.whole, outcomes[0].whole);  // bit for bit, over data and tensor
  }
  EXPECT_EQ(outcomes[0].steps.back().step, kSteps);
}

// So the test above can see a norm that is a part's alone, and one that counts replicas twice.
TEST(TensorParallel, WithoutAVerdictOrWithAWrongMarkClipFactorsAreWrong) {
  const Config config = ConfigOf(DType::kFloat32, 1);
  const Outcome one = TrainOnOneRank(config);
  EXPECT_GT(LargestDifference(Train(Way::kApart, config), one), 10 * kTolerance);
  EXPECT_GT(LargestDifference(Train(Way::kVerdict, config, {}, OverTensor::kLocal), one),
            10 * kTolerance);
}

TEST_P(TensorParallelTest, AnOverflowOnOneTensorRankSkipsTheStepOnAllRanks) {
  const Config config = ConfigOf(DType::kFloat16, GetParam().stage, GetParam().shard_group);
  const float inf = std::numeric_limits<float>::infinity();
  const Outcome one = TrainOnOneRank(config, {.rank = 0, .step = 1, .in_up = inf});
  ASSERT_EQ(one.steps.size(), size_t{kSteps});
  ASSERT_FALSE(one.steps[1].applied);
  // In a parameter that is the rank's alone, or in one that has a replica.
  for (const Fault& fault :
       {Fault{.rank = 1, .step = 1, .in_up = inf}, Fault{.rank = 3, .step = 1, .in_gain = inf}}) {
    const std::vector<Outcome> outcomes = Train(GetParam().way, config, fault);
    for (const Outcome& outcome : outcomes) {
      ASSERT_EQ(outcome.steps.size(), size_t{kSteps}) << outcome.reported;
      for (size_t s = 0; s < kSteps; ++s) {
        EXPECT_EQ(outcome.steps[s].applied, s != 1);
        EXPECT_EQ(outcome.steps[s].loss_scale, one.steps[s].loss_scale);
        EXPECT_EQ(outcome.steps[s].skipped_steps, one.steps[s].skipped_steps);
      }
      EXPECT_EQ(outcome.steps[2].loss_scale, outcome.steps[1].loss_scale / 2);
      EXPECT_EQ(outcome.whole, outcomes[0].whole);
    }
    // Two steps of length 0.05 with gradients and parameters that were rounded to 2^-11, some of
    // them the other way.
    EXPECT_LT(LargestDifference(outcomes, one), 0.1 * 8 / 2048);
  }
}

TEST_P(TensorParallelTest, AReplicaWithAnotherGradientIsAnErrorThatNamesItsUnitOnAllRanks) {
  const std::vector<Outcome> outcomes =
      Train(GetParam().way, ConfigOf(DType::kFloat32, GetParam().stage, GetParam().shard_group),
            {.rank = 3, .step = 1, .in_gain = 0.01f});
  for (const Outcome& outcome : outcomes) {
    EXPECT_THAT(outcome.reported,
                Says("the gradient of 'block0 [whole]' differs between tensor ranks 0 and 1: "));
    EXPECT_EQ(outcome.reported, outcomes[0].reported);
    ASSERT_EQ(outcome.steps.size(), size_t{kSteps - 1});
    EXPECT_EQ(outcome.steps.back().step, kSteps - 1);
    EXPECT_EQ(outcome.whole, outcomes[0].whole);
  }
}

TEST_P(TensorParallelTest, AnErrorOfOneRankIsThatOfAllRanks) {
  for (int rank = 0; rank < kData * kTensor; ++rank) {
    const std::vector<Outcome> outcomes =
        Train(GetParam().way, ConfigOf(DType::kFloat32, GetParam().stage, GetParam().shard_group),
              {.rank = rank, .step = 1, .wrong_request = true});
    for (int r = 0; r < kData * kTensor; ++r) {
      const Outcome& outcome = outcomes[static_cast<size_t>(r)];
      const std::string why = "the gradient of parameter 'block1.up' asked of Backward('block0')";
      EXPECT_THAT(r == rank ? outcome.finished : outcome.reported, Says(why));
      if (r != rank) {
        EXPECT_THAT(outcome.reported, Says(absl::StrCat("rank ", rank, ": ")));
      }
      EXPECT_EQ(outcome.steps.size(), size_t{kSteps - 1});
      EXPECT_EQ(outcome.whole, outcomes[0].whole);
    }
  }
}

// The ranks of the first part make a call of their own; both have the bits of parts without it.
TEST_P(TensorParallelTest, AnotherCallOfOnePartLeavesTheStepsAsTheyAre) {
  const Config config = ConfigOf(DType::kFloat32, GetParam().stage, GetParam().shard_group);
  const std::vector<Outcome> alone = Train(GetParam().way, config);
  using Call = absl::Status (*)(Engine & engine);
  const std::pair<const char*, Call> calls[] = {
      {"Agree", [](Engine& engine) { return engine.Agree(absl::OkStatus()); }},
      {"Suspend",
       [](Engine& engine) {
         EBB_RETURN_IF_ERROR(engine.Suspend());
         return engine.Resume();
       }},
      {"SetTrainingState",
       [](Engine& engine) {
         EBB_ASSIGN_OR_RETURN(const TrainingState state, engine.training_state());
         return engine.SetTrainingState(state);
       }},
      {"Gather",
       [](Engine& engine) {
         Vector whole(kWidth);
         return engine.Gather(Of(0, kGain), StateClass::kMaster, whole);
       }},
      {"Write", [](Engine& engine) {
         std::vector<Vector> slices;
         EBB_RETURN_IF_ERROR(
             engine.Read(StateClass::kMaster, [&](const Slice&, std::span<const float> values) {
               slices.emplace_back(values.begin(), values.end());
               return absl::OkStatus();
             }));
         size_t next = 0;
         return engine.Write(StateClass::kMaster, [&](const Slice&, std::span<float> values) {
           std::copy_n(slices[next++].begin(), values.size(), values.begin());
           return absl::OkStatus();
         });
       }}};
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    const auto of_first_part = [call = call](Engine& engine, int rank) {
      return rank % kTensor == 0 ? call(engine) : absl::OkStatus();
    };
    const std::vector<Outcome> outcomes =
        Train(GetParam().way, config, {}, OverTensor::kWhole, {.before_step = of_first_part});
    for (size_t r = 0; r < outcomes.size(); ++r) {
      EXPECT_OK(outcomes[r].reported);
      EXPECT_EQ(outcomes[r].whole, alone[r].whole);
      ASSERT_EQ(outcomes[r].steps.size(), size_t{kSteps});
      for (size_t s = 0; s < kSteps; ++s)
        EXPECT_EQ(outcomes[r].steps[s].gradient_norm, alone[r].steps[s].gradient_norm);
    }
  }
}

TEST_P(TensorParallelTest, AnEvaluationThatDiffersBetweenPartsNamesARank) {
  const auto evaluate = [](Engine& engine, int rank) {
    Evaluation evaluation = engine.BeginEvaluation(/*micro_batches=*/1 + rank % kTensor);
    EXPECT_THAT(evaluation.FinishSums().status(), Says("rank 1 differs from rank 0"));
    return absl::OkStatus();
  };
  Train(GetParam().way, ConfigOf(DType::kFloat32, GetParam().stage, GetParam().shard_group), {},
        OverTensor::kWhole, {.before_step = evaluate});
}

TEST(TensorParallel, TheRanksOfAVerdictMayHaveOtherNumbersInTheMesh) {
  const Config config = ConfigOf(DType::kFloat32, 3);
  const std::vector<Outcome> in_order = Train(Way::kVerdict, config),
                             by_part = Train(Way::kVerdictOfParts, config);
  for (const Outcome& outcome : by_part) {
    EXPECT_EQ(outcome.whole, in_order[0].whole);
    ASSERT_EQ(outcome.steps.size(), size_t{kSteps});
    EXPECT_EQ(outcome.evaluation.count, in_order[0].evaluation.count);
  }
  for (const Fault& fault : {Fault{.rank = 2, .step = 1, .in_gain = 0.01f},
                             Fault{.rank = 1, .step = 1, .in_gain = 0.01f}}) {
    for (const Outcome& outcome : Train(Way::kVerdictOfParts, config, fault))
      EXPECT_THAT(outcome.reported,
                  Says("the gradient of 'block0 [whole]' differs between tensor ranks 0 and 1: "));
  }
}

// Neither where states and parameters are kept nor when updates run.
TEST(TensorParallel, TiersAndEarlyUpdatesChangeNoBit) {
  const Scratch scratch;
  Config config = ConfigOf(DType::kFloat32, 3);
  config.optimizer.type = OptimizerType::kAdamW;
  config.optimizer.learning_rate = 0.01;
  config.gradient_clipping = 0;
  for (const Way way : {Way::kVerdict, Way::kMesh}) {
    std::optional<Outcome> first;
    for (const bool early : {false, true}) {
      for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
        SCOPED_TRACE(absl::StrCat(early, " ", std::string(Name(tier))));
        Config variant = tier == Tier::kNvme ? OnNvme(config, scratch.path()) : config;
        variant.ebb.check_overflow = !early;
        if (tier == Tier::kCpu)
          variant.zero.offload_param.device = variant.zero.offload_optimizer.device = tier;
        for (const Outcome& outcome : Train(way, variant)) {
          ASSERT_OK(outcome.created);
          ASSERT_EQ(outcome.steps.size(), size_t{kSteps});
          if (!first.has_value()) first = outcome;
          EXPECT_EQ(outcome.whole, first->whole);
          EXPECT_EQ(outcome.steps.back().gradient_norm, first->steps.back().gradient_norm);
        }
      }
    }
  }
}

// In a parameter that one rank has alone, and in one that has a replica.
TEST(TensorParallel, ANanOfAnyRankSkipsTheStepOnAllRanks) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int rank = 0; rank < kData * kTensor; ++rank) {
    for (const Fault& fault : {Fault{.rank = rank, .step = 1, .in_up = nan},
                               Fault{.rank = rank, .step = 1, .in_gain = nan}}) {
      const std::vector<Outcome> outcomes =
          Train(Way::kVerdict, ConfigOf(DType::kFloat16, 2), fault);
      for (const Outcome& outcome : outcomes) {
        ASSERT_EQ(outcome.steps.size(), size_t{kSteps}) << outcome.reported;
        EXPECT_FALSE(outcome.steps[1].applied);
        EXPECT_TRUE(outcome.steps[2].applied);
        EXPECT_EQ(outcome.whole, outcomes[0].whole);
      }
    }
  }
}

// Each part measures the rates of its own files, and chooses by them.
TEST(TensorParallel, PartsOnNvmeMayChooseOtherFilesToVerify) {
  const Scratch scratch;
  Config config = OnNvme(ConfigOf(DType::kFloat32, 3), scratch.path());
  config.optimizer.type = OptimizerType::kAdamW;
  config.ebb.verify_swap = VerifySwap::kAuto;
  static thread_local int rank_here;
  const Apart apart = {.change = [](EngineOptions&, ModelSpec&, int rank) { rank_here = rank; }};
  MadeFiles::ClearOverrides();
  TestOverrides().disk_rate = [] { return rank_here % kTensor == 0 ? 1 : 1e15; };
  for (const Way way : {Way::kVerdict, Way::kMesh}) {
    for (const Outcome& outcome : Train(way, config, {}, OverTensor::kWhole, apart)) {
      EXPECT_OK(outcome.created);
      EXPECT_EQ(outcome.steps.size(), size_t{kSteps});
    }
  }
  MadeFiles::ClearOverrides();
  // Messages name a file by the rank's number among all ranks.
  EXPECT_NE(MadeFiles::OfProcess().Find(scratch.path(), "(states of engine-rank3)"), "");
}

TEST(TensorParallel, AVerdictThatOneRankLeavesOutIsRefusedByName) {
  const Apart apart = {.change = [](EngineOptions& options, ModelSpec&, int rank) {
    if (rank == 2) options.verdict.reset();
  }};
  const std::vector<Outcome> outcomes =
      Train(Way::kVerdict, ConfigOf(DType::kFloat32, 1), {}, OverTensor::kWhole, apart);
  for (const int rank : {0, 2})
    EXPECT_THAT(outcomes[static_cast<size_t>(rank)].created,
                AllOf(Says("EngineOptions::verdict (of 4 ranks) on rank 0"),
                      Says("EngineOptions::verdict (not given) on rank 1")));
}

// Values that only rank 0 of a part has.
TEST(TensorParallel, ReplicasThatBeginDifferentlyAreRefusedByName) {
  for (const bool of_rank_0 : {true, false}) {
    const Apart apart = {.change = [=](EngineOptions& options, ModelSpec& model, int rank) {
      options.initial_values_of_rank_0 = of_rank_0;
      if (rank % kTensor == 0) return;
      // Not among the first values, which initialisers are compared by.
      model.parameters[kGain].init = [init = model.parameters[kGain].init](
                                         const Slice& slice, std::span<float> values) {
        EBB_RETURN_IF_ERROR(init(slice, values));
        if (slice.end == kWidth) values.back() += 1;
        return absl::OkStatus();
      };
    }};
    for (const Outcome& outcome :
         Train(Way::kVerdict, ConfigOf(DType::kFloat32, 3), {}, OverTensor::kWhole, apart))
      EXPECT_THAT(outcome.created,
                  AllOf(Says("'block0.gain'"), Says("differ"), Says("OverTensor::kWhole")));
  }
}

// The errors of Create on three ranks, with parts of one rank each or as `colour` says; the last
// rank changes its model.
using Change = void (*)(ModelSpec& model);
std::vector<absl::Status> Created(Change change, int (*colour)(int rank)) {
  return StatusesOnThreads(3, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const World part, world.Split(colour(world.rank()), world.rank()));
    ModelSpec model = Model(0, kTensor);
    if (world.rank() == 2) change(model);
    return Engine::Create(part, Device::Cpu(1), model, ConfigOf(DType::kFloat32, 1),
                          {.verdict = world})
        .status();
  });
}

TEST(TensorParallel, PartsThatAreNotOfOneModelAreRefusedOnAllRanks) {
  const std::pair<Change, const char*> changes[] = {
      {[](ModelSpec& model) {
         model.parameters[kUp].shape = {2, 3};
       },
       ""},
      {[](ModelSpec& model) {
         model.parameters[kGain].shape = {2, 3};
       },
       "the model of rank 2 differs from rank 0's: first at parameter 3 ('block0.gain')"},
      {[](ModelSpec& model) { model.parameters[kGain].init = Constant(1); },
       "the initial value of rank 2 differs from rank 0's: first at parameter 'block0.gain'"},
      {[](ModelSpec& model) {
         model.parameters[kUp].init = [](const Slice&, std::span<float>) {
           return absl::DataLossError("a page is missing");
         };
       },
       "a page is missing"},
  };
  for (const auto& [change, says] : changes) {
    for (const absl::Status& created : Created(change, [](int rank) { return rank; })) {
      if (*says == 0) {
        EXPECT_OK(created);
      } else {
        EXPECT_THAT(created, Says(says));
      }
    }
  }
  EXPECT_THAT(Created([](ModelSpec&) {}, [](int rank) { return rank / 2; }),
              Each(Says("have different numbers of ranks, 2 and 1")));
}

TEST(TensorParallel, AVerdictOfTheWrongRanksIsRefused) {
  for (const absl::Status& created : StatusesOnThreads(4, [](World world) -> absl::Status {
         EBB_ASSIGN_OR_RETURN(const World part, world.Split(world.rank() % 2, 0));
         EBB_ASSIGN_OR_RETURN(const World layer, world.Split(world.rank() / 2, 0));
         return Engine::Create(part, Device::Cpu(1), Model(world.rank() % 2, kTensor),
                               ConfigOf(DType::kFloat32, 1), {.verdict = layer})
             .status();
       }))
    EXPECT_THAT(created, Says("EngineOptions::verdict lacks rank "));
}

TEST(TensorParallel, AVerdictBesideAMeshIsRefused) {
  Config config = ConfigOf(DType::kFloat32, 1);
  config.ebb.mesh.tensor = 2;
  OnThreads(2, [&](World world) {
    EXPECT_THAT(Engine::Create(world, Device::Cpu(1), Model(0, kTensor), config, {.verdict = world})
                    .status(),
                Says("EngineOptions::verdict is given beside \"ebb.mesh.tensor\""));
  });
}

TEST(TensorParallel, AParameterThatDoesNotSayHowItIsSharedIsRefusedByName) {
  for (const Way way : {Way::kVerdict, Way::kMesh}) {
    for (const Outcome& outcome : Train(way, ConfigOf(DType::kFloat32, 1), {}, OverTensor::kUnsaid))
      EXPECT_THAT(outcome.created, Says("parameter 'block0.gain' does not say how tensor ranks"));
  }
}

}  // namespace
}  // namespace ebb::testing::tensor_parallel_test
