// A view taken with a wrong type, or asked of a scope that does not hold it: one line that names
// it, and an error of the step; never an abort, never a wrong number.
#include "ebb/runtime/engine/steps/view_errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/engine/scripted.h"
#include "tests/status.h"

namespace ebb::testing::view_errors_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr ParameterId kEmbedding{0}, kW1{2};

// bf16, so views of every kind are of another type than float.
Config HalfConfig(const Setting& setting) {
  Config config = ConfigFor(setting);
  config.compute = DType::kBFloat16;
  return config;
}

ModelSpec ModelWithWorkspace() {
  ModelSpec model = ScriptedModel(/*boundary_bytes=*/40);
  model.workspace_bytes = 64;
  return model;
}

// A whole step, in which `wrong` is done in the scopes of visit 1, of unit u1.
struct Scopes {
  Engine& engine;
  Step& step;
  ForwardScope* forward = nullptr;
  BackwardScope* backward = nullptr;
};
using Wrong = std::function<void(const Scopes&)>;
absl::Status StepWith(Engine& engine, const ScriptedTrainer& trainer, const Wrong& wrong) {
  Step step = engine.BeginStep(kExactStep);
  for (int visit = 0; visit < kScriptedVisits; ++visit) {
    ForwardScope scope = step.Forward(UnitId{kScriptedUnits[visit]});
    if (visit == 1) wrong({engine, step, &scope, nullptr});
  }
  for (int visit = kScriptedVisits - 1; visit >= 0; --visit) {
    BackwardScope scope = step.Backward(UnitId{kScriptedUnits[visit]});
    trainer.Add(scope, visit);
    if (visit == 1) wrong({engine, step, nullptr, &scope});
  }
  return FinishAndReport(engine, step);
}

struct Mistake {
  const char* says;
  Wrong make;
};

template <class T, class View>
void Take(const View& view) {
  EXPECT_GT(view.size(), 0);
  for (int i = 0; i < 3; ++i) EXPECT_THAT(view.template as<T>(), IsEmpty());
}

const Mistake kMistakes[] = {
    {"as<float>() asks for fp32, but parameter 'w1' is bf16: the span is empty; its dtype is "
     "its own (ParameterSpec::compute), else the configuration's",
     [](const Scopes& scopes) {
       if (scopes.forward) Take<float>(scopes.forward->parameter(kW1));
     }},
    {"as<Float16>() asks for fp16, but parameter 'w1' is bf16",
     [](const Scopes& scopes) {
       if (scopes.backward) Take<Float16>(scopes.backward->parameter(kW1));
     }},
    {"as<float>() asks for fp32, but the gradient of parameter 'w1' is bf16",
     [](const Scopes& scopes) {
       if (scopes.backward) Take<float>(scopes.backward->gradient(kW1));
     }},
    {"as<int8_t>() asks for int8, but the gradient of parameter 'w1' is bf16",
     [](const Scopes& scopes) {
       if (scopes.backward) Take<int8_t>(scopes.backward->fused_gradient(kW1).tensor);
     }},
    {"the input of unit 'u1' in visit 1 is bf16",
     [](const Scopes& scopes) {
       if (scopes.forward) Take<float>(scopes.forward->input(0));
     }},
    {"the output of unit 'u1' in visit 1 is bf16",
     [](const Scopes& scopes) {
       if (scopes.forward) Take<float>(scopes.forward->output(0));
     }},
    {"the output gradient of unit 'u1' in visit 1 is bf16",
     [](const Scopes& scopes) {
       if (scopes.backward) Take<float>(scopes.backward->output_gradient(0));
     }},
    {"the input gradient of unit 'u1' in visit 1 is bf16",
     [](const Scopes& scopes) {
       if (scopes.backward) Take<float>(scopes.backward->input_gradient(0));
     }},
    {"as<float>() asks for fp32, but the workspace is int8",
     [](const Scopes& scopes) { Take<float>(scopes.engine.workspace()); }},
    {"as<BFloat16>() asks for bf16, but the loss scale is fp32",
     [](const Scopes& scopes) { Take<BFloat16>(scopes.step.device_loss_scale()); }},
    {"parameter 'embedding' asked of Forward('u1'), which does not hold it: it is of unit 'u0'",
     [](const Scopes& scopes) {
       if (scopes.forward) {
         EXPECT_EQ(scopes.forward->parameter(kEmbedding).size(), 0);
       }
     }},
    {"the gradient of parameter 'embedding' asked of Backward('u1'), which does not hold it",
     [](const Scopes& scopes) {
       if (scopes.backward) {
         EXPECT_EQ(scopes.backward->gradient(kEmbedding).size(), 0);
       }
     }},
    {"the gradient of parameter 'base1', which is frozen",
     [](const Scopes& scopes) {
       if (scopes.backward) {
         EXPECT_EQ(scopes.backward->gradient(ParameterId{3}).size(), 0);
       }
     }},
    {"parameter 99 asked of Forward('u1'), but the model has 9 parameters",
     [](const Scopes& scopes) {
       if (scopes.forward) {
         EXPECT_EQ(scopes.forward->parameter(ParameterId{99}).size(), 0);
       }
     }},
    {"micro-batch 7 asked of Forward('u1'), which serves 0 to 0",
     [](const Scopes& scopes) {
       if (scopes.forward) {
         EXPECT_EQ(scopes.forward->output(7).size(), 0);
       }
     }},
};

class ViewErrorsTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, ViewErrorsTest,
                         ::testing::Values(Setting{.world = 1, .stage = 0},
                                           Setting{.world = 2, .stage = 2},
                                           Setting{.world = 2, .stage = 3}),
                         NameOf);

TEST_P(ViewErrorsTest, EachIsOneLineAndTheErrorOfItsStepAlone) {
  const ModelSpec model = ModelWithWorkspace();
  for (const Mistake& mistake : kMistakes) {
    SCOPED_TRACE(mistake.says);
    ::testing::internal::CaptureStderr();
    RunOn(GetParam(), model, HalfConfig(GetParam()), [&](Engine& engine, ScriptedTrainer& trainer) {
      ASSERT_OK_AND_ASSIGN(const Snapshot before, TakeSnapshot(engine, model));
      const absl::Status finished = StepWith(engine, trainer, mistake.make);
      EXPECT_THAT(finished, StatusIs(absl::StatusCode::kInvalidArgument, mistake.says));
      ASSERT_OK_AND_ASSIGN(const Snapshot after, TakeSnapshot(engine, model));
      EXPECT_EQ(before, after);
      ASSERT_OK(StepWith(engine, trainer, [](const Scopes&) {}));
    });
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(Occurrences(log, mistake.says), GetParam().world) << log;
  }
}

TEST_P(ViewErrorsTest, OneRanksMistakeIsTheErrorOfAll) {
  const ModelSpec model = ModelWithWorkspace();
  const int culprit = GetParam().world - 1;
  ::testing::internal::CaptureStderr();
  RunOn(GetParam(), model, HalfConfig(GetParam()), [&](Engine& engine, ScriptedTrainer& trainer) {
    const absl::Status finished = StepWith(engine, trainer, [&](const Scopes& scopes) {
      if (trainer.rank() == culprit) kMistakes[2].make(scopes);
    });
    EXPECT_THAT(finished, Says(kMistakes[2].says));
    ASSERT_OK(StepWith(engine, trainer, [](const Scopes&) {}));
  });
  EXPECT_EQ(Occurrences(::testing::internal::GetCapturedStderr(), kMistakes[2].says), 1);
}

