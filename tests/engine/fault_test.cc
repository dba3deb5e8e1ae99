// An error at every injection point. Every rank ends with a Status that names the failure, none
// waits for ever, and no update runs that the plan puts after it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <mutex>
#include <set>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/waits.h"
#include "tests/engine/scripted.h"
#include "tests/engine/watched_world.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::fault_test {
namespace {

using sharding::Op;
using sharding::Role;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int64_t kFaultyStep =
    1;  // the second: the updates of the first may still be on their way

// The collectives of a step, in the order in which a rank enqueues them.
std::vector<int> Collectives(const sharding::Plan& plan) {
  std::vector<int> collectives;
  for (int index = 0; index < std::ssize(plan.ops); ++index)
    if (plan.ops[static_cast<size_t>(index)].code() == sharding::Code::kRedistribute)
      collectives.push_back(index);
  return collectives;
}

// The units with an update that comes after the operation with the number `failed` by streams and
// waits.
std::set<int> UnitsUpdatedAfter(const sharding::Plan& plan, int failed) {
  sharding::OpList list = sharding::ListOf(plan, /*carrying=*/false);
  const sharding::OpList* const only[] = {&list};
  sharding::DeriveWaits(sharding::Cells(only, plan), list);
  std::vector<bool> after(list.ops.size());
  std::array<bool, sharding::kLines> line_after = {};
  std::set<int> units;
  for (size_t index = 0; index < list.ops.size(); ++index) {
    const sharding::Op& op = list.ops[index];
    bool comes_after = line_after[op.starts] || op.number == failed;
    for (int wait : list.waits[index].on) comes_after |= after[static_cast<size_t>(wait)];
    after[index] = comes_after;
    line_after[op.starts] = line_after[op.starts] || comes_after;
    line_after[op.ends] = line_after[op.ends] || comes_after;
    if (!comes_after || op.role != Role::kUpdate) continue;
    for (const sharding::Part& part : op.parts) units.insert(part.unit);
  }
  return units;
}

// An optimizer that records the slices it was called with.
struct Updates {
  std::mutex mutex;
  std::set<std::pair<int64_t, int>> seen;  // step from 0, parameter; of all ranks

