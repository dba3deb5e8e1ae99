// Steps of any number of rounds. An engine plans three: the first, one for all in the middle, and
// the last.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/plan.h"
#include "tests/engine/snapshot.h"
#include "tests/offload/scratch.h"

namespace ebb::testing::rounds_test {
namespace {

using ::testing::HasSubstr;

constexpr int kRounds[] = {3, 1, 64, 2, 5, 4, 64, 3};

class RoundsTest : public ::testing::TestWithParam<Setting> {
 protected:
  // The masters behind steps of those rounds, one after another.
  ParameterValues MastersAfter(const Setting& setting, Config config) const {
    config.gradient_accumulation_steps = 3;
    ParameterValues masters;
    RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
      const size_t operations = engine.program().plan().operations.size();
      int64_t number = 0;
      for (const int rounds : kRounds) {
        StepOptions options = kExactStep;
        options.micro_batches = rounds;
        EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, number++, options));
        for (const TrafficRow& row : engine.traffic())
          EXPECT_EQ(row.bytes, row.predicted_bytes) << rounds << " rounds";
        for (const CommunicationRow& row : engine.communication())
          EXPECT_EQ(row.bytes, row.predicted_bytes) << rounds << " rounds";
      }
      EXPECT_EQ(engine.program().plan().operations.size(), operations);
      EBB_ASSIGN_OR_RETURN(const ParameterValues all,
                           GatherAll(engine, model_, StateClass::kMaster));
      if (trainer.rank() == 0) masters = all;
      return absl::OkStatus();
    });
    return masters;
  }
  // This rank's gradients of held steps are the sums of all of their micro-batches.
  void ExpectSums(const Setting& setting, Config config) const {
    config.gradient_accumulation_steps = 3;
    RunOn(setting, model_, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
      int64_t number = 0;
      for (const int rounds : kRounds) {
        trainer.BeginStep(number, nullptr);
        Step step = engine.BeginStep(
            {.micro_batches = rounds, .gradient_divisor = 8, .hold_updates = true});
        EXPECT_EQ(step.rounds(), rounds);
        for (int round = 0; round < rounds; ++round) trainer.Round(step);
        EBB_RETURN_IF_ERROR(step.Reduce());
        EBB_ASSIGN_OR_RETURN(const ParameterValues slices,
                             ReadSlices(engine, model_, StateClass::kGradient));
        const ParameterValues sums = GradientSums(model_, setting.world, number++, rounds);
        for (size_t p = 0; p < sums.size(); ++p) {
          for (size_t i = 0; i < sums[p].size(); ++i) {
            if (std::isnan(slices[p][i])) continue;  // another rank's
            EXPECT_EQ(slices[p][i], sums[p][i] / 8) << rounds << " rounds, parameter " << p;
          }
        }
        EBB_RETURN_IF_ERROR(step.Finish());
      }
      return absl::OkStatus();
    });
  }

  const ModelSpec model_ = ScriptedModel();
  const Scratch folder_;
};
INSTANTIATE_TEST_SUITE_P(Cells, RoundsTest, ::testing::ValuesIn(WorldsAndStages({1, 2, 3})),
                         NameOf);

TEST_P(RoundsTest, AnyNumberIsTheSameWhereverStateLives) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    SCOPED_TRACE(setting);
    // Early updates are without clipping.
    const Setting plain{.world = setting.world, .timing = setting.timing};
    const ParameterValues expected = MastersAfter(plain, ConfigFor(plain));
    Config config = ConfigFor(setting);
    EXPECT_EQ(MastersAfter(setting, config), expected);
    for (const int64_t depth : {0, 3}) {
      config.ebb.prefetch_depth = depth;
      config.ebb.coalesce_bytes = depth == 0 ? 0 : 1200;
      EXPECT_EQ(MastersAfter(setting, OnNvme(config, folder_.path())), expected);
    }
  }
}

TEST_P(RoundsTest, HeldGradientsAreTheSumsOfAllRounds) {
  ExpectSums(GetParam(), ConfigFor(GetParam()));
  ExpectSums(GetParam(), OnNvme(ConfigFor(GetParam()), folder_.path()));
}

// An overlap by one scope also crosses the end of a round.
TEST_P(RoundsTest, AScopeMayCloseAfterTheNextRoundHasOpened) {
  const auto run = [&](bool overlaps) {
    Config config = ConfigFor(GetParam());
    config.gradient_accumulation_steps = 5;
    return RunScript(GetParam(), model_, config,
                     [&](const ScriptedTrainer& trainer, Step& step) {
                       std::optional<BackwardScope> last;
                       for (int round = 0; round < step.rounds(); ++round) {
                         {
                           const ForwardScope first = step.Forward(UnitId{kScriptedUnits[0]});
                           trainer.Look(first, kScriptedUnits[0]);
                           last.reset();
                         }
                         for (int visit = 1; visit < kScriptedVisits; ++visit)
                           trainer.Forward(step, kScriptedUnits[visit]);
                         for (int visit = kScriptedVisits - 1; visit > 0; --visit)
                           trainer.Backward(step, visit);
                         BackwardScope scope = step.Backward(UnitId{kScriptedUnits[0]});
                         trainer.Look(scope, kScriptedUnits[0]);
                         trainer.Add(scope, 0);
                         if (overlaps && round + 1 < step.rounds()) last.emplace(std::move(scope));
                       }
                     },
                     {.step = kExactStep});
  };
  const ScriptRun apart = run(false), overlapping = run(true);
  EXPECT_TRUE(apart.status.ok()) << apart.status;
  EXPECT_TRUE(overlapping.status.ok()) << overlapping.status;
  EXPECT_EQ(overlapping.masters, apart.masters);
}

}  // namespace
}  // namespace ebb::testing::rounds_test