// The update of a unit with an incomplete gradient is not made, nor any behind it.
TEST_P(ViewErrorsTest, BlocksEarlyUpdates) {
  const ModelSpec model = ScriptedModel();
  Setting setting = GetParam();
  setting.timing = Timing::kEarly;
  RunOn(setting, model, ConfigFor(setting), [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK_AND_ASSIGN(const Snapshot before, TakeSnapshot(engine, model));
    Step step = engine.BeginStep(kExactStep);
    trainer.ForwardAll(step);
    Take<BFloat16>(step.Backward(UnitId{0}).gradient(kEmbedding));
    for (int visit = kScriptedVisits - 2; visit >= 0; --visit) trainer.Backward(step, visit);
    EXPECT_THAT(std::string(FinishAndReport(engine, step).message()),
                AllOf(HasSubstr("the gradient of parameter 'embedding' is fp32"),
                      ::testing::Not(HasSubstr("the engine has failed"))));
    ASSERT_OK_AND_ASSIGN(const Snapshot after, TakeSnapshot(engine, model));
    EXPECT_EQ(before, after);
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
}

TEST_P(ViewErrorsTest, AreErrorsOfTheOpenEvaluationOrTheNextStep) {
  const ModelSpec model = ModelWithWorkspace();
  const auto evaluate = [](Engine& engine, bool wrong) {
    Evaluation evaluation = engine.BeginEvaluation();
    for (int unit : kScriptedUnits) {
      ForwardScope scope = evaluation.Forward(UnitId{unit});
      if (wrong && unit == 1) Take<float>(scope.parameter(kW1));
    }
    return std::string(evaluation.Finish().status().message());
  };
  RunOn(GetParam(), model, HalfConfig(GetParam()), [&](Engine& engine, ScriptedTrainer& trainer) {
    EXPECT_THAT(evaluate(engine, true), HasSubstr("parameter 'w1' is bf16"));
    EXPECT_EQ(evaluate(engine, false), "");
    Take<float>(engine.workspace());
    EXPECT_THAT(evaluate(engine, false), HasSubstr("the workspace is int8"));
    EXPECT_EQ(evaluate(engine, false), "");
    Take<float>(engine.workspace());
    EXPECT_THAT(StepWith(engine, trainer, [](const Scopes&) {}), Says("the workspace is int8"));
    // A dropped step leaves no trace.
    {
      Step step = engine.BeginStep({.hold_updates = true});
      Take<float>(step.Forward(UnitId{0}).parameter(kEmbedding));
    }
    ASSERT_OK(StepWith(engine, trainer, [](const Scopes&) {}));
  });
}

// A request to a closed scope is lost without a word otherwise.
TEST_P(ViewErrorsTest, ScopesThatAreClosedOrWereMovedFromSayIt) {
  const ModelSpec model = ScriptedModel();
  struct Late {
    const char* says;
    std::function<void(Step&)> make;
  };
  const Late lates[] = {{"gradient() of parameter 'w1' asked of a scope that is closed",
                         [](Step& step) {
                           BackwardScope scope = step.Backward(UnitId{1});
                           scope.Close();
                           EXPECT_EQ(scope.gradient(kW1).size(), 0);
                         }},
                        {"fused_gradient() of parameter 'w1' asked of a scope that is closed",
                         [](Step& step) {
                           BackwardScope scope = step.Backward(UnitId{1});
                           const BackwardScope moved = std::move(scope);
                           EXPECT_EQ(scope.fused_gradient(kW1).tensor.size(), 0);
                         }},
                        {"micro_batches() asked of a scope that is closed", [](Step& step) {
                           BackwardScope scope = step.Backward(UnitId{1});
                           scope.Close();
                           EXPECT_TRUE(scope.micro_batches().empty());
                         }}};
  RunOn(GetParam(), model, ConfigFor(GetParam()), [&](Engine& engine, ScriptedTrainer& trainer) {
    for (const Late& late : lates) {
      Step step = engine.BeginStep(kExactStep);
      trainer.ForwardAll(step);
      for (int visit : {5, 4, 3}) trainer.Backward(step, visit);
      late.make(step);
      trainer.Backward(step, 0);
      EXPECT_THAT(FinishAndReport(engine, step), Says(late.says));
    }
    // Scopes that end with their step are empty, and that is all.
    BackwardScope kept;
    {
      Step step = engine.BeginStep(kExactStep);
      trainer.ForwardAll(step);
      for (int visit : {5, 4, 3, 2, 1}) trainer.Backward(step, visit);
      kept = step.Backward(UnitId{0});
      ASSERT_OK(step.Finish());
    }
    EXPECT_EQ(kept.gradient(kEmbedding).size(), 0);
    kept.Close();
    EXPECT_EQ(kept.gradient(kEmbedding).size(), 0);
    Step next = engine.BeginStep(kExactStep);
    EXPECT_EQ(kept.gradient(kEmbedding).size(), 0);
    trainer.Round(next);
    ASSERT_OK(next.Finish());
  });
}

TEST(ViewErrors, ViewsOutliveScopesAndEngines) {
  const ModelSpec model = ModelWithWorkspace();
  TensorView kept;
  ::testing::internal::CaptureStderr();
  RunOn({}, model, HalfConfig({}), [&](Engine& engine, ScriptedTrainer& trainer) {
    EXPECT_OK(StepWith(engine, trainer, [&](const Scopes& scopes) {
      if (scopes.forward) kept = scopes.forward->parameter(kW1);
    }));
    EXPECT_THAT(kept.as<float>(), IsEmpty());  // between steps
    EXPECT_THAT(StepWith(engine, trainer, [](const Scopes&) {}), Says("parameter 'w1' is bf16"));
  });
  for (int i = 0; i < 3; ++i) EXPECT_THAT(kept.as<float>(), IsEmpty());
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(Occurrences(log, "parameter 'w1' is bf16"), 1) << log;
  EXPECT_EQ(Occurrences(log, "of an engine that is gone is bf16"), 1) << log;
}

TEST(ViewErrors, ThatAnyThreadMakesAreTakenBeforeTheScopeCloses) {
  const ModelSpec model = ModelWithWorkspace();
  ::testing::internal::CaptureStderr();
  RunOn({}, model, HalfConfig({}), [&](Engine& engine, ScriptedTrainer& trainer) {
    const absl::Status finished = StepWith(engine, trainer, [](const Scopes& scopes) {
      if (scopes.backward == nullptr) return;
      const MutableTensorView view = scopes.backward->gradient(kW1);
      std::vector<std::thread> threads;
      for (int t = 0; t < 4; ++t) threads.emplace_back([view] { Take<float>(view); });
      for (std::thread& thread : threads) thread.join();
    });
    EXPECT_THAT(finished, Says("the gradient of parameter 'w1'"));
    ASSERT_OK(StepWith(engine, trainer, [](const Scopes&) {}));
  });
  EXPECT_EQ(Occurrences(::testing::internal::GetCapturedStderr(), "the gradient of parameter"), 1);
}

TEST(ViewErrors, ALineThatComesInEveryStepIsLoggedOnce) {
  const ModelSpec model = ModelWithWorkspace();
  ::testing::internal::CaptureStderr();
  RunOn({}, model, HalfConfig({}), [&](Engine& engine, ScriptedTrainer& trainer) {
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(StepWith(engine, trainer, kMistakes[0].make).ok());
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(StepWith(engine, trainer, kMistakes[2].make).ok());
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(Occurrences(log, kMistakes[0].says), 1) << log;
  EXPECT_EQ(Occurrences(log, kMistakes[2].says), 1) << log;
}

TEST(ViewErrors, AMistakeWithATrainersOwnViewIsALineAndNoError) {
  const ModelSpec model = ScriptedModel();
  const float loss = 1;
  ::testing::internal::CaptureStderr();
  RunOn({}, model, ConfigFor({}), [&](Engine& engine, ScriptedTrainer& trainer) {
    Take<Float16>(TensorView{.data = &loss});
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
  EXPECT_EQ(Occurrences(::testing::internal::GetCapturedStderr(),
                        "as<Float16>() asks for fp16, but the trainer's own TensorView is fp32"),
            1);
}

TEST(WithNumbers, CallsWithTheElementsOfTheViewsOwnType) {
  float single = 1.5f;
  BFloat16 half(1.5f);
  Float16 other(1.5f);
  const auto value = [](auto numbers) {
    return static_cast<float>(numbers[0]) * sizeof(numbers[0]);
  };
  EXPECT_EQ(WithNumbers(TensorView{.data = &single}, value), 6);
  EXPECT_EQ(WithNumbers(TensorView{.data = &half, .dtype = DType::kBFloat16}, value), 3);
  EXPECT_EQ(WithNumbers(MutableTensorView{.data = &other, .dtype = DType::kFloat16}, value), 3);
  WithNumbers(MutableTensorView{.data = &half, .dtype = DType::kBFloat16},
              [](auto numbers) { numbers[0] = typename decltype(numbers)::value_type(2.0f); });
  EXPECT_EQ(static_cast<float>(half), 2);
}

// The configuration is refused on every rank, before anything is made.
TEST(DeclaredDTypes, CreateAndPredictMemoryRefuseDTypesThatTheTrainerLacks) {
  ModelSpec model = ScriptedModel();
  model.gradient_dtypes = {DType::kFloat32};
  const Setting setting = {.world = 2, .stage = 2};
  Config config = HalfConfig(setting);
  const auto create = [&] {
    return RunThreads(setting.world, [&](World world) {
      return Engine::Create(world, Device::Cpu(), model, config).status();
    });
  };
  for (const absl::Status& status : {create(), PredictMemory(model, 2, config).status()})
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, "gradients are bf16",
                                 "\"communication_data_type\"",
                                 "the trainer takes fp32 (ModelSpec::gradient_dtypes)"));
  config.communication = DType::kFloat32;
  EXPECT_OK(create());
}

}  // namespace
}  // namespace ebb::testing::view_errors_test
