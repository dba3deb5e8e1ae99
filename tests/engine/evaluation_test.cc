// An evaluation shows the current parameters, gives the mean of its losses, and leaves no trace,
// wherever between steps it comes and however it is left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <future>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/plan.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/gate.h"
#include "tests/offload/scratch.h"
#include "tests/offload/test_overrides.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::evaluation_test {
namespace {

// A run that gathers between steps, for one that does not: late updates of a step may still be on
// their way when the evaluation begins.
struct Trained {
  std::vector<ParameterValues> shown;  // after so many steps
  std::vector<StepReport> reports;     // of rank 0
};

class EvaluationTest : public ::testing::TestWithParam<Setting> {
 protected:
  static constexpr int kSteps = 3;
  // Every step but the first is held in runs of `hold`.
  static StepOptions OptionsOf(int number, bool hold) {
    StepOptions options = kExactStep;
    options.hold_updates = hold && number > 0;
    return options;
  }
  Trained TrainAlone(const Setting& setting, const Config& config, bool hold) {
    Trained trained;
    RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
      for (int number = 0; number <= kSteps; ++number) {
        ASSERT_OK_AND_ASSIGN(const ParameterValues shown,
                             GatherAll(engine, model_, StateClass::kParameter));
        if (trainer.rank() == 0) trained.shown.push_back(shown);
        if (number == kSteps) break;
        ASSERT_OK(TrainStep(engine, trainer, number, OptionsOf(number, hold)));
        ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
        if (trainer.rank() == 0) trained.reports.push_back(report);
      }
    });
    return trained;
  }

  // Trains with `evaluate` before each step and after the last: it must see the values of then, and
  // nothing else may differ.
  using Evaluate = std::function<void(Engine& engine, const ScriptedTrainer& trainer)>;
  void ExpectNoTrace(Config config, const Evaluate& evaluate, bool hold = false) {
    for (const Setting& setting : At(GetParam(), kTimings)) {
      Config timed = ConfigFor(setting);
      timed.compute = config.compute;
      timed.ebb.prefetch_depth = config.ebb.prefetch_depth;
      const Trained alone = TrainAlone(setting, timed, hold);
      ASSERT_EQ(alone.reports.size(), static_cast<size_t>(kSteps));
      RunOn(setting, model_, timed, [&](Engine& engine, ScriptedTrainer& trainer) {
        for (int number = 0; number <= kSteps; ++number) {
          trainer.BeginStep(number, &alone.shown[static_cast<size_t>(number)]);
          evaluate(engine, trainer);
          if (number == kSteps) break;
          Step step = engine.BeginStep(OptionsOf(number, hold));
          trainer.Round(step);
          ASSERT_OK(step.Finish());
        }
        ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
        EXPECT_EQ(report.step, kSteps) << setting;
        EXPECT_EQ(report.loss, 0) << setting;
        EXPECT_EQ(report.gradient_norm, alone.reports.back().gradient_norm) << setting;
        ASSERT_OK_AND_ASSIGN(const ParameterValues after,
                             GatherAll(engine, model_, StateClass::kParameter));
        EXPECT_EQ(after, alone.shown.back()) << setting;
      });
    }
  }

  // Opens a forward scope of each unit, looks, and adds `loss` once for each micro-batch.
  static void Walk(Evaluation& evaluation, const ScriptedTrainer& trainer, std::vector<int> units,
                   size_t micro_batches, float loss = 1) {
    for (int unit : units) {
      ForwardScope scope = evaluation.Forward(UnitId{unit});
      trainer.Look(scope, unit);
      EXPECT_EQ(scope.micro_batches().size(), micro_batches);
    }
    for (size_t m = 0; m < micro_batches; ++m) {
      evaluation.AddLoss({.data = &loss});
      loss += 1;
    }
  }
  static void ExpectLoss(Evaluation& evaluation, double loss) {
    ASSERT_OK_AND_ASSIGN(const double mean, evaluation.Finish());
    EXPECT_EQ(mean, loss);
  }

  ModelSpec model_ = ScriptedModel();
  const std::vector<int> declared_{std::begin(kScriptedUnits), std::end(kScriptedUnits)};
};
INSTANTIATE_TEST_SUITE_P(Cells, EvaluationTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 3, .stage = 0})), NameOf);

