// Outcomes of steps, on ranks that a script plays.
#include "ebb/runtime/engine/outcome/step_outcome.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/engine/scripted_ranks.h"
#include "tests/status.h"

namespace ebb::testing::step_outcome_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using State = StepOutcome::State;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const absl::Status kMistake = absl::InvalidArgumentError("a mistake");

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

TEST(StepOutcomeTest, ASlotIsFreeAgainOnceItsVerdictWasTakenOrItsStepDropped) {
  Ranks ranks(2);
  for (const int r : {0, 1}) ranks.Enqueue(r, {});
  const int first = ranks.at(0).parity;
  EXPECT_EQ(ranks[0].state(1 - first), State::kFree);
  for (const int r : {0, 1}) EXPECT_OK(ranks[r].Finish());
  EXPECT_EQ(ranks[0].state(first), State::kSealed) << "Finish waits for nothing";
  EXPECT_EQ(ranks[0].last_parity(), first);
  ranks.Run();
  EXPECT_EQ(ranks[0].state(first), State::kJudged);
  EXPECT_EQ(ranks[0].finished_steps(), 1);
  EXPECT_OK(ranks[0].Report());
  EXPECT_EQ(ranks[0].state(first), State::kFree);
  EXPECT_EQ(ranks[0].finished_steps(), 1);
  // Rank 1 does not look before its second step from there.
  for (const int r : {0, 1}) ranks.Enqueue(r, {});
  EXPECT_EQ(ranks.at(1).parity, 1 - first);
  EXPECT_EQ(ranks[1].state(first), State::kJudged);
  EXPECT_EQ(ranks[1].finished_steps(), 1) << "the open one does not count";
  for (const int r : {0, 1}) EXPECT_OK(ranks[r].Finish());
  EXPECT_EQ(ranks[1].finished_steps(), 2);
  EXPECT_EQ(ranks[1].Begin(/*evaluation=*/false), first);
  EXPECT_EQ(ranks[1].state(first), State::kBegun);
  EXPECT_NE(ranks[1].state(1 - first), State::kFree) << "that verdict may stay open";
  ranks[1].Drop();
  EXPECT_EQ(ranks[1].state(first), State::kFree);
  EXPECT_FALSE(ranks.at(1).errors.has_failed());
  EXPECT_EQ(ranks[1].Begin(/*evaluation=*/true), ControlBlock::kEvaluation) << "takes all verdicts";
  EXPECT_EQ(ranks[1].state(1 - first), State::kFree);
}

// Whether the streams run as soon as all is enqueued, once Finish has returned, or when a rank
// waits.
enum class StreamsRun { kAtOnce, kAfterFinish, kWhenAwaited };

struct Case {
  StreamsRun streams{};
  bool early = false;
  int culprit = 0;
  int looks = 0;  // bit 3 s + r: rank r asks for the report after step s
};

constexpr int kRanks = 3, kSteps = 4, kFaulty = 0;

// The faulty step comes first. A rank learns of it by Finish or by Report. A step is applied or not
// depending on the errors that every rank knows at its end.
void RunCase(const Case& of) {
  Ranks ranks(kRanks);
  std::vector<bool> knows(kRanks, false);
  std::vector<int> reports(kRanks, 0);
  const auto tell = [&](int r, const absl::Status& status) {
    if (status.ok()) return;
    EXPECT_THAT(Text(status),
                HasSubstr(r == of.culprit ? "a mistake"
                                          : absl::StrCat("rank ", of.culprit, ": a mistake")));
    knows[static_cast<size_t>(r)] = true;
    ++reports[static_cast<size_t>(r)];
  };
  int64_t applied = 0;
  bool all_knew_before = false;  // as the step before was exchanged
  for (int step = 0; step < kSteps; ++step) {
    for (int r = 0; r < kRanks; ++r) {
      const bool mistaken = step == kFaulty && r == of.culprit;
      ranks.Enqueue(r, {.error = mistaken ? kMistake : absl::OkStatus(), .early = of.early});
    }
    const bool all_know = std::all_of(knows.begin(), knows.end(), [](bool each) { return each; });
    if (of.streams == StreamsRun::kAtOnce) ranks.Run();
    for (int r = 0; r < kRanks; ++r) tell(r, ranks[r].Finish());
    if (of.streams == StreamsRun::kAfterFinish) ranks.Run();
    if (step != kFaulty && (of.early ? all_knew_before : all_know)) ++applied;
    all_knew_before = all_know;
    for (int r = 0; r < kRanks; ++r)
      if ((of.looks >> (kRanks * step + r)) % 2 == 1) tell(r, ranks[r].Report().status());
  }
  for (int r = 0; r < kRanks; ++r) {
    tell(r, ranks[r].Report().status());
    EXPECT_EQ(ranks[r].training_state().applied_steps, applied) << "rank " << r;
    EXPECT_EQ(ranks[r].training_state().finished_steps, applied) << "rank " << r;
    EXPECT_GE(reports[static_cast<size_t>(r)], 1) << "rank " << r << " was not told";
    EXPECT_FALSE(ranks.at(r).errors.has_failed());
  }
  // Once all know the engine goes on.
  const int more = of.early ? 2 : 1;
  for (int step = 0; step < more; ++step) ranks.Train({.early = of.early});
  for (int r = 0; r < kRanks; ++r) {
    ASSERT_OK_AND_ASSIGN(const StepReport report, ranks[r].Report());
    EXPECT_GT(report.step, applied);
  }
}

