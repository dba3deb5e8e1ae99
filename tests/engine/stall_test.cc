// A rank that does not come. The time-out passes once, in whatever part of the engine the other
// ranks wait, and their errors name the first wait. So only that wait has a short time-out here.
// Time-outs of all other communicators last for days.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ebb/runtime/device/wait_point.h"
#include "tests/engine/scripted.h"
#include "tests/engine/watched_world.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::stall_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kShort = 0.5, kDays = 1e6;

struct Engines {
  Engine policy, other;
  ScriptedTrainer trainer;
};
using Act = std::function<absl::Status(Engines& engines)>;

// The communicators of an engine with shard groups.
constexpr char kOfGroups[] = "control,gather,reduce,replicas";

struct Case {
  Setting setting;
  std::string impatient;  // the communicators with the short time-out
  Act act;
  bool stalls = true;  // the last rank, until all others have got their Status
  int shard_group = 0;
};

// Every rank's status of its call.
std::vector<absl::Status> WhatIsSaid(const Case& test) {
  const ModelSpec model = ScriptedModel();
  Config config = ConfigFor(test.setting);
  config.ebb.timeout_seconds = kShort;
  config.ebb.shard_group = test.shard_group;
  const int last = test.setting.world - 1;
  std::vector<absl::Status> statuses(static_cast<size_t>(test.setting.world));
  std::atomic<int> done{0};
  WaitPoint all_others;
  OnThreads(test.setting.world, [&](World world) {
    const auto watched = std::make_shared<WatchedCalls>();
    watched->adapt = [&](CommunicatorOptions& options) {
      options.timeout_seconds = kDays;
      for (const absl::string_view name : absl::StrSplit(test.impatient, ',')) {
        if (absl::EndsWith(options.name, absl::StrCat(" ", name))) options.timeout_seconds = kShort;
      }
    };
    const World patient = Watch(world, watched);
    ASSERT_OK_AND_ASSIGN(
        Engine policy, Engine::Create(patient, Device::Cpu(1), model, config, {.name = "policy"}));
    ASSERT_OK_AND_ASSIGN(Engine other,
                         Engine::Create(patient, Device::Cpu(1), model, config, {.name = "other"}));
    Engines engines{std::move(policy), std::move(other), ScriptedTrainer(model, world.rank())};
    ASSERT_OK(TrainStep(engines.policy, engines.trainer, 0));
    ASSERT_OK(world.MeetOnHost());  // all have finished the step
    const auto others_are_done = [&] { return done.load(std::memory_order_acquire) == last; };
    if (test.stalls && world.rank() == last) all_others.Await(others_are_done);
    statuses[static_cast<size_t>(world.rank())] = test.act(engines);
    done.fetch_add(1, std::memory_order_acq_rel);
    all_others.Notify();
    // None leaves while another still waits: it would be named for that.
    all_others.Await([&] { return done.load(std::memory_order_acquire) > last; });
  });
  return statuses;
}

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

absl::Status SecondStep(Engines& engines) {
  return TrainStep(engines.policy, engines.trainer, 1);
}

absl::Status Evaluate(Engine& engine) {
  Evaluation evaluation = engine.BeginEvaluation();
  for (int unit : kScriptedUnits) evaluation.Forward(UnitId{unit});
  return evaluation.Finish().status();
}

TEST(StallTest, TheFirstWaitOfAStepEndsAllOthers) {
  for (const Setting& setting :
       {Setting{.world = 2, .stage = 1}, {.world = 2, .stage = 3}, {.world = 3, .stage = 3}}) {
    SCOPED_TRACE(::testing::Message() << setting);
    const std::string first = setting.stage == 3 ? "gather" : "reduce";
    const std::vector<absl::Status> statuses =
        WhatIsSaid({.setting = setting, .impatient = first, .act = SecondStep});
    for (int rank = 0; rank < setting.world - 1; ++rank) {
      const absl::Status& status = statuses[static_cast<size_t>(rank)];
      EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
      EXPECT_THAT(
          Text(status),
          AllOf(HasSubstr(absl::StrCat("in step 2, at the ", first, " of unit 'u")),
                HasSubstr(absl::StrCat("has waited 0.5 s for rank ", setting.world - 1, " in ")),
                HasSubstr(absl::StrCat("on communicator 'policy ", first, "'")),
                HasSubstr(absl::StrCat(": rank ", setting.world - 1,
                                       " last created a communicator; rank "))));
      EXPECT_THAT(Text(status), Not(HasSubstr("aborted")));
    }
    EXPECT_FALSE(statuses.back().ok());
  }
}

TEST(StallTest, AnEvaluationsFirstWaitEndsAllOthers) {
  const std::vector<absl::Status> statuses = WhatIsSaid(
      {.setting = {.world = 2, .stage = 3}, .impatient = "gather", .act = [](Engines& engines) {
         return Evaluate(engines.policy);
       }});
  EXPECT_THAT(Text(statuses[0]), AllOf(HasSubstr("in an evaluation, at the gather of unit 'u"),
                                       HasSubstr("on communicator 'policy gather'")));
}

