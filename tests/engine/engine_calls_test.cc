// Ranks, as threads and as processes, that make different calls of engines. Every rank gets a
// Status that says which rank called what, and at once, so no time-out of these tests ever ends.
#include "ebb/runtime/engine/ranks/engine_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/comm/processes.h"
#include "tests/engine/scripted.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::engine_calls_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

struct Trainer {
  World world;
  Config config;
  ModelSpec model;
  Engine policy, other;
  ScriptedTrainer script;
};

absl::Status Evaluate(Engine& engine) {
  Evaluation evaluation = engine.BeginEvaluation();
  for (int unit : kScriptedUnits) evaluation.Forward(UnitId{unit});
  return evaluation.Finish().status();
}

absl::Status WriteMasters(Engine& engine) {
  return engine.Write(StateClass::kMaster, [](const Slice&, std::span<float> values) {
    std::fill(values.begin(), values.end(), 1.0f);
    return absl::OkStatus();
  });
}

struct Act {
  const char* name;
  const char* said;
  std::function<absl::Status(Trainer& trainer)> run;
};
const Act kActs[] = {
    {"Step", "began a step",
     [](Trainer& trainer) { return TrainStep(trainer.policy, trainer.script, 1); }},
    {"Evaluation", "began an evaluation",
     [](Trainer& trainer) { return Evaluate(trainer.policy); }},
    {"EvaluationOfAnother", "began an evaluation",
     [](Trainer& trainer) { return Evaluate(trainer.other); }},
    {"StepAfterAWrite", "began a step",
     [](Trainer& trainer) -> absl::Status {
       EBB_RETURN_IF_ERROR(WriteMasters(trainer.policy));
       trainer.script.BeginStep(1, nullptr);
       return TrainStep(trainer.policy, trainer.script, 1);
     }},
    {"Gather", "gathered a parameter",
     [](Trainer& trainer) {
       std::vector<float> whole(static_cast<size_t>(Elements(trainer.model.parameters[0].shape)));
       return trainer.policy.Gather(ParameterId{0}, StateClass::kMaster, whole);
     }},
    {"Suspend", "called Suspend", [](Trainer& trainer) { return trainer.policy.Suspend(); }},
    {"Copy", "copied parameters into ",
     [](Trainer& trainer) { return trainer.other.CopyParametersFrom(trainer.policy); }},
    {"Create", "created ",
     [](Trainer& trainer) {
       return Engine::Create(trainer.world, Device::Cpu(1), trainer.model, trainer.config,
                             {.name = "third"})
           .status();
     }},
    {"NewCommunicator", "created a communicator",
     [](Trainer& trainer) { return trainer.world.NewCommunicator({.name = "mine"}).status(); }},
    // The step is dropped, and then there is another one.
    {"DroppedStep", "began a step",
     [](Trainer& trainer) {
       { const Step dropped = trainer.policy.BeginStep(kExactStep); }
       return TrainStep(trainer.policy, trainer.script, 1);
     }},
};
using Run = absl::Status (*)(int ranks, std::function<absl::Status(World)> body);

// Each rank's status. Rank `odd` made another call than the rest.
std::vector<absl::Status> Disagree(Run run, const Setting& setting, int odd, const Act& its,
                                   const Act& rest) {
  Results seen;
  ExpectOk(run(setting.world, [&](World world) -> absl::Status {
    const ModelSpec model = ScriptedModel();
    const Config config = ConfigFor(setting);
    EBB_ASSIGN_OR_RETURN(Engine policy,
                         Engine::Create(world, Device::Cpu(1), model, config, {.name = "policy"}));
    EBB_ASSIGN_OR_RETURN(Engine other,
                         Engine::Create(world, Device::Cpu(1), model, config, {.name = "other"}));
    Trainer trainer{.world = world,
                    .config = config,
                    .model = model,
                    .policy = std::move(policy),
                    .other = std::move(other),
                    .script = ScriptedTrainer(model, world.rank())};
    EBB_RETURN_IF_ERROR(TrainStep(trainer.policy, trainer.script, 0));
    // An error that no other rank has to do with ends no comparing.
    const auto refuse = [](const Slice&, std::span<const float>) {
      return absl::InternalError("the disk is full");
    };
    EXPECT_FALSE(trainer.policy.Read(StateClass::kMaster, refuse).ok());
    // Otherwise a rank that is still in the first step learns of it there.
    absl::Status status = world.MeetOnHost();
    if (status.ok()) status = (world.rank() == odd ? its : rest).run(trainer);
    seen.Set(world.rank(), status);
    return absl::OkStatus();
  }));
  return seen.Take(setting.world);
}