TEST(StepOutcomeTest, NoStepIsAppliedUntilEveryCallerKnowsOfAnError) {
  for (const StreamsRun streams :
       {StreamsRun::kAtOnce, StreamsRun::kAfterFinish, StreamsRun::kWhenAwaited}) {
    for (const bool early : {false, true}) {
      for (int culprit = 0; culprit < kRanks; ++culprit) {
        for (int looks = 0; looks < 1 << (kRanks * (kSteps - 1)); ++looks) {
          SCOPED_TRACE(absl::StrCat("streams ", static_cast<int>(streams), ", early ", early,
                                    ", culprit ", culprit, ", looks ", looks));
          RunCase({.streams = streams, .early = early, .culprit = culprit, .looks = looks});
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(StepOutcomeTest, AFinishThatWaitsReturnsTheVerdictAndHoldsNoErrorBack) {
  for (const bool early : {false, true}) {
    Ranks ranks(2);
    const std::vector<absl::Status> finished =
        ranks.Train({.waits = true, .early = early}, /*odd=*/1,
                    {.error = kMistake, .waits = true, .early = early});
    EXPECT_EQ(finished[1], kMistake);
    EXPECT_EQ(Text(finished[0]), "rank 1: a mistake");
    for (const absl::Status& status : ranks.Train({.waits = true, .early = early}))
      EXPECT_OK(status);
    EXPECT_EQ(ranks[0].Report()->step, 1);
  }
}

TEST(StepOutcomeTest, AnErrorThatAllRanksReturnHoldsNothingBack) {
  Ranks ranks(2);
  for (const absl::Status& status : ranks.Train({.error = kMistake})) EXPECT_EQ(status, kMistake);
  for (const absl::Status& status : ranks.Train()) EXPECT_OK(status);
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks[r].Report()->step, 1);
}

TEST(StepOutcomeTest, TheErrorOfTheLastStepStaysItsReportUntilAStepGoesWell) {
  Ranks ranks(2);
  ranks.Train({}, /*odd=*/1, {.error = kMistake});
  for (int times = 0; times < 3; ++times) {
    EXPECT_EQ(Text(ranks[0].Report().status()), "rank 1: a mistake");
    EXPECT_EQ(ranks[1].Report().status(), kMistake);
  }
  EXPECT_FALSE(ranks.at(0).peers.updates_awaited);
  ranks.Train();
  EXPECT_OK(ranks[0].Report());
}

TEST(StepOutcomeTest, AReportWithinAStepLeavesItsOwnErrorToItsFinish) {
  Ranks ranks(1);
  ranks.Train();
  ranks[0].Begin(/*evaluation=*/false);
  ranks.at(0).errors.Note(kMistake);
  ASSERT_OK_AND_ASSIGN(const StepReport report, ranks[0].Report());
  EXPECT_EQ(report.step, 1);
}

constexpr int kForwardA = sharding::ScopeCode(sharding::ScopeKind::kForward, 0),
              kForwardB = sharding::ScopeCode(sharding::ScopeKind::kForward, 1),
              kBackwardB = sharding::ScopeCode(sharding::ScopeKind::kBackward, 1);

TEST(StepOutcomeTest, WhereFinishWaitsOrInEvaluationsTheLogsAreCompared) {
  for (const bool evaluation : {false, true}) {
    Ranks ranks(2);
    for (int r = 0; r < 2; ++r) {
      ranks.at(r).peers.logs = {{1, 1, 0, 0, 0, kForwardB}, {1, 1, 0, 0, 0, kBackwardB}};
      ranks.Enqueue(r, {.waits = true, .opened = {r == 0 ? kForwardB : kBackwardB}}, evaluation);
    }
    for (int r = 0; r < 2; ++r) {
      const absl::Status status =
          evaluation ? ranks[r].FinishEvaluation().status() : ranks[r].Finish();
      EXPECT_THAT(Text(status), AllOf(HasSubstr("Forward('b')"), HasSubstr("Backward('b')")));
      EXPECT_EQ(ranks.at(r).peers.logs_asked, 1);
    }
  }
}

TEST(StepOutcomeTest, AnErrorNotedAfterTheExchangeFailsTheEngine) {
  Ranks ranks(2);
  for (const int r : {0, 1}) ranks.Enqueue(r, {});
  ranks.Run();
  ranks.at(1).errors.Note(kMistake);
  EXPECT_OK(ranks[0].Finish());
  EXPECT_FALSE(ranks[1].Finish().ok());
  EXPECT_TRUE(ranks[0].Report().ok()) << "it was applied on every rank";
  EXPECT_EQ(Text(ranks[1].Report().status()), "the engine has failed: a mistake");
  EXPECT_EQ(Text(ranks.at(1).peers.aborted), "the engine has failed: a mistake");
}

TEST(StepOutcomeTest, ALostConnectionBeforeTheRecordsFailsTheEngineOnAllRanks) {
  Ranks ranks(2);
  for (const int r : {0, 1}) ranks.Enqueue(r, {.error = r == 1 ? kMistake : absl::OkStatus()});
  ranks.at(1).peers.broken = absl::UnavailableError("the line was cut");
  EXPECT_OK(ranks[0].Finish());
  for (const int r : {0, 1}) {
    EXPECT_THAT(Text(ranks[r].Report().status()),
                AllOf(HasSubstr("the engine has failed"), HasSubstr("a mistake")));
    EXPECT_TRUE(ranks.at(r).errors.has_failed());
  }
}

TEST(StepOutcomeTest, AFailureAfterTheExchangeReachesWaitingRanks) {
  Ranks ranks(2);
  ranks.Train();
  ranks.Run();
  const absl::Status disk = absl::DataLossError("the disk");
  ranks.at(1).errors.Fail(disk);
  EXPECT_EQ(ranks[1].Report().status(), disk);
  EXPECT_EQ(ranks.at(1).peers.aborted, disk);
  EXPECT_EQ(ranks.at(1).peers.withdrawn, disk);
  EXPECT_OK(ranks[0].Report());
}

TEST(StepOutcomeTest, ABrokenCommunicatorIsTheEnginesFailureAndSaysWhere) {
  for (const bool in_finish : {false, true}) {
    Ranks ranks(1);
    const absl::Status gone = absl::UnavailableError("rank 1 has gone");
    ranks.Enqueue(0, {.exchanged = gone});
    if (in_finish) ranks.at(0).peers.broken = gone;
    const absl::Status finished = ranks[0].Finish();
    EXPECT_EQ(finished.ok(), !in_finish) << "known by then, or not";
    ranks.at(0).peers.broken = gone;
    const absl::Status reported = ranks[0].Report().status();
    EXPECT_THAT(Text(reported),
                AllOf(HasSubstr("the engine has failed: in step 1, at the gather of unit 'a'"),
                      HasSubstr("rank 1 has gone")));
    if (in_finish) {
      EXPECT_EQ(finished, reported);
    }
    EXPECT_EQ(ranks.at(0).peers.aborted, gone);
    EXPECT_EQ(ranks.at(0).peers.logs_asked, 0) << "ranks have not gone apart";
  }
}

// A record sent before its rank left counts, and a later break fails the next step.
TEST(StepOutcomeTest, AStepIsValidOnceAllRecordsArrived) {
  Ranks ranks(2);
  ranks.Train();
  ranks.Run();
  ranks.at(0).peers.broken = absl::UnavailableError("rank 1 has gone");
  ASSERT_OK_AND_ASSIGN(const StepReport report, ranks[0].Report());
  EXPECT_EQ(report.step, 1);
  ranks.at(0).peers.device = absl::InternalError("the device is lost");
}

// Whether their collectives did not fit or one waited out the time-out for another.
TEST(StepOutcomeTest, RanksWithDifferentScopesNameTheDifference) {
  const std::pair<std::vector<int64_t>, std::vector<std::string>> others[] = {
      {{1, 1, 0, 0, 0}, {"Forward('b')", "rank 1 nothing more"}},
      {{1, 1, 0, 0, 1, kForwardB}, {"hold_updates", "0 on rank 0, 1 on rank 1"}}};
  for (const absl::Status& apart : {absl::FailedPreconditionError("collectives do not fit"),
                                    absl::DeadlineExceededError("waited out")}) {
    for (const auto& [other, says] : others) {
      Ranks ranks(2);
      for (int r = 0; r < 2; ++r) {
        ranks.Enqueue(r, {.exchanged = apart});
        ranks.at(r).peers.logs = {{1, 1, 0, 0, 0, kForwardB}, other};
        EXPECT_OK(ranks[r].Finish());
        ranks.at(r).peers.broken = apart;
        EXPECT_THAT(
            Text(ranks[r].Report().status()),
            AllOf(HasSubstr("the engine has failed"), HasSubstr(says[0]), HasSubstr(says[1])));
      }
    }
  }
}

TEST(StepOutcomeTest, AnErrorAfterEarlyUpdatesHaveStartedFailsTheEngine) {
  for (const bool blocked : {false, true}) {
    Ranks ranks(2);
    const RankScript well{.early = true, .starts_early = !blocked};
    ranks.Train(well, /*odd=*/1, {.error = kMistake, .early = true, .starts_early = true});
    for (int r = 0; r < 2; ++r) {
      const absl::Status status = ranks[r].Report().status();
      EXPECT_THAT(Text(status), HasSubstr("a mistake"));
      EXPECT_EQ(ranks.at(r).errors.has_failed(), !blocked) << status;
      if (!blocked) {
        EXPECT_THAT(Text(status), HasSubstr("parts of the step were updated"));
      }
    }
  }
}

TEST(StepOutcomeTest, AStepThatIsDroppedAfterItsEarlyUpdatesHaveStartedFailsTheEngine) {
  for (const bool started : {false, true}) {
    Ranks ranks(1);
    const int parity = ranks[0].Begin(/*evaluation=*/false);
    ranks[0].Prepare(parity, std::nullopt);
    if (started) ranks[0].StartEarlyUpdate();
    ranks[0].Drop();
    EXPECT_EQ(ranks.at(0).errors.has_failed(), started);
  }
}

TEST(StepOutcomeTest, AnEvaluationReturnsTheErrorOfAStepThatNoCallHasReturned) {
  Ranks ranks(2);
  ranks.Train({}, /*odd=*/1, {.error = kMistake});
  for (int r = 0; r < 2; ++r) ranks.Enqueue(r, {}, /*evaluation=*/true);
  for (int r = 0; r < 2; ++r)
    EXPECT_THAT(Text(ranks[r].FinishEvaluation().status()), HasSubstr("a mistake"));
  for (int r = 0; r < 2; ++r) ranks.Enqueue(r, {}, /*evaluation=*/true);
  for (int r = 0; r < 2; ++r) EXPECT_OK(ranks[r].FinishEvaluation());
}

TEST(StepOutcomeTest, CallsOfAllRanksOutsideOfStepsHaveTheErrorsOfAll) {
  Ranks ranks(1);
  Rank& rank = ranks.at(0);
  const std::vector<int64_t> log = {1, 1};
  EXPECT_OK(ranks[0].ErrorOfCall(log, {}));
  Verdict other;
  other.error = kMistake;
  EXPECT_EQ(ranks[0].ErrorOfCall(log, other), kMistake);
  EXPECT_OK(ranks[0].ErrorOfCall(log, {}));
  rank.errors.Fail(absl::DataLossError("the disk"));
  EXPECT_EQ(ranks[0].ErrorOfCall(log, {}), absl::DataLossError("the disk"));
  EXPECT_EQ(rank.peers.withdrawn, absl::DataLossError("the disk"));
}

// The log of an engine that goes away.
TEST(StepOutcomeTest, AnErrorThatNoCallHasReturnedIsLoggedInTheEnd) {
  for (const bool asked : {false, true}) {
    ::testing::internal::CaptureStderr();
    {
      Ranks ranks(2);
      ranks.Train({}, /*odd=*/1, {.error = kMistake});
      ranks.Run();
      if (asked) ranks[0].Report().IgnoreError();
    }
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(log.find("and Report was not called") != std::string::npos, !asked) << log;
  }
}

}  // namespace
}  // namespace ebb::testing::step_outcome_test