TEST_P(EvaluationTest, AnyMicroBatchesAndWalksChangeNoBit) {
  for (const DType compute : {DType::kFloat32, DType::kBFloat16}) {
    Config config;
    config.compute = compute;
    config.ebb.prefetch_depth = compute == DType::kFloat32 ? 1 : 3;
    ExpectNoTrace(config, [&](Engine& engine, const ScriptedTrainer& trainer) {
      for (const int micro_batches : {1, 3}) {
        for (const int walks : {1, 2}) {
          Evaluation evaluation = engine.BeginEvaluation(micro_batches);
          for (int walk = 0; walk < walks; ++walk) {
            Walk(evaluation, trainer, declared_, static_cast<size_t>(micro_batches),
                 static_cast<float>(trainer.rank() + walk));
          }
          // The means of ranks 0 ... world - 1, of the walks and of the micro-batches.
          ExpectLoss(evaluation,
                     (GetParam().world - 1) / 2.0 + (walks - 1) / 2.0 + (micro_batches - 1) / 2.0);
        }
      }
    });
  }
}

TEST_P(EvaluationTest, BetweenStepsThatHoldTheirUpdatesChangesNoBit) {
  ExpectNoTrace(
      Config(),
      [&](Engine& engine, const ScriptedTrainer& trainer) {
        Evaluation evaluation = engine.BeginEvaluation();
        Walk(evaluation, trainer, declared_, 1, 5);
        ExpectLoss(evaluation, 5);
      },
      /*hold=*/true);
}

TEST_P(EvaluationTest, OutsideTheDeclaredOrderChangesNoBit) {
  for (const std::vector<int>& units : std::vector<std::vector<int>>{
           {4, 3, 2, 1, 0}, {0, 2, 4}, {3}, {}, {0, 0, 0, 1, 0}, {1, 1, 3, 2, 4, 4, 0, 3}}) {
    ExpectNoTrace(Config(), [&](Engine& engine, const ScriptedTrainer& trainer) {
      Evaluation evaluation = engine.BeginEvaluation(2);
      for (int unit : units) Walk(evaluation, trainer, {unit}, 2, 2);
      ExpectLoss(evaluation, units.empty() ? 0 : 2.5);
    });
  }
}

TEST_P(EvaluationTest, DroppedAnywhereChangesNoBit) {
  ExpectNoTrace(Config(), [&](Engine& engine, const ScriptedTrainer& trainer) {
    for (size_t visits = 0; visits <= declared_.size(); ++visits) {
      const auto end = declared_.begin() + static_cast<int64_t>(visits);
      ForwardScope open;
      Evaluation evaluation = engine.BeginEvaluation();
      Walk(evaluation, trainer, {declared_.begin(), end}, 1, 100);
      if (visits < declared_.size()) open = evaluation.Forward(UnitId{*end});
      evaluation = Evaluation();
      EXPECT_TRUE(open.micro_batches().empty());
      EXPECT_EQ(open.parameter(ParameterId{0}).data, nullptr);
      EXPECT_EQ(evaluation.Finish().status().code(), absl::StatusCode::kFailedPrecondition);
    }
  });
}

