// Views of a unit are known before a scope is opened; a unit may be kept whole on request.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ebb/sharding/plan.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/status.h"

namespace ebb::testing::unit_views_test {
namespace {

struct Case {
  const char* name;
  Setting setting;
  DType compute = DType::kFloat32;
  bool on_nvme = false;
};
void PrintTo(const Case& of, std::ostream* out) {
  *out << of.name;
}

class UnitViewsTest : public ::testing::TestWithParam<Case> {
 protected:
  Config ConfigOf() const {
    const char* given = std::getenv("TEST_TMPDIR");
    Config config = ConfigFor(GetParam().setting);
    if (GetParam().on_nvme) config = OnNvme(config, given == nullptr ? "/tmp" : given);
    config.compute = GetParam().compute;
    config.ebb.prefetch_depth = 1;
    return config;
  }
};

void ExpectSame(const TensorView& view, const TensorView& shown) {
  EXPECT_EQ(view.data, shown.data);
  EXPECT_EQ(view.dtype, shown.dtype);
  EXPECT_TRUE(
      std::equal(view.shape.begin(), view.shape.end(), shown.shape.begin(), shown.shape.end()));
}

TEST_P(UnitViewsTest, AreTheSameInEveryScopeOfTheUnit) {
  const ModelSpec model = ScriptedModel();
  RunOn(GetParam().setting, model, ConfigOf(), [&](Engine& engine, ScriptedTrainer& trainer) {
    std::vector<std::vector<ParameterView>> views;
    for (int unit = 0; unit < static_cast<int>(model.units.size()); ++unit)
      views.push_back(engine.Views(UnitId{unit}));
    EXPECT_TRUE(engine.Views(UnitId{-1}).empty());
    EXPECT_TRUE(engine.Views(UnitId{99}).empty());
    for (int number = 0; number < 2; ++number) {
      Step step = engine.BeginStep();
      for (int unit : kScriptedUnits) {
        const ForwardScope scope = step.Forward(UnitId{unit});
        for (const ParameterView& view : views[static_cast<size_t>(unit)])
          ExpectSame(view.value, scope.parameter(view.parameter));
      }
      for (int visit = kScriptedVisits; visit-- > 0;) {
        BackwardScope scope = step.Backward(UnitId{kScriptedUnits[visit]});
        for (const ParameterView& view : views[static_cast<size_t>(kScriptedUnits[visit])]) {
          ExpectSame(view.value, scope.parameter(view.parameter));
          EXPECT_EQ(view.gradient.has_value(), model[view.parameter].trainable);
          if (!view.gradient) continue;
          EXPECT_EQ(*view.gradient, scope.gradient(view.parameter).dtype);
        }
        trainer.Add(scope, visit);
      }
      ASSERT_OK(step.Finish());
    }
    ASSERT_OK(engine.Report().status());
  });
}

// In one call as one by one: the same places, and zero when first asked for.
TEST_P(UnitViewsTest, GradientsOfAUnitInOneCallEqualThoseOneByOne) {
  const ModelSpec model = ScriptedModel();
  RunOn(GetParam().setting, model, ConfigOf(), [&](Engine& engine, ScriptedTrainer& trainer) {
    for (int number = 0; number < 2; ++number) {
      Step step = engine.BeginStep();
      trainer.ForwardAll(step);
      for (int visit = kScriptedVisits; visit-- > 0;) {
        const UnitId unit{kScriptedUnits[visit]};
        BackwardScope scope = step.Backward(unit);
        std::vector<ParameterId> of;
        for (const ParameterId p : model[unit].parameters)
          if (model[p].trainable) of.push_back(p);
        std::vector<BackwardScope::Fused> fused(of.size());
        std::vector<MutableTensorView> views(of.size());
        const bool one_first = visit % 2 == 0 && !of.empty();
        if (one_first)
          WithNumbers(scope.gradient(of[0]),
                      [](auto values) { values[0] = typename decltype(values)::value_type(1.0f); });
        if (number == 0) {
          scope.gradients(of, views);
        } else {
          scope.fused_gradients(of, fused);
        }
        for (size_t i = 0; i < of.size(); ++i) {
          const bool was_asked_for = i == 0 && one_first;
          if (number == 1) {
            EXPECT_EQ(fused[i].beta, was_asked_for ? 1 : 0);
            views[i] = fused[i].tensor;
          } else {
            WithNumbers(views[i], [&](auto values) {
              for (size_t k = 0; k < values.size(); ++k)
                EXPECT_EQ(static_cast<float>(values[k]), was_asked_for && k == 0 ? 1 : 0);
            });
          }
          ExpectSame(views[i], scope.gradient(of[i]));
          WithNumbers(views[i], [](auto values) {
            std::ranges::fill(values, typename decltype(values)::value_type(0.0f));
          });
        }
      }
      ASSERT_OK(FinishAndReport(engine, step));
    }
  });
}

TEST_P(UnitViewsTest, GradientsWithoutAViewForEachAreRefused) {
  const ModelSpec model = ScriptedModel();
  RunOn(GetParam().setting, model, ConfigOf(), [&](Engine& engine, ScriptedTrainer& trainer) {
    Step step = engine.BeginStep();
    trainer.ForwardAll(step);
    MutableTensorView views[3];
    {
      BackwardScope scope = step.Backward(UnitId{kScriptedUnits[kScriptedVisits - 1]});
      const ParameterId one[] = {model.units[0].parameters[0]};
      scope.gradients(one, views);
      EXPECT_EQ(views[0].size(), 0);
    }
    const absl::Status refused = FinishAndReport(engine, step);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_NE(refused.message().find("give a view for each"), absl::string_view::npos);
  });
}

// A tensor over the engine's memory may outlive it.
TEST_P(UnitViewsTest, MemoryThatIsHeldOutlivesTheEngine) {
  const ModelSpec model = ScriptedModel();
  struct Held {
    std::shared_ptr<void> memory;
    std::vector<std::span<std::byte>> tensors = {};
  };
  std::vector<Held> held(static_cast<size_t>(GetParam().setting.world));
  const absl::Status status =
      RunEngines(GetParam().setting, model, ConfigOf(),
                 [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
                   Held& of_rank = held[static_cast<size_t>(trainer.rank())];
                   of_rank.memory = engine.HoldMemory();
                   for (const ParameterView& view : engine.Views(UnitId{0})) {
                     auto* const data = static_cast<std::byte*>(const_cast<void*>(view.value.data));
                     of_rank.tensors.emplace_back(
                         data, static_cast<size_t>(view.value.size() * SizeOf(view.value.dtype)));
                   }
                   return absl::OkStatus();
                 });
  EXPECT_OK(status);
  for (const Held& of_rank : held) {
    EXPECT_FALSE(of_rank.tensors.empty());
    for (const std::span<std::byte> tensor : of_rank.tensors)
      std::ranges::fill(tensor, std::byte{1});
  }
}

TEST_P(UnitViewsTest, AUnitThatIsKeptWholeIsNotGatheredAndTrainsToTheSameBits) {
  const Setting setting = GetParam().setting;
  const Script round = [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); };
  ModelSpec model = ScriptedModel();
  const ScriptRun gathered = RunScript(setting, model, ConfigOf(), round);
  ASSERT_OK(gathered.status);
  model.units[1].keep_whole = true;
  ASSERT_OK_AND_ASSIGN(const Program program, PredictProgram(model, setting.world, ConfigOf()));
  for (const sharding::Op& operation : program.plan().ops) {
    if (operation.role != sharding::Role::kGather) continue;
    for (const sharding::Part& part : operation.parts) EXPECT_NE(part.unit, 1);
  }
  const ScriptRun kept = RunScript(setting, model, ConfigOf(), round);
  ASSERT_OK(kept.status);
  EXPECT_EQ(kept.masters, gathered.masters);
}

// The last rank alone asks, and has what all ranks see in the evaluation after that.
TEST_P(UnitViewsTest, AUnitThatIsWholeHasItsValuesBetweenSteps) {
  ModelSpec model = ScriptedModel();
  model.units[1].keep_whole = true;
  const Setting setting = GetParam().setting;
  RunOn(setting, model, ConfigOf(), [&](Engine& engine, ScriptedTrainer& trainer) {
    const auto units = static_cast<int>(model.units.size());
    const bool asks = trainer.rank() == setting.world - 1;
    std::vector<std::vector<float>> before;
    for (int number = 0; number < 3; ++number) {
      {
        Step step = engine.BeginStep();
        trainer.Round(step);
        EXPECT_EQ(engine.AwaitWhole(UnitId{1}).status().code(),
                  absl::StatusCode::kFailedPrecondition);
        ASSERT_OK(step.Finish());
      }
      std::vector<std::vector<float>> between(static_cast<size_t>(units));
      for (int unit = 0; asks && unit < units; ++unit) {
        ASSERT_OK_AND_ASSIGN(const bool whole, engine.AwaitWhole(UnitId{unit}));
        EXPECT_EQ(whole, setting.stage < 3 || unit == 1);
        if (!whole) continue;
        for (const ParameterView& view : engine.Views(UnitId{unit})) {
          const std::vector<float> values = Values(view.value);
          std::vector<float>& all = between[static_cast<size_t>(unit)];
          all.insert(all.end(), values.begin(), values.end());
        }
      }
      Evaluation evaluation = engine.BeginEvaluation();
      for (int unit = 0; unit < units; ++unit) {
        const ForwardScope scope = evaluation.Forward(UnitId{unit});
        std::vector<float> shown;
        for (const ParameterView& view : engine.Views(UnitId{unit})) {
          const std::vector<float> values = Values(scope.parameter(view.parameter));
          shown.insert(shown.end(), values.begin(), values.end());
        }
        const std::vector<float>& asked = between[static_cast<size_t>(unit)];
        if (asked.empty()) continue;
        EXPECT_EQ(asked, shown) << "unit " << unit;
      }
      ASSERT_OK(evaluation.Finish().status());
      if (!asks) continue;
      EXPECT_NE(between, before);  // the step has changed them
      before = between;
    }
    EXPECT_EQ(engine.AwaitWhole(UnitId{99}).status().code(), absl::StatusCode::kInvalidArgument);
    ASSERT_OK(engine.Write(StateClass::kMaster, Constant(3)));
    EXPECT_EQ(engine.AwaitWhole(UnitId{1}).status().code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_OK(engine.BeginEvaluation().Finish().status());
    ASSERT_OK(engine.AwaitWhole(UnitId{1}).status());
    for (const ParameterView& view : engine.Views(UnitId{1}))
      for (const float value : Values(view.value)) EXPECT_EQ(value, 3);
    ASSERT_OK(engine.Suspend());
    EXPECT_EQ(engine.AwaitWhole(UnitId{1}).status().code(), absl::StatusCode::kFailedPrecondition);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Cells, UnitViewsTest,
    ::testing::Values(Case{"sharded", {.world = 2, .stage = 3}},
                      Case{"sharded_bf16", {.world = 3, .stage = 3}, DType::kBFloat16},
                      Case{"replicated", {.world = 2, .stage = 1}},
                      Case{"on_nvme", {.world = 2, .stage = 3}, DType::kBFloat16, true}),
    [](const auto& of) { return std::string(of.param.name); });

}  // namespace
}  // namespace ebb::testing::unit_views_test
