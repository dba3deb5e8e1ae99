// Ranks, as threads and as processes, that make different calls of engines. Every rank gets a
// Status that says which rank called what, and at once, so no time-out of these tests ever ends.
#include "ebb/runtime/engine/engine_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "tests/comm/processes.h"
#include "tests/engine/snapshot.h"

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
  const absl::Status ran = run(setting.world, [&](World world) -> absl::Status {
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
  });
  EXPECT_TRUE(ran.ok()) << ran;
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
    EXPECT_TRUE(statuses.back().ok()) << statuses.back();
    for (int rank = 0; rank < setting.world - 1; ++rank) {
      const absl::Status& status = statuses[static_cast<size_t>(rank)];
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_THAT(
          std::string(status.message()),
          AllOf(HasSubstr(absl::StrCat("rank ", setting.world - 1)), HasSubstr("has left")));
    }
  }
}

// Each rank creates it anew when it has heard of the error, some sooner than others.
TEST_P(EngineCallsTest, AfterAnErrorRanksMayMakeOtherCalls) {
  const auto& [name, run, setting] = GetParam();
  const absl::Status ran = run(setting.world, [&](World world) -> absl::Status {
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
  });
  EXPECT_TRUE(ran.ok()) << ran;
}

// All have had an error from the same call, so they are where they would be without it.
TEST_P(EngineCallsTest, AfterAnErrorOfTheSameCallRanksAreComparedAgain) {
  const auto& [name, run, setting] = GetParam();
  const int odd = setting.world - 1;
  Results seen;
  const absl::Status ran = run(setting.world, [&](World world) -> absl::Status {
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
  });
  EXPECT_TRUE(ran.ok()) << ran;
  for (const absl::Status& status : seen.Take(setting.world)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("ranks do different things"), HasSubstr("began a step"),
                      HasSubstr(absl::StrCat("rank ", odd, " began an evaluation"))));
  }
}

}  // namespace
}  // namespace ebb::testing::engine_calls_test