TEST_P(EvaluationTest, RefusedChangesNoBit) {
  struct Refusal {
    const char* what;
    std::function<absl::Status(Engine& engine)> run;
  };
  const Refusal refusals[] = {
      {"an evaluation of 0 micro-batches in one walk: it must be at least 1",
       [](Engine& engine) { return engine.BeginEvaluation(0).Finish().status(); }},
      {"an evaluation of -1 micro-batches",
       [](Engine& engine) { return engine.BeginEvaluation(-1).Finish().status(); }},
      {"unit 17 is not of this engine's model",
       [](Engine& engine) {
         Evaluation evaluation = engine.BeginEvaluation();
         EXPECT_TRUE(evaluation.Forward(UnitId{17}).micro_batches().empty());
         return evaluation.Finish().status();
       }},
      {"AddLoss takes one fp32 scalar",
       [](Engine& engine) {
         Evaluation evaluation = engine.BeginEvaluation();
         evaluation.AddLoss({});
         return evaluation.Finish().status();
       }},
      {"sum 8 of an evaluation, which has 8",
       [](Engine& engine) {
         const float one = 1;
         Evaluation evaluation = engine.BeginEvaluation();
         evaluation.Add(Evaluation::kSums, {.data = &one});
         return evaluation.FinishSums().status();
       }},
      {"Add takes one fp32 scalar, and was given 1 of bf16",
       [](Engine& engine) {
         const BFloat16 one(1);
         Evaluation evaluation = engine.BeginEvaluation();
         evaluation.Add(1, {.data = &one, .dtype = DType::kBFloat16});
         return evaluation.FinishSums().status();
       }},
      {"BeginStep while a Step or Evaluation",
       [](Engine& engine) {
         Evaluation evaluation = engine.BeginEvaluation();
         Step step = engine.BeginStep();
         EXPECT_EQ(step.rounds(), 0);
         return evaluation.Finish().status();
       }},
  };
  ExpectNoTrace(Config(), [&](Engine& engine, const ScriptedTrainer&) {
    for (const Refusal& refusal : refusals) EXPECT_THAT(refusal.run(engine), Says(refusal.what));
  });
}

// With unequal numbers of calls the mean is over calls, not over ranks.
TEST_P(EvaluationTest, LossIsTheMeanOverTheCallsOfAllRanks) {
  RunOn(GetParam(), model_, ConfigFor(GetParam()), [&](Engine& engine, ScriptedTrainer& trainer) {
    Evaluation evaluation = engine.BeginEvaluation();
    double sum = 0, calls = 0;
    for (int rank = 0; rank < GetParam().world; ++rank) {
      for (int call = 0; call <= rank; ++call) {
        const float loss = static_cast<float>(8 * rank + call) / 4;
        sum += loss;
        ++calls;
        if (rank == trainer.rank()) evaluation.AddLoss({.data = &loss});
      }
    }
    ExpectLoss(evaluation, sum / calls);
  });
}

TEST_P(EvaluationTest, SumsAreOfEachNumberOverTheCallsOfAllRanks) {
  RunOn(GetParam(), model_, ConfigFor(GetParam()), [&](Engine& engine, ScriptedTrainer& trainer) {
    const int world = GetParam().world;
    for (int repeat = 0; repeat < 2; ++repeat) {  // nothing of the one before is in the second
      Evaluation evaluation = engine.BeginEvaluation();
      const float loss = static_cast<float>(trainer.rank() + 1), right = 3, tokens = 8;
      evaluation.AddLoss({.data = &loss});
      for (int call = 0; call <= trainer.rank(); ++call) evaluation.Add(1, {.data = &right});
      evaluation.Add(Evaluation::kSums - 1, {.data = &tokens});
      const absl::StatusOr<Evaluation::Sums> sums = evaluation.FinishSums();
      if (!sums.ok()) return sums.status();
      const int calls = world * (world + 1) / 2;
      EXPECT_EQ((*sums)[0].sum, calls);
      EXPECT_EQ((*sums)[0].count, world);
      EXPECT_EQ((*sums)[0].mean(), (world + 1) / 2.0);
      EXPECT_EQ((*sums)[1].sum, 3 * calls);
      EXPECT_EQ((*sums)[1].count, calls);
      EXPECT_EQ((*sums)[2].count, 0);
      EXPECT_EQ((*sums)[2].mean(), 0);
      EXPECT_EQ(sums->back().sum, 8 * world);
    }
    return absl::OkStatus();
  });
}

