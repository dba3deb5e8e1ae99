// Random trainers of models that declare an order (ModelSpec::order, Visit's flags). They have the
// bits of the same model without one, whatever is open together, recomputed or left out. Each scope
// shows its own data from its opening to its close.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ebb/ebb.h"
#include "ebb/sharding/scopes.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"
#include "tests/sharding/random_model.h"
#include "tests/status.h"

namespace ebb::testing::declared_order_trainers_test {
namespace {

constexpr int64_t kBoundaryBytes = 48 * sizeof(float);

float Written(int visit, int micro_batch, int64_t step, bool gradient) {
  return static_cast<float>(1 + visit + 10 * micro_batch + 100 * step + (gradient ? 10'000 : 0));
}

template <class View>
void Fill(View view, float value) {
  const auto numbers = view.template as<float>();
  std::fill(numbers.begin(), numbers.end(), value);
}

void ExpectFilled(const TensorView& view, float value, const char* what) {
  const std::span<const float> numbers = view.as<float>();
  EXPECT_TRUE(std::all_of(numbers.begin(), numbers.end(), [&](float x) { return x == value; }))
      << what << " has " << numbers.front() << " instead of " << value;
}

// One round after another, as the model declares them.
class DeclaredTrainer {
 public:
  // `deviates`: some forward scopes and recomputes are left out, and some that are declared to stay
  // open close early.
  DeclaredTrainer(const ModelSpec& model, const ScriptedTrainer& trainer, uint64_t seed,
                  bool deviates)
      : model_(model),
        trainer_(trainer),
        events_(sharding::EventsOfRound(model)),
        backward_(sharding::VisitsWithBackward(model)),
        gradients_(sharding::VisitsWithGradients(model)),
        random_(seed),
        deviates_(deviates) {}

  void Run(Step& step) {
    for (int round = 0; round < step.rounds(); ++round) {
      for (const ScopeEvent& event : events_) {
        const Key key(event.visit, event.backward ? 1 : event.recompute ? 2 : 0);
        if (event.opens) {
          if (!event.backward && deviates_ && random_.OneIn(5)) continue;
          open_.emplace(key, Open(step, event));
          if (deviates_ && random_.OneIn(3)) Close(key);
        } else {
          Close(key);
        }
      }
    }
  }

 private:
  using Key = std::pair<int, int>;  // visit, kind
  using AnyScope = std::variant<ForwardScope, BackwardScope>;

  UnitId UnitOf(int visit) const { return model_.forward[static_cast<size_t>(visit)].unit; }
  bool OwnsBoundaries() const { return model_.forward.front().output_bytes > 0; }

  AnyScope Open(Step& step, const ScopeEvent& event) {
    const UnitId unit = UnitOf(event.visit);
    if (event.backward) {
      BackwardScope scope = step.Backward(unit);
      if (gradients_[static_cast<size_t>(event.visit)]) trainer_.Add(scope, event.visit);
      ShowBoundaries(scope, event.visit);
      if (OwnsBoundaries()) PassGradients(scope, event.visit);
      return scope;
    }
    ForwardScope scope = event.recompute ? step.Recompute(unit) : step.Forward(unit);
    ShowBoundaries(scope, event.visit);
    if (!OwnsBoundaries() || event.visit + 1 == std::ssize(model_.forward)) return scope;
    for (int m : scope.micro_batches())
      Fill(scope.output(m), Written(event.visit, m, trainer_.step(), /*gradient=*/false));
    return scope;
  }

  void ShowBoundaries(const Scope& scope, int visit) const {
    if (!OwnsBoundaries() || visit == 0) return;
    for (int m : scope.micro_batches())
      ExpectFilled(scope.input(m), Written(visit - 1, m, trainer_.step(), false), "an input");
  }

  void PassGradients(BackwardScope& scope, int visit) const {
    for (int m : scope.micro_batches()) {
      if (visit + 1 < std::ssize(model_.forward)) {
        ExpectFilled(scope.output_gradient(m), Written(visit, m, trainer_.step(), true),
                     "an output's gradient");
      }
      const MutableTensorView passed = scope.input_gradient(m);
      EXPECT_EQ(passed.size() > 0, visit > 0 && backward_[static_cast<size_t>(visit) - 1]);
      if (passed.size() > 0) Fill(passed, Written(visit - 1, m, trainer_.step(), true));
    }
  }

  // If it is still open: it shows its parameters to the end.
  void Close(const Key& key) {
    const auto found = open_.find(key);
    if (found == open_.end()) return;
    std::visit(
        [&](auto& scope) {
          trainer_.Look(scope, static_cast<int>(UnitOf(key.first)));
          scope.Close();
        },
        found->second);
    open_.erase(found);
  }

  const ModelSpec& model_;
  const ScriptedTrainer& trainer_;
  const std::vector<ScopeEvent> events_;
  const std::vector<bool> backward_, gradients_;
  sharding::Random random_;
  const bool deviates_;
  std::map<Key, AnyScope> open_;
};

class DeclaredOrdersTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, DeclaredOrdersTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 1, .stage = 1})), NameOf);