struct Case {
  const char* name;
  Run run;
  Setting setting;
};
void PrintTo(const Case& test, std::ostream* out) {
  *out << test.name;
}
class EngineCallsTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Worlds, EngineCallsTest,
    ::testing::Values(Case{"threads_stage0", RunThreads, {.world = 2, .stage = 0}},
                      Case{"threads_stage3", RunThreads, {.world = 3, .stage = 3}},
                      Case{"processes_stage3", RunProcesses, {.world = 3, .stage = 3}}),
    [](const auto& test) { return std::string(test.param.name); });

TEST_P(EngineCallsTest, RanksThatDoDifferentThingsAllSayWhichRankDidWhat) {
  const auto& [name, run, setting] = GetParam();
  const int odd = setting.world - 1;
  for (const Act& its : kActs) {
    for (const Act& rest : kActs) {
      const auto begins_step = [](const Act& act) {
        return std::string(act.said) == "began a step";
      };
      if (&its == &rest) continue;
      SCOPED_TRACE(::testing::Message() << its.name << " on one rank, " << rest.name);
      const std::vector<absl::Status> statuses = Disagree(run, setting, odd, its, rest);
      for (int rank = 0; rank < setting.world; ++rank) {
        const absl::Status& status = statuses[static_cast<size_t>(rank)];
        EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
        const std::string text(status.message());
        if (begins_step(its) && begins_step(rest)) {
          // A dropped step may appear first in its gathers.
          EXPECT_THAT(text, AnyOf(HasSubstr("ranks do different things with the engine 'policy'"),
                                  HasSubstr("ranks called different operations")));
          continue;
        }
        EXPECT_THAT(text, HasSubstr("ranks do different things"));
        EXPECT_THAT(text, AllOf(HasSubstr(absl::StrCat("rank ", odd, " ")), HasSubstr(its.said),
                                HasSubstr(rest.said), HasSubstr(" where rank 0 ")));
      }
    }
  }
}

// The rank that ends, or has destroyed its engine, is named.
TEST_P(EngineCallsTest, ARankThatEndsWhileOthersGoOnIsNamed) {
  const auto& [name, run, setting] = GetParam();
  const Act ends = {"Ends", "", [](Trainer&) { return absl::OkStatus(); }};
  for (const Act& rest : kActs) {
    SCOPED_TRACE(rest.name);
    const std::vector<absl::Status> statuses =
        Disagree(run, setting, setting.world - 1, ends, rest);
    EXPECT_OK(statuses.back());
    for (int rank = 0; rank < setting.world - 1; ++rank) {
      const absl::Status& status = statuses[static_cast<size_t>(rank)];
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable,
                                   absl::StrCat("rank ", setting.world - 1), "has left"));
    }
  }
}

// Each rank creates it anew when it has heard of the error, some sooner than others.
TEST_P(EngineCallsTest, AfterAnErrorRanksMayMakeOtherCalls) {
  const auto& [name, run, setting] = GetParam();
  ExpectOk(run(setting.world, [&](World world) -> absl::Status {
    const ModelSpec model = ScriptedModel();
    Config config = ConfigFor(setting);
    const auto create = [&] { return Engine::Create(world, Device::Cpu(1), model, config); };
    config.gradient_clipping = 1.0 + world.rank();
    const absl::Status refused = create().status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    config.gradient_clipping = 1;
    EBB_ASSIGN_OR_RETURN(Engine engine, create());
    ScriptedTrainer trainer(model, world.rank());
    return TrainStep(engine, trainer, 0);
  }));
}