  OptimizerSpec Spec() {
    return {.states = {}, .update = [this](const UpdateSlice& update) {
              const std::lock_guard lock(mutex);
              seen.insert({update.step - 1, static_cast<int>(update.slice.parameter)});
              return absl::OkStatus();
            }};
  }
};

struct Outcome {
  std::vector<absl::Status> statuses;  // by rank
  std::vector<int> collectives;        // of the plan
  int64_t calls = 0;                   // of the culprit, in the faulty step or in Create
  sharding::Plan plan;
};

constexpr int64_t kInCreate = -1;

// Every later call must return the same error, at once, whatever the other ranks do.
void ExpectSticky(Engine& engine, ScriptedTrainer& trainer, const absl::Status& first) {
  std::vector<float> whole(99);
  EXPECT_EQ(engine.Gather(ParameterId{0}, StateClass::kMaster, whole), first);
  EXPECT_EQ(engine.Report().status(), first);
  for (int again = 0; again < 2; ++again) {
    Step step = engine.BeginStep();
    trainer.Round(step);
    EXPECT_EQ(FinishAndReport(engine, step), first);
  }
  const auto sink = [](const Slice&, std::span<const float>) { return absl::OkStatus(); };
  EXPECT_EQ(engine.Read(StateClass::kMaster, sink), first);
  Evaluation evaluation = engine.BeginEvaluation();
  for (int unit : kScriptedUnits) evaluation.Forward(UnitId{unit});
  EXPECT_EQ(evaluation.Finish().status(), first);
}

// Behaviour of a rank: it asks for the report of each step, and calls on after an error; or it asks
// for none, and leaves when a Finish returns an error.
enum class Trainers { kAsk, kLeave };

// Fails call `number` of rank `culprit` in `step`; a number beyond its calls fails none.
Outcome RunWithFault(const Setting& setting, int64_t step_of_fault, int64_t number,
                     WatchedCalls::Fault fault, Updates& updates,
                     Trainers trainers = Trainers::kAsk) {
  Outcome outcome;
  outcome.statuses.resize(static_cast<size_t>(setting.world));
  const int culprit = setting.world - 1;
  const ModelSpec model = ScriptedModel();
  const absl::Status status = RunThreads(setting.world, [&](World world) -> absl::Status {
    const auto calls = std::make_shared<WatchedCalls>();
    const bool is_culprit = world.rank() == culprit;
    calls->fault = fault;
    const auto arm = [&] {
      if (is_culprit) calls->fail_at = calls->calls + number;
    };
    absl::Status& result = outcome.statuses[static_cast<size_t>(world.rank())];
    if (step_of_fault == kInCreate) arm();
    absl::StatusOr<Engine> engine =
        Engine::Create(Watch(world, calls), Device::Cpu(), model, ConfigFor(setting),
                       {.optimizer = updates.Spec()});
    if (is_culprit && step_of_fault == kInCreate) outcome.calls = calls->calls;
    if (!engine.ok()) return result = engine.status();
    ScriptedTrainer trainer(model, world.rank());
    if (is_culprit) outcome.plan = engine->program().plan();
    for (int64_t s = 0; s < kFaultyStep + 3 && result.ok(); ++s) {
      if (s == step_of_fault) arm();
      const int64_t before = calls->calls;
      trainer.BeginStep(s, nullptr);
      Step step = engine->BeginStep();
      trainer.Round(step);
      result = trainers == Trainers::kAsk ? FinishAndReport(*engine, step) : step.Finish();
      if (is_culprit && s == step_of_fault) outcome.calls = calls->calls - before;
    }
    if (!result.ok() && trainers == Trainers::kAsk) ExpectSticky(*engine, trainer, result);
    return result;
  });
  const bool all_ok = std::all_of(outcome.statuses.begin(), outcome.statuses.end(),
                                  [](const absl::Status& rank) { return rank.ok(); });
  EXPECT_EQ(status.ok(), all_ok) << status;
  outcome.collectives = Collectives(outcome.plan);
  return outcome;
}

class FaultTest : public ::testing::TestWithParam<Setting> {
 protected:
  static void FailEveryCollective(const Setting& setting, WatchedCalls::Fault fault,
                                  Trainers trainers = Trainers::kAsk) {
    Updates clean_updates;
    const Outcome clean =
        RunWithFault(setting, kFaultyStep, /*number=*/int64_t{1} << 40, fault, clean_updates);
    const std::vector<int>& collectives = clean.collectives;
    ASSERT_EQ(clean.calls, static_cast<int64_t>(collectives.size()));
    for (size_t n = 0; n < collectives.size(); ++n) {
      const sharding::Op& failed = clean.plan.ops[static_cast<size_t>(collectives[n])];
      SCOPED_TRACE(::testing::Message() << setting << ", call " << n << " of " << collectives.size()
                                        << ", a " << std::string(sharding::Name(failed.role))
                                        << ", fault " << static_cast<int>(fault));
      Updates updates;
      const Outcome outcome =
          RunWithFault(setting, kFaultyStep, static_cast<int64_t>(n), fault, updates, trainers);
      for (const absl::Status& status : outcome.statuses) EXPECT_THAT(status, Says(kInjected));
      const std::set<int> forbidden = UnitsUpdatedAfter(clean.plan, failed.number);
      for (const auto& [step, parameter] : updates.seen) {
        const int unit = clean.plan.layout.parameters[static_cast<size_t>(parameter)].unit;
        EXPECT_LE(step, kFaultyStep);
        if (step == kFaultyStep) {
          EXPECT_EQ(forbidden.count(unit), 0u) << "unit u" << unit << " was updated";
        }
      }
    }
  }
};

TEST_P(FaultTest, NoUpdatePassesACollectiveThatWasRefused) {
  for (const Setting& setting : At(GetParam(), kTimings))
    FailEveryCollective(setting, WatchedCalls::kRefuse);
}

TEST_P(FaultTest, NoUpdatePassesACollectiveThatFailedOnItsStream) {
  for (const Setting& setting : At(GetParam(), kTimings))
    FailEveryCollective(setting, WatchedCalls::kAbort);
}

// The other ranks still learn of it: a rank's report counts even if the rank has left.
TEST_P(FaultTest, TheErrorOfARankThatLeavesAfterItsFinishReachesTheOthers) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    for (const WatchedCalls::Fault fault : {WatchedCalls::kRefuse, WatchedCalls::kAbort})
      FailEveryCollective(setting, fault, Trainers::kLeave);
  }
}