TEST_P(EvaluationTest, WithEngineOwnedBoundariesKeepsToOrderAndMicroBatches) {
  const ModelSpec model = ScriptedModel(/*boundary_bytes=*/40);
  Config config = ConfigFor(GetParam());
  RunOn(GetParam(), model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    const sharding::Table& table = engine.program().plan().table;
    const int most = MicroBatchesOfWalk(table);
    EXPECT_GE(most, 1);
    const absl::Status many = engine.BeginEvaluation(most + 1).Finish().status();
    EXPECT_THAT(many,
                StatusIs(absl::StatusCode::kInvalidArgument, "activation pool", "further walks"));
    Evaluation off = engine.BeginEvaluation();
    off.Forward(UnitId{0});
    off.Forward(UnitId{3});
    EXPECT_EQ(off.Finish().status().code(), absl::StatusCode::kFailedPrecondition);
    // A visit reads what the visit before wrote, in every walk.
    Evaluation evaluation = engine.BeginEvaluation(most);
    for (int walk = 0; walk < 2; ++walk) {
      for (int visit = 0; visit < kScriptedVisits; ++visit) {
        ForwardScope scope = evaluation.Forward(UnitId{kScriptedUnits[visit]});
        for (int m : scope.micro_batches()) {
          const float value = static_cast<float>(100 * walk + 10 * visit + m);
          EXPECT_EQ(scope.input(m).size(), visit == 0 ? 0 : 10);
          for (float seen : scope.input(m).as<float>()) EXPECT_EQ(seen, value - 10);
          EXPECT_EQ(scope.output(m).size(), visit + 1 == kScriptedVisits ? 0 : 10);
          for (float& element : scope.output(m).as<float>()) element = value;
        }
      }
    }
    EXPECT_OK(evaluation.Finish().status());
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
}

TEST_P(EvaluationTest, RanksThatOpenDifferentScopesGetAnError) {
  if (GetParam().world == 1) GTEST_SKIP() << "one rank agrees with itself";
  Config config = ConfigFor(GetParam());
  config.zero.param_persistence_threshold = 1'000'000;  // nothing is gathered: ranks do not wait
  RunOn(GetParam(), model_, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    Evaluation evaluation = engine.BeginEvaluation();
    evaluation.Forward(UnitId{0});
    evaluation.Forward(UnitId{trainer.rank() == 1 ? 3 : 1});
    const absl::Status status = evaluation.Finish().status();
    EXPECT_THAT(status, Says("as number 2", "rank 0 opened Forward('u1')", "rank 1 Forward('u3')"));
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
}

TEST(EvaluationOfAFrozenModelTest, WorksWhereAStepDoesNot) {
  ModelSpec model = ScriptedModel();
  for (ParameterSpec& parameter : model.parameters) parameter.trainable = false;
  for (const Setting& setting : WorldsAndStages()) {
    RunOn(setting, model, ConfigFor(setting), [&](Engine& engine, ScriptedTrainer& trainer) {
      const auto values = GatherAll(engine, model, StateClass::kMaster);
      trainer.BeginStep(0, &*values);
      Evaluation evaluation = engine.BeginEvaluation();
      for (int unit : kScriptedUnits) trainer.Look(evaluation.Forward(UnitId{unit}), unit);
      EXPECT_OK(evaluation.Finish());
      const absl::Status step = engine.BeginStep().Finish();
      EXPECT_THAT(step,
                  StatusIs(absl::StatusCode::kFailedPrecondition, "without anything trainable"));
    });
  }
}

// An evaluation may end when it has seen enough. Gathers for units that it never opened may still
// run, and must not overlap later writes.

float WrittenValue(ParameterId parameter, int64_t element) {
  return 0.25f * static_cast<float>((static_cast<int64_t>(parameter) + element) % 7);
}

absl::Status WrittenValues(const Slice& slice, std::span<float> values) {
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = WrittenValue(slice.parameter, slice.begin + static_cast<int64_t>(i));
  return absl::OkStatus();
}

// Every scope of an evaluation shows the written values.
absl::Status ExpectWritten(Engine& engine, const ModelSpec& model) {
  Evaluation evaluation = engine.BeginEvaluation();
  for (const Visit& visit : model.forward) {
    const ForwardScope scope = evaluation.Forward(visit.unit);
    for (ParameterId p : model[visit.unit].parameters) {
      const std::vector<float> shown = Values(scope.parameter(p));
      for (size_t i = 0; i < shown.size(); ++i)
        EXPECT_EQ(shown[i], WrittenValue(p, static_cast<int64_t>(i))) << model[p].name;
    }
  }
  return evaluation.Finish().status();
}

absl::Status LookAtTheFirstUnit(Engine& engine, const ModelSpec& model) {
  Evaluation evaluation = engine.BeginEvaluation();
  evaluation.Forward(model.forward.front().unit).Close();
  return evaluation.Finish().status();
}

struct HeldCase {
  const char* name;
  bool split_master;
  VerifySwap verify;
};

void PrintTo(const HeldCase& held, std::ostream* out) {
  *out << held.name;
}

class LeftEvaluationTest : public ::testing::TestWithParam<HeldCase> {};

TEST_P(LeftEvaluationTest, ItsReadsFromTheDiskAreOverBeforeAnythingIsWritten) {
  const Scratch scratch;
  std::atomic<int64_t> held_from = INT64_MAX;  // of the file of parameters
  Gate gate(
      [&](const IoRequest& request) { return !request.write && request.offset >= held_from; });
  TestOverrides().wrap_queue = [&](std::string_view, std::string_view file) {
    return file == "parameters" ? gate.Before() : Gate::WrapQueue();
  };
  const ToyModel toy({.width = 67});
  const ModelSpec& model = toy.spec();
  Config config = OnNvme(ConfigFor({.world = 1, .stage = 3}), scratch.path());
  config.compute = DType::kBFloat16;
  config.ebb.split_master = GetParam().split_master;
  config.ebb.verify_swap = GetParam().verify;
  config.ebb.prefetch_depth = 2;
  const absl::Status status = RunThreads(1, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), model, config));
    const sharding::Table& table = engine.program().plan().table;
    held_from = table.PlaceOf(table.Find(sharding::Purpose::kParameter, 1)).offset;
    EBB_RETURN_IF_ERROR(LookAtTheFirstUnit(engine, model));
    while (gate.held_reads() == 0) std::this_thread::yield();
    // A write that does not wait for the reads needs a while to show it.
    std::promise<void> writes;
    std::thread opener([&gate, written = writes.get_future()] {
      written.wait_for(std::chrono::milliseconds(300));
      gate.Open();
    });
    bool writing = false;
    const absl::Status written =
        engine.Write(StateClass::kParameter, [&](const Slice& slice, std::span<float> values) {
          EXPECT_EQ(gate.held_reads(), 0);
          if (!std::exchange(writing, true)) writes.set_value();
          return WrittenValues(slice, values);
        });
    opener.join();
    EBB_RETURN_IF_ERROR(written);
    EBB_RETURN_IF_ERROR(ExpectWritten(engine, model));
    return ExpectWritten(engine, model);
  });
  TestOverrides() = {};
  EXPECT_OK(status);
}

