// Ranks that call different things of one engine, among them Suspend, Resume, CopyParametersFrom or
// SetTrainingState: every rank gets a Status that says so, and none waits for the time-out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/snapshot.h"

namespace ebb::testing::call_barrier_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Act {
  const char* name;
  const char* said;    // about a rank that calls it, if all ranks enter the barrier
  const char* called;  // the same, if some do not
  std::function<absl::Status(Engine& engine, Engine& other, ScriptedTrainer& trainer)> run;
  bool enters = true;
};

const Act kCalls[] = {
    {"Suspend", "calls Suspend", "called Suspend",
     [](Engine& engine, Engine&, ScriptedTrainer&) { return engine.Suspend(); }},
    {"Resume", "calls Resume", "called Resume",
     [](Engine& engine, Engine&, ScriptedTrainer&) { return engine.Resume(); }},
    {"Copy", "calls CopyParametersFrom", "copied parameters into it",
     [](Engine& engine, Engine& other, ScriptedTrainer&) {
       return engine.CopyParametersFrom(other);
     }},
    {"SetTrainingState", "calls SetTrainingState", "called SetTrainingState",
     [](Engine& engine, Engine&, ScriptedTrainer&) {
       return engine.SetTrainingState(TrainingState());
     }},
    {"Agree", "calls Agree", "called Agree",
     [](Engine& engine, Engine&, ScriptedTrainer&) { return engine.Agree(absl::OkStatus()); }},
};
const Act kOthers[] = {
    {"Step", "", "began a step",
     [](Engine& engine, Engine&, ScriptedTrainer& trainer) {
       return TrainStep(engine, trainer, 1);
     },
     /*enters=*/false},
    {"Evaluation", "", "began an evaluation",
     [](Engine& engine, Engine&, ScriptedTrainer&) {
       Evaluation evaluation = engine.BeginEvaluation();
       for (int unit : kScriptedUnits) evaluation.Forward(UnitId{unit});
       return evaluation.Finish().status();
     },
     /*enters=*/false},
    kCalls[0],
    kCalls[1],
    kCalls[2],
    kCalls[3],
    kCalls[4],
};

// Every rank's status of its call. Rank `odd` makes another call than the rest.
std::vector<absl::Status> Disagree(const Setting& setting, int odd, const Act& its,
                                   const Act& rest) {
  const ModelSpec model = ScriptedModel();
  const Config config = ConfigFor(setting);
  std::vector<absl::Status> statuses(static_cast<size_t>(setting.world));
  const absl::Status run = RunThreads(setting.world, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), model, config, {.name = "policy"}));
    EBB_ASSIGN_OR_RETURN(Engine other, Engine::Create(world, Device::Cpu(1), model, config));
    ScriptedTrainer trainer(model, world.rank());
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    // Otherwise a rank that is still in the first step learns of the difference there.
    EBB_RETURN_IF_ERROR(world.MeetOnHost());
    absl::Status& status = statuses[static_cast<size_t>(world.rank())];
    status = (world.rank() == odd ? its : rest).run(engine, other, trainer);
    if (its.enters && rest.enters) {
      // They have met, and nothing has happened.
      EXPECT_TRUE(engine.Suspend().ok());
      EXPECT_TRUE(engine.Resume().ok());
      return TrainStep(engine, trainer, 1);
    }
    // What the ranks computed went apart, for good: a later call says the same.
    EXPECT_EQ(engine.Suspend(), status);
    EXPECT_EQ(TrainStep(engine, trainer, 2), status);
    return absl::OkStatus();
  });
  EXPECT_TRUE(run.ok()) << run;
  return statuses;
}

class CallBarrierTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, CallBarrierTest,
                         ::testing::Values(Setting{.world = 2, .stage = 0},
                                           Setting{.world = 2, .stage = 3},
                                           Setting{.world = 3, .stage = 1},
                                           Setting{.world = 4, .stage = 3}),
                         NameOf);

TEST_P(CallBarrierTest, RanksThatDisagreeAllGetAStatus) {
  for (const Act& call : kCalls) {
    for (const Act& other : kOthers) {
      if (std::string(call.name) == other.name) continue;
      for (const bool swapped : {false, true}) {
        const Act &its = swapped ? other : call, &rest = swapped ? call : other;
        const int odd = GetParam().world - 1;
        SCOPED_TRACE(::testing::Message() << its.name << " on one rank, " << rest.name);
        const bool all_enter = its.enters && rest.enters;
        for (const absl::Status& status : Disagree(GetParam(), odd, its, rest)) {
          EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
          EXPECT_THAT(
              std::string(status.message()),
              AllOf(HasSubstr("ranks do different things with the engine 'policy'"),
                    HasSubstr(absl::StrCat("rank 0 ", all_enter ? rest.said : rest.called)),
                    HasSubstr(absl::StrCat("rank ", odd, " ", all_enter ? its.said : its.called))));
        }
      }
    }
  }
}

TEST_P(CallBarrierTest, RanksThatCopyFromDifferentEnginesAllGetAStatus) {
  const ModelSpec model = ScriptedModel();
  const Config config = ConfigFor(GetParam());
  const absl::Status run = RunThreads(GetParam().world, [&](World world) -> absl::Status {
    std::vector<Engine> engines;
    for (const char* name : {"policy", "reference", "rollout"}) {
      EBB_ASSIGN_OR_RETURN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), model, config, {.name = name}));
      engines.push_back(std::move(engine));
    }
    const absl::Status status = engines[2].CopyParametersFrom(engines[world.rank() == 1]);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr("into the engine 'rollout' from different engines"), HasSubstr("rank 1")));
    // Both sources, and the destination, work on.
    for (Engine& engine : engines) EXPECT_TRUE(engine.Suspend().ok());
    return absl::OkStatus();
  });
  EXPECT_TRUE(run.ok()) << run;
}

}  // namespace
}  // namespace ebb::testing::call_barrier_test