TEST_P(DeclaredOrdersTest, GiveTheNumbersOfTheModelWithoutOne) {
  Scratch scratch;
  for (uint64_t seed = 1; seed <= 18; ++seed) {
    Setting setting = GetParam();
    setting.timing = kTimings[seed % 3];
    Config config = ConfigFor(setting);
    if (setting.stage > 0 && seed % 4 == 0) config = OnNvme(config, scratch.path());
    config.gradient_accumulation_steps = seed % 2 == 0 ? 2 : 1;
    config.ebb.reduce_at = seed % 8 < 4 ? ReduceAt::kRound : ReduceAt::kStep;
    config.ebb.prefetch_depth = static_cast<int64_t>(seed / 2 % 4);
    if (seed % 5 == 0) config.ebb.coalesce_bytes = 1200;
    config.ebb.reshard_after_forward = seed % 7 != 0;
    SCOPED_TRACE(::testing::Message() << setting << ", seed " << seed);

    const bool owns_boundaries = seed % 3 == 1;
    ModelSpec model = ScriptedModel(owns_boundaries ? kBoundaryBytes : 0);
    sharding::Random random(seed);
    sharding::DeclareOrder(random, model);
    std::vector<int> without;
    const std::vector<bool> gradients = sharding::VisitsWithGradients(model);
    for (int v = 0; v < kScriptedVisits; ++v)
      if (!gradients[static_cast<size_t>(v)]) without.push_back(v);

    ScriptOptions options;
    const ScriptRun right = RunScript(
        setting, ScriptedModel(), config,
        [&](const ScriptedTrainer& trainer, Step& step) {
          for (int round = 0; round < step.rounds(); ++round) trainer.Round(step, without);
        },
        options);
    ASSERT_OK(right.status);
    options.shown = &right.shown;
    if (owns_boundaries && setting.stage > 0)
      config.ebb.offload_activations =
          config.optimizer_tier() == Tier::kNvme ? Tier::kNvme : Tier::kCpu;
    for (const bool deviates : {false, true}) {
      if (deviates && owns_boundaries) continue;  // an error
      const ScriptRun run = RunScript(
          setting, model, config,
          [&](const ScriptedTrainer& trainer, Step& step) {
            DeclaredTrainer(model, trainer, seed + static_cast<uint64_t>(trainer.step()), deviates)
                .Run(step);
          },
          options);
      ASSERT_OK(run.status);
      ASSERT_EQ(run.masters, right.masters) << (deviates ? "deviates" : "as declared");
      if (!deviates) {
        EXPECT_EQ(Occurrences(run.log, "declared order"), 0) << run.log;
      }
    }
  }
}

// F0 F1 F2 F3 F4 F5  R3 R4 B5 B4 B3 ...: the backward of 4 reads what the recompute of 3 wrote.
TEST(DeclaredOrderTest, ARecomputeThatIsLeftOutIsAnErrorWhereItWritesABoundary) {
  for (const bool owns_boundaries : {false, true}) {
    ModelSpec model = ScriptedModel(owns_boundaries ? kBoundaryBytes : 0);
    for (int v = 0; v < kScriptedVisits; ++v) model.AddScope({.visit = v});
    for (int v : {3, 4}) model.AddScope({.recompute = true, .visit = v});
    for (int v = kScriptedVisits - 1; v >= 0; --v) model.AddScope({.backward = true, .visit = v});
    const ScriptRun run =
        RunScript({.world = 1, .stage = 3}, model, ConfigFor({.world = 1, .stage = 3}),
                  [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); });
    EXPECT_EQ(run.status.ok(), !owns_boundaries) << run.status;
    if (owns_boundaries) {
      EXPECT_THAT(run.status, Says("Backward('u0') where the declared order has Recompute('u3')",
                                   "Visit::output_bytes"));
    } else {
      EXPECT_EQ(Occurrences(run.log, "declared order"), 0) << run.log;
    }
  }
}

// One that is not declared is gathered for itself, once with a warning.
TEST(DeclaredOrderTest, ARecomputeThatIsNotDeclaredShowsTheUnit) {
  const Setting setting{.world = 2, .stage = 3};
  const Script declared = [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); };
  const ScriptRun right = RunScript(setting, ScriptedModel(), ConfigFor(setting), declared);
  ASSERT_OK(right.status);
  ScriptOptions options;
  options.shown = &right.shown;
  const ScriptRun run = RunScript(
      setting, ScriptedModel(), ConfigFor(setting),
      [](const ScriptedTrainer& trainer, Step& step) {
        trainer.ForwardAll(step);
        trainer.Backward(step, 5);
        trainer.Look(step.Recompute(UnitId{1}), 1);
        for (int visit = 4; visit >= 0; --visit) trainer.Backward(step, visit);
      },
      options);
  EXPECT_OK(run.status);
  EXPECT_EQ(run.masters, right.masters);
  EXPECT_EQ(Occurrences(run.log, "Recompute('u1') where the declared order has Backward('u4')"), 1)
      << run.log;
}

TEST(DeclaredOrderTest, AGradientOfAVisitThatHasNoneIsAnErrorThatNamesTheVisit) {
  ModelSpec model = ScriptedModel();
  model.forward.push_back({.unit = UnitId{1}, .gradients = false});
  const Setting setting{.world = 1, .stage = 3};
  RunOn(setting, model, ConfigFor(setting), [](Engine& engine, ScriptedTrainer& trainer) {
    Step step = engine.BeginStep();
    trainer.ForwardAll(step);
    trainer.Forward(step, 1);
    step.Backward(UnitId{1}).gradient(ParameterId{2});
    EXPECT_THAT(step.Finish(), Says("the gradient of parameter 'w1' in Backward('u1'), visit 6",
                                    "Visit::gradients"));
  });
}

}  // namespace
}  // namespace ebb::testing::declared_order_trainers_test
