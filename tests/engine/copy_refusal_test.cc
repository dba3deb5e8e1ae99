// What CopyParametersFrom refuses, before anything is copied, and failures on the way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>

#include "absl/strings/match.h"
#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/copy_side.h"
#include "tests/engine/snapshot.h"
#include "tests/engine/watched_world.h"

namespace ebb::testing::copy_refusal_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Runs `copy` with two engines on every rank; each rank's status, and the destination's masters are
// those from before.
std::vector<absl::Status> Refused(
    const Side& from, const Side& to,
    const std::function<absl::Status(Engine& destination, Engine& source, int rank)>& copy) {
  const int world = from.setting.world;
  std::vector<absl::Status> statuses(static_cast<size_t>(world));
  const absl::Status run = RunThreads(world, [&](World w) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine source, from.Create(w, "source"));
    EBB_ASSIGN_OR_RETURN(Engine destination, to.Create(w, "destination"));
    EBB_ASSIGN_OR_RETURN(const Snapshot before, TakeSnapshot(destination, to.model));
    EBB_RETURN_IF_ERROR(source.Write(StateClass::kMaster, Constant(5)));
    statuses[static_cast<size_t>(w.rank())] = copy(destination, source, w.rank());
    EBB_ASSIGN_OR_RETURN(const Snapshot after, TakeSnapshot(destination, to.model));
    EXPECT_EQ(before, after);
    return Train(destination, to.model, w.rank());  // and it works on
  });
  EXPECT_TRUE(run.ok()) << run;
  return statuses;
}

const Side kPlain{.model = ScriptedModel(), .setting = {.world = 2, .stage = 3}};

absl::Status Copy(Engine& destination, Engine& source, int) {
  return destination.CopyParametersFrom(source);
}

TEST(CopyRefusal, AMissingNameIsRefusedBeforeAnythingIsCopied) {
  Side to = kPlain;
  to.model.Add(UnitId{4}, {.name = "head", .shape = {40}, .init = Constant(1)});
  for (const absl::Status& status : Refused(kPlain, to, Copy)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("'head'"));
  }
}

TEST(CopyRefusal, AnotherShapeIsRefused) {
  Side to = kPlain;
  to.model.parameters[2].shape = {10, 13};
  for (const absl::Status& status : Refused(kPlain, to, Copy)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("'w1'"), HasSubstr("[13, 10]")));
  }
}

TEST(CopyRefusal, FromItselfIsRefused) {
  for (const absl::Status& status : Refused(kPlain, kPlain, [](Engine&destination, Engine&, int) {
         return destination.CopyParametersFrom(destination);
       })) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("itself"));
  }
}

TEST(CopyRefusal, NotWhileTheDestinationIsInAStep) {
  for (const absl::Status& status :
       Refused(kPlain, kPlain, [](Engine&destination, Engine&source, int) {
         const Step step = destination.BeginStep({.hold_updates = true});
         return destination.CopyParametersFrom(source);
       })) {
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("'destination'"), HasSubstr("alive")));
  }
}

TEST(CopyRefusal, NotWhileTheSourceIsInAnEvaluation) {
  for (const absl::Status& status :
       Refused(kPlain, kPlain, [](Engine&destination, Engine&source, int) {
         const Evaluation evaluation = source.BeginEvaluation();
         return destination.CopyParametersFrom(source);
       })) {
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("'source'"), HasSubstr("alive")));
  }
}

// A rank alone sees the error, and every rank has it.
TEST(CopyRefusal, AnErrorOfOneRankIsEveryRanks) {
  Side whole = kPlain;
  whole.setting.stage = 0;  // its evaluations begin without a gather
  const std::vector<absl::Status> statuses =
      Refused(whole, kPlain, [](Engine& destination, Engine& source, int rank) {
        // Written values spread over the ranks when the first scope opens, which is collective.
        EBB_RETURN_IF_ERROR(source.BeginEvaluation().Finish().status());
        Evaluation evaluation = source.BeginEvaluation();
        if (rank == 0) evaluation = {};
        return destination.CopyParametersFrom(source);
      });
  EXPECT_THAT(std::string(statuses[0].message()), AllOf(HasSubstr("rank 1"), HasSubstr("alive")));
  EXPECT_THAT(std::string(statuses[1].message()), HasSubstr("alive"));
}

// Any one collective fails on one rank: all ranks have the error, and the destination's values are
// the old ones or all the new ones, unless it says that it has failed.
TEST(CopyRefusal, AFailureOnTheWayIsEveryRanks) {
  Side to = kPlain;
  to.setting.stage = 2;
  to.shard_group =
      1;  // so that half of everything is sent, and parameters that are kept whole follow
  for (const WatchedCalls::Fault fault : {WatchedCalls::kRefuse, WatchedCalls::kAbort}) {
    bool failed = true;
    int64_t call = 0;
    std::atomic<int> in_the_middle{0};
    for (; failed; ++call) {
      SCOPED_TRACE(::testing::Message() << "call " << call << ", fault " << int{fault});
      ASSERT_LT(call, 100);
      std::vector<absl::Status> statuses(2);
      const absl::Status run = RunThreads(2, [&](World world) -> absl::Status {
        auto calls = std::make_shared<WatchedCalls>();
        calls->fault = fault;
        const World watched = Watch(world, calls);
        EBB_ASSIGN_OR_RETURN(Engine source, kPlain.Create(watched, "source"));
        EBB_ASSIGN_OR_RETURN(Engine destination, to.Create(watched, "destination"));
        EBB_RETURN_IF_ERROR(source.Write(StateClass::kMaster, Constant(5)));
        if (world.rank() == 1) calls->fail_at = calls->calls + call;
        absl::Status& status = statuses[static_cast<size_t>(world.rank())];
        status = destination.CopyParametersFrom(source);
        calls->fail_at = -1;
        const bool ended = absl::StrContains(status.message(), "ended in the middle");
        in_the_middle += ended;
        if (ended) {
          EXPECT_EQ(destination.BeginStep().Finish(), status);
          return absl::OkStatus();
        }
        return destination.Read(StateClass::kMaster,
                                [&](const Slice& slice, std::span<const float> values) {
                                  for (const float value : values)
                                    EXPECT_EQ(value == 5, status.ok()) << slice.name;
                                  return absl::OkStatus();
                                });
      });
      // A destination that failed before anything was copied cannot be read either.
      if (!run.ok()) {
        EXPECT_THAT(std::string(run.message()), HasSubstr(kInjected));
      }
      EXPECT_EQ(statuses[0].ok(), statuses[1].ok()) << statuses[0] << "\n" << statuses[1];
      failed = !statuses[1].ok();
      if (!failed) continue;
      for (const absl::Status& status : statuses)
        EXPECT_THAT(std::string(status.message()), HasSubstr(kInjected));
    }
    EXPECT_GT(call, 8);
    EXPECT_GT(in_the_middle, 0);
  }
}

TEST(CopyRefusal, EnginesOfDifferentWorldsAreRefused) {
  const Side side{.model = ScriptedModel(), .setting = {.world = 1}};
  absl::StatusOr<Engine> source = side.Create(World::Single(), "source");
  absl::StatusOr<Engine> destination = side.Create(World::Single(), "destination");
  ASSERT_TRUE(source.ok() && destination.ok());
  const absl::Status status = destination->CopyParametersFrom(*source);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("different worlds"));
}

}  // namespace
}  // namespace ebb::testing::copy_refusal_test