TEST(StallTest, AWaitOffTheDeclaredOrderEndsAllOthers) {
  const auto act = [](Engines& engines) {
    Step step = engines.policy.BeginStep(kExactStep);
    engines.trainer.BeginStep(1, nullptr);
    for (const int unit : {0, 2, 1, 3, 4, 0}) engines.trainer.Forward(step, unit);
    engines.trainer.BackwardAll(step);
    return FinishAndReport(engines.policy, step);
  };
  for (const int stage : {2, 3}) {
    const std::string first = stage == 3 ? "gather" : "reduce";
    const std::vector<absl::Status> statuses =
        WhatIsSaid({.setting = {.world = 2, .stage = stage}, .impatient = first, .act = act});
    EXPECT_THAT(Text(statuses[0]),
                AllOf(HasSubstr(absl::StrCat("at the ", first, " of unit 'u")),
                      HasSubstr(absl::StrCat("on communicator 'policy ", first, "'"))));
  }
}

TEST(StallTest, RanksOfOtherShardGroupsDoNotWaitForTheirOwnTimeOut) {
  const std::vector<absl::Status> statuses = WhatIsSaid({.setting = {.world = 4, .stage = 3},
                                                         .impatient = kOfGroups,
                                                         .act = SecondStep,
                                                         .shard_group = 2});
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kDeadlineExceeded) << statuses[rank];
    EXPECT_THAT(Text(statuses[rank]),
                AllOf(HasSubstr("in step 2, at the "), HasSubstr("has waited 0.5 s for "),
                      AnyOf(HasSubstr("on communicator 'policy gather'"),
                            HasSubstr("on communicator 'policy replicas'"))));
  }
}

TEST(StallTest, ACallsFirstWaitEndsThoseOfAllRanks) {
  for (const int shard_group : {0, 2}) {
    const std::vector<absl::Status> statuses =
        WhatIsSaid({.setting = {.world = 4, .stage = 3},
                    .impatient = shard_group == 0 ? "reduce" : kOfGroups,
                    .act = [](Engines& engines) { return engines.policy.Suspend(); },
                    .shard_group = shard_group});
    for (size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kDeadlineExceeded) << statuses[rank];
      EXPECT_THAT(
          Text(statuses[rank]),
          AllOf(HasSubstr(absl::StrCat("with the engine 'policy' rank ", rank, " calls Suspend: ")),
                HasSubstr("has waited 0.5 s for ")));
    }
  }
}

// Every rank waits for the others, each in another engine, and none waits for the time-out.
TEST(StallTest, RanksThatCallEnginesInDifferentOrdersNameBothCalls) {
  const std::vector<absl::Status> steps = WhatIsSaid({.setting = {.world = 2, .stage = 3},
                                                      .impatient = "none",
                                                      .act =
                                                          [](Engines& engines) {
                                                            return engines.trainer.rank() == 0
                                                                       ? SecondStep(engines)
                                                                       : Evaluate(engines.other);
                                                          },
                                                      .stalls = false});
  for (const absl::Status& status : steps) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(Text(status), HasSubstr("rank 1 began an evaluation of the engine 'other' where "
                                        "rank 0 began a step of the engine 'policy'"));
  }

  const std::vector<absl::Status> calls =
      WhatIsSaid({.setting = {.world = 2, .stage = 3},
                  .impatient = "none",
                  .act =
                      [](Engines& engines) {
                        return engines.trainer.rank() == 0
                                   ? engines.other.CopyParametersFrom(engines.policy)
                                   : engines.policy.Resume();
                      },
                  .stalls = false});
  for (const absl::Status& status : calls)
    EXPECT_THAT(Text(status), HasSubstr("rank 1 called Resume of the engine 'policy' where rank 0 "
                                        "copied parameters into the engine 'other'"));
}

// One waits in a gather for another that waits in a reduction for it. All are alive.
TEST(StallTest, WokenRanksNameTheDifference) {
  const std::vector<absl::Status> statuses =
      WhatIsSaid({.setting = {.world = 2, .stage = 3},
                  .impatient = "gather",
                  .act =
                      [](Engines& engines) {
                        const bool apart = engines.trainer.rank() == 1;
                        StepOptions options = kExactStep;
                        options.may_leave_out = true;
                        Step step = engines.policy.BeginStep(options);
                        engines.trainer.BeginStep(1, nullptr);
                        engines.trainer.ForwardAll(step);
                        for (const int visit : apart ? std::vector<int>{5, 4, 1, 0}
                                                     : std::vector<int>{5, 4, 3, 2, 1, 0})
                          engines.trainer.Backward(step, visit);
                        return FinishAndReport(engines.policy, step);
                      },
                  .stalls = false});
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(Text(status), AllOf(HasSubstr("ranks opened different scopes: as number 9"),
                                    HasSubstr("'u3'"), HasSubstr("'u1'")));
  }
}

}  // namespace
}  // namespace ebb::testing::stall_test