TEST_P(FaultTest, EveryCollectiveOfCreateFailsItOnEveryRank) {
  for (const WatchedCalls::Fault fault : {WatchedCalls::kRefuse, WatchedCalls::kAbort}) {
    Updates none;
    const int64_t calls = RunWithFault(GetParam(), kInCreate, int64_t{1} << 40, fault, none).calls;
    ASSERT_GT(calls, 0);
    for (int64_t n = 0; n < calls; ++n) {
      SCOPED_TRACE(::testing::Message()
                   << "call " << n << " of " << calls << ", fault " << static_cast<int>(fault));
      Updates updates;
      const Outcome outcome = RunWithFault(GetParam(), kInCreate, n, fault, updates);
      for (const absl::Status& status : outcome.statuses) EXPECT_THAT(status, Says(kInjected));
      EXPECT_TRUE(updates.seen.empty());
    }
  }
}

// Fails call `number` of the last rank in an evaluation between steps. The status of each rank;
// `calls`: of the last rank in the evaluation.
std::vector<absl::Status> EvaluateWithFault(const Setting& setting, int64_t number,
                                            WatchedCalls::Fault fault, int64_t& calls) {
  std::vector<absl::Status> statuses(static_cast<size_t>(setting.world));
  const ModelSpec model = ScriptedModel();
  std::barrier all_trained(setting.world);
  OnThreads(setting.world, [&](World world) {
    const auto watched = std::make_shared<WatchedCalls>();
    const bool is_culprit = world.rank() == setting.world - 1;
    watched->fault = fault;
    ScriptedTrainer trainer(model, world.rank());
    auto engine = Engine::Create(Watch(world, watched), Device::Cpu(), model, ConfigFor(setting));
    const absl::Status trained = engine.ok() ? TrainStep(*engine, trainer, 0) : engine.status();
    all_trained.arrive_and_wait();  // otherwise the failure may hit the end of another rank's step
    ASSERT_OK(trained);
    const int64_t before = watched->calls;
    if (is_culprit) watched->fail_at = before + number;
    Evaluation evaluation = engine->BeginEvaluation();
    for (int unit : kScriptedUnits) evaluation.Forward(UnitId{unit});
    absl::Status& result = statuses[static_cast<size_t>(world.rank())];
    result = evaluation.Finish().status();
    if (is_culprit) calls = watched->calls - before;
    if (!result.ok()) ExpectSticky(*engine, trainer, result);
  });
  return statuses;
}

