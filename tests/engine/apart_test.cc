// Ranks, as threads and as processes, whose scopes go apart at stage 3, so that each waits for the
// other on another communicator. All of them get the error of a difference. The time-outs last for
// hours: a rank that waits for one fails this program by ctest's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "tests/comm/processes.h"
#include "tests/engine/scripted.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::apart_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

struct Trainer {
  Engine& engine;
  ScriptedTrainer& script;
  bool odd = false;  // this rank is the one that goes another way
};
using Act = std::function<absl::Status(Trainer& trainer)>;

using Run = absl::Status (*)(int ranks, std::function<absl::Status(World)> body);
struct Case {
  const char* name;
  Run run;
  int ranks = 2;
  int shard_group = 0;
};
void PrintTo(const Case& test, std::ostream* out) {
  *out << test.name;
}

absl::Status Evaluate(Engine& engine, int walks) {
  Evaluation evaluation = engine.BeginEvaluation();
  for (int walk = 0; walk < walks; ++walk)
    for (const int unit : kScriptedUnits) evaluation.Forward(UnitId{unit});
  return evaluation.Finish().status();
}

class ApartTest : public ::testing::TestWithParam<Case> {
 protected:
  // Each rank's status of `act`; the last rank is the odd one.
  std::vector<absl::Status> Seen(const Act& act) {
    const auto& [name, run, ranks, shard_group] = GetParam();
    const Setting setting{.world = ranks, .stage = 3};
    const ModelSpec model = ScriptedModel();
    Config config = ConfigFor(setting);
    config.ebb.timeout_seconds = 1e5;
    config.ebb.shard_group = shard_group;
    Results seen;
    ExpectOk(run(ranks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(
          Engine engine, Engine::Create(world, Device::Cpu(1), model, config, {.name = "policy"}));
      ScriptedTrainer script(model, world.rank());
      EBB_RETURN_IF_ERROR(TrainStep(engine, script, 0));
      Trainer trainer{engine, script, world.rank() == world.size() - 1};
      seen.Set(world.rank(), act(trainer));
      return absl::OkStatus();
    }));
    return seen.Take(ranks);
  }

  static void ExpectDifference(const std::vector<absl::Status>& seen, const std::string& rank_0s,
                               const std::string& last_ones) {
    for (const absl::Status& status : seen) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(rank_0s), HasSubstr(last_ones)));
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, ApartTest,
                         ::testing::Values(Case{"threads", RunThreads},
                                           Case{"processes", RunProcesses},
                                           Case{"three_threads", RunThreads, 3},
                                           Case{"shard_groups", RunThreads, 4, 2}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(ApartTest, OneRankEvaluatesMoreOften) {
  const std::vector<absl::Status> seen =
      Seen([](Trainer& trainer) { return Evaluate(trainer.engine, trainer.odd ? 5 : 3); });
  ExpectDifference(seen, "ranks opened different scopes: as number 19 of the step rank ",
                   " nothing more");
  ExpectDifference(seen, " opened ", "Forward('u0')");
}

TEST_P(ApartTest, OneRankEvaluatesLessOften) {
  ExpectDifference(
      Seen([](Trainer& trainer) { return Evaluate(trainer.engine, trainer.odd ? 2 : 4); }),
      "ranks opened different scopes: as number 13 of the step rank ", "Forward('u0')");
}

// A rank that goes on after an evaluation waits in the next call.
TEST_P(ApartTest, OneRankBeginsAStepInstead) {
  ExpectDifference(Seen([](Trainer& trainer) -> absl::Status {
                     EBB_RETURN_IF_ERROR(Evaluate(trainer.engine, trainer.odd ? 3 : 1));
                     return TrainStep(trainer.engine, trainer.script, 1);
                   }),
                   "ranks opened different scopes: as number 7 of the step rank ", "nothing more");
}

TEST_P(ApartTest, OneRankDropsItsStep) {
  const std::vector<absl::Status> seen = Seen([](Trainer& trainer) -> absl::Status {
    {
      Step step = trainer.engine.BeginStep(kExactStep);
      trainer.script.BeginStep(1, nullptr);
      trainer.script.ForwardAll(step);
      if (!trainer.odd) {
        trainer.script.BackwardAll(step);
        return FinishAndReport(trainer.engine, step);
      }
      trainer.script.Backward(step, kScriptedVisits - 1);
    }
    return TrainStep(trainer.engine, trainer.script, 2);
  });
  // Units have different sizes, so that a collective may show the difference first.
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                AnyOf(HasSubstr("ranks do different things with the engine 'policy'"),
                      HasSubstr("ranks opened different scopes"),
                      HasSubstr("ranks are in different steps or evaluations"),
                      HasSubstr("ranks called different operations")));
  }
}

// Ranks that meet in the exchange of records have an error of the evaluation alone.
TEST_P(ApartTest, WhereNoneWaitsInVainTheEngineGoesOn) {
  if (GetParam().ranks > 2) GTEST_SKIP() << "as two ranks";
  const ModelSpec model = ScriptedModel();
  const Config config = ConfigFor({.world = 2, .stage = 0});
  ExpectOk(GetParam().run(2, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), model, config));
    for (int round = 0; round < 3; ++round) {
      const absl::Status apart = Evaluate(engine, 1 + world.rank());
      if (!absl::IsFailedPrecondition(apart))
        return absl::InternalError(absl::StrCat("no difference: ", apart.ToString()));
      EBB_RETURN_IF_ERROR(Evaluate(engine, 2));
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace ebb::testing::apart_test