// All have had an error from the same call, so they are where they would be without it.
TEST_P(EngineCallsTest, AfterAnErrorOfTheSameCallRanksAreComparedAgain) {
  const auto& [name, run, setting] = GetParam();
  const int odd = setting.world - 1;
  Results seen;
  ExpectOk(run(setting.world, [&](World world) -> absl::Status {
    const ModelSpec model = ScriptedModel();
    Config config = ConfigFor(setting);
    config.ebb.timeout_seconds = 20;
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), model, config));
    ScriptedTrainer trainer(model, world.rank());
    trainer.BeginStep(0, nullptr);
    {
      Step step = engine.BeginStep(kExactStep);
      trainer.ForwardAll(step);
      EXPECT_FALSE(step.Finish().ok()) << "without any Backward";
    }
    EXPECT_FALSE(engine.Report().ok());
    // Otherwise a rank that is still in the step learns of it there.
    absl::Status status = world.MeetOnHost();
    if (status.ok())
      status = world.rank() == odd ? Evaluate(engine) : TrainStep(engine, trainer, 1);
    seen.Set(world.rank(), status);
    return absl::OkStatus();
  }));
  for (const absl::Status& status : seen.Take(setting.world))
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kFailedPrecondition, "ranks do different things",
                         "began a step", absl::StrCat("rank ", odd, " began an evaluation")));
}

// Ranks that call different things of one engine, among them Suspend, Resume, CopyParametersFrom or
// SetTrainingState: every rank gets a Status that says so, and none waits for the time-out.

struct BarrierAct {
  const char* name;
  const char* said;    // about a rank that calls it, if all ranks enter the barrier
  const char* called;  // the same, if some do not
  std::function<absl::Status(Engine& engine, Engine& other, ScriptedTrainer& trainer)> run;
  bool enters = true;
};

const BarrierAct kCalls[] = {
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
const BarrierAct kOthers[] = {
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
std::vector<absl::Status> DisagreeAtBarrier(const Setting& setting, int odd, const BarrierAct& its,
                                            const BarrierAct& rest) {
  const ModelSpec model = ScriptedModel();
  const Config config = ConfigFor(setting);
  std::vector<absl::Status> statuses(static_cast<size_t>(setting.world));
  OnThreads(setting.world, [&](World world) -> absl::Status {
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
      // The ranks have met, and nothing has happened.
      EXPECT_OK(engine.Suspend());
      EXPECT_OK(engine.Resume());
      return TrainStep(engine, trainer, 1);
    }
    // The ranks' results went apart for good: a later call says the same.
    EXPECT_EQ(engine.Suspend(), status);
    EXPECT_EQ(TrainStep(engine, trainer, 2), status);
    return absl::OkStatus();
  });
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
  for (const BarrierAct& call : kCalls) {
    for (const BarrierAct& other : kOthers) {
      if (std::string(call.name) == other.name) continue;
      for (const bool swapped : {false, true}) {
        const BarrierAct &its = swapped ? other : call, &rest = swapped ? call : other;
        const int odd = GetParam().world - 1;
        SCOPED_TRACE(::testing::Message() << its.name << " on one rank, " << rest.name);
        const bool all_enter = its.enters && rest.enters;
        for (const absl::Status& status : DisagreeAtBarrier(GetParam(), odd, its, rest))
          EXPECT_THAT(status,
                      StatusIs(absl::StatusCode::kFailedPrecondition,
                               "ranks do different things with the engine 'policy'",
                               absl::StrCat("rank 0 ", all_enter ? rest.said : rest.called),
                               absl::StrCat("rank ", odd, " ", all_enter ? its.said : its.called)));
      }
    }
  }
}

TEST_P(CallBarrierTest, RanksThatCopyFromDifferentEnginesAllGetAStatus) {
  const ModelSpec model = ScriptedModel();
  const Config config = ConfigFor(GetParam());
  OnThreads(GetParam().world, [&](World world) {
    std::vector<Engine> engines;
    for (const char* name : {"policy", "reference", "rollout"}) {
      ASSERT_OK_AND_ASSIGN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), model, config, {.name = name}));
      engines.push_back(std::move(engine));
    }
    const absl::Status status = engines[2].CopyParametersFrom(engines[world.rank() == 1]);
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                 "into the engine 'rollout' from different engines", "rank 1"));
    // Both sources, and the destination, work on.
    for (Engine& engine : engines) EXPECT_OK(engine.Suspend());
  });
}

}  // namespace
}  // namespace ebb::testing::engine_calls_test