TEST_P(FaultTest, ACollectiveOfAnEvaluationThatFailsIsTheEnginesError) {
  for (const WatchedCalls::Fault fault : {WatchedCalls::kRefuse, WatchedCalls::kAbort}) {
    int64_t calls = 0, ignored = 0;
    for (const absl::Status& status : EvaluateWithFault(GetParam(), int64_t{1} << 40, fault, calls))
      ASSERT_OK(status);
    ASSERT_GT(calls, 0);
    for (int64_t n = 0; n < calls; ++n) {
      SCOPED_TRACE(::testing::Message()
                   << "call " << n << " of " << calls << ", fault " << static_cast<int>(fault));
      for (const absl::Status& status : EvaluateWithFault(GetParam(), n, fault, ignored)) {
        EXPECT_THAT(std::string(status.message()),
                    AllOf(StartsWith("the engine has failed: "), HasSubstr(kInjected)));
        // The last is the exchange. The exchange breaks on its stream, where other ranks may still
        // run earlier work.
        if (n + 1 == calls && fault == WatchedCalls::kAbort) {
          EXPECT_THAT(status, Says("in an evaluation, at the "));
        }
      }
    }
  }
}

// A rank that has left, with any scope left open.
TEST_P(FaultTest, ARankThatLeavesInMidStepIsNamed) {
  const int scopes = 2 * kScriptedVisits;
  for (const Setting& setting : At(GetParam(), kTimings)) {
    for (int opened = 0; opened <= scopes; ++opened) {
      SCOPED_TRACE(::testing::Message() << setting << ", after " << opened << " scopes");
      std::vector<absl::Status> statuses(static_cast<size_t>(setting.world));
      const int culprit = setting.world - 1;
      const absl::Status status =
          RunEngines(setting, ScriptedModel(), ConfigFor(setting),
                     [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
                       absl::Status& result = statuses[static_cast<size_t>(trainer.rank())];
                       for (int s = 0; s < 4 && result.ok(); ++s) {
                         trainer.BeginStep(s, nullptr);
                         Step step = engine.BeginStep();
                         const bool leaves = trainer.rank() == culprit && s == 1;
                         for (int scope = 0; scope < (leaves ? opened : scopes); ++scope) {
                           if (scope < kScriptedVisits) {
                             trainer.Forward(step, kScriptedUnits[scope]);
                           } else {
                             trainer.Backward(step, scopes - 1 - scope);
                           }
                         }
                         if (leaves) return absl::OkStatus();
                         result = FinishAndReport(engine, step);
                       }
                       if (!result.ok()) ExpectSticky(engine, trainer, result);
                       return absl::OkStatus();
                     });
      EXPECT_OK(status);
      for (int rank = 0; rank < culprit; ++rank)
        EXPECT_THAT(statuses[static_cast<size_t>(rank)],
                    Says(absl::StrCat("rank ", culprit, " has left")));
    }
  }
}

TEST_P(FaultTest, AnErrorOfOnesOwnOptimizerFailsEveryRank) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    SCOPED_TRACE(::testing::Message() << setting);
    const auto update = [](const UpdateSlice& slice) {
      return slice.step == 2 && slice.slice.name == "w3" ? absl::DataLossError(kInjected)
                                                         : absl::OkStatus();
    };
    std::vector<absl::Status> statuses(static_cast<size_t>(setting.world));
    const absl::Status status =
        RunEngines(setting, ScriptedModel(), ConfigFor(setting),
                   [&](Engine& engine, ScriptedTrainer& trainer) {
                     absl::Status& result = statuses[static_cast<size_t>(trainer.rank())];
                     for (int s = 0; s < 4 && result.ok(); ++s) {
                       trainer.BeginStep(s, nullptr);
                       Step step = engine.BeginStep();
                       trainer.Round(step);
                       result = FinishAndReport(engine, step);
                     }
                     if (!result.ok()) ExpectSticky(engine, trainer, result);
                     return absl::OkStatus();
                   },
                   {.optimizer = OptimizerSpec{.states = {}, .update = update}});
    EXPECT_OK(status);
    for (const absl::Status& rank : statuses) {
      EXPECT_THAT(rank, Says("its optimizer, in unit 'u3'"));
      EXPECT_THAT(rank, Says(kInjected));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cells, FaultTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 3, .stage = 0})), NameOf);

}  // namespace
}  // namespace ebb::testing::fault_test