INSTANTIATE_TEST_SUITE_P(Ways, LeftEvaluationTest,
                         ::testing::Values(HeldCase{"Parameters", false, VerifySwap::kAll},
                                           HeldCase{"SplitMasters", true, VerifySwap::kStates}),
                         [](const auto& case_info) { return case_info.param.name; });

// For the thread sanitizer.
TEST(LeftEvaluation, ItsGathersAreOverBeforeAnythingIsWritten) {
  constexpr int kWorld = 2, kTurns = 10;
  const ToyModel toy({.width = 200});
  const ModelSpec& model = toy.spec();
  for (const Tier tier : {Tier::kDevice, Tier::kCpu}) {
    Config config = ConfigFor({.world = kWorld, .stage = 3});
    config.zero.offload_param.device = tier;
    config.ebb.prefetch_depth = 3;
    OnThreads(kWorld, [&](World world) {
      ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, Device::Cpu(1), model, config));
      ASSERT_OK_AND_ASSIGN(Engine other,
                           Engine::Create(world, Device::Cpu(1), model, config, {.name = "other"}));
      ASSERT_OK(other.Write(StateClass::kParameter, WrittenValues));
      for (int turn = 0; turn < kTurns; ++turn) {
        ASSERT_OK(LookAtTheFirstUnit(engine, model));
        ASSERT_OK(engine.Write(StateClass::kParameter, WrittenValues));
        ASSERT_OK(LookAtTheFirstUnit(engine, model));
        ASSERT_OK(engine.CopyParametersFrom(other));
      }
      ASSERT_OK(ExpectWritten(engine, model));
    });
  }
}

}  // namespace
}  // namespace ebb::testing::evaluation_test
