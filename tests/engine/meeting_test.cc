// Ranks that do different things with an engine, one of them suspending, resuming, copying or setting the
// training state: every
// rank gets a Status that says so, and none waits for the time-out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/snapshot.h"

namespace ebb::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Act {
  const char* name;
  const char* said;    // of a rank that does it, where all meet
  const char* called;  // where they do not
  std::function<absl::Status(Engine& engine, Engine& other, ScriptedTrainer& trainer)> run;
  bool meets = true;
};

const Act kMeetings[] = {
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
     /*meets=*/false},
    {"Evaluation", "", "began an evaluation",
     [](Engine& engine, Engine&, ScriptedTrainer&) {
       Evaluation evaluation = engine.BeginEvaluation();
       for (int unit : kScriptedUnits) evaluation.Forward(UnitId{unit});
       return evaluation.Finish().status();
     },
     /*meets=*/false},
    kMeetings[0],
    kMeetings[1],
    kMeetings[2],
    kMeetings[3],
    kMeetings[4],
};

// Every rank's status of what it did, `odd` another thing than the rest.
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
    // Else a rank that is still in the first step hears of the difference there.
    EBB_RETURN_IF_ERROR(world.MeetOnHost());
    absl::Status& status = statuses[static_cast<size_t>(world.rank())];
    status = (world.rank() == odd ? its : rest).run(engine, other, trainer);
    if (its.meets && rest.meets) {
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

class MeetingTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, MeetingTest,
                         ::testing::Values(Setting{.world = 2, .stage = 0},
                                           Setting{.world = 2, .stage = 3},
                                           Setting{.world = 3, .stage = 1},
                                           Setting{.world = 4, .stage = 3}),
                         NameOf);

TEST_P(MeetingTest, RanksThatDisagreeAllGetAStatus) {
  for (const Act& meeting : kMeetings) {
    for (const Act& other : kOthers) {
      if (std::string(meeting.name) == other.name) continue;
      for (const bool swapped : {false, true}) {
        const Act &its = swapped ? other : meeting, &rest = swapped ? meeting : other;
        const int odd = GetParam().world - 1;
        SCOPED_TRACE(::testing::Message() << its.name << " on one rank, " << rest.name);
        const bool meet = its.meets && rest.meets;
        for (const absl::Status& status : Disagree(GetParam(), odd, its, rest)) {
          EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
          EXPECT_THAT(
              std::string(status.message()),
              AllOf(HasSubstr("ranks do different things with the engine 'policy'"),
                    HasSubstr(absl::StrCat("rank 0 ", meet ? rest.said : rest.called)),
                    HasSubstr(absl::StrCat("rank ", odd, " ", meet ? its.said : its.called))));
        }
      }
    }
  }
}

TEST_P(MeetingTest, RanksThatCopyFromDifferentEnginesAllGetAStatus) {
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
}  // namespace ebb::testing
