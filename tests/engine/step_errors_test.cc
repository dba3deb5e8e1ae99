#include "ebb/runtime/engine/step_errors.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace ebb::step_errors_test {
namespace {

const absl::Status kOwn = absl::InvalidArgumentError("own"), kOther = absl::AbortedError("other"),
                   kFailure = absl::DataLossError("failure");

TEST(StepErrorsTest, TheFirstFailureIsTheCause) {
  StepErrors errors;
  EXPECT_FALSE(errors.has_failed());
  EXPECT_TRUE(errors.Report().ok());
  errors.Fail(absl::OkStatus());
  EXPECT_FALSE(errors.has_failed());
  errors.Fail(kFailure);
  errors.Fail(absl::InternalError("in its wake"));
  EXPECT_TRUE(errors.has_failed());
  EXPECT_EQ(errors.failure(), kFailure);
  EXPECT_EQ(errors.Report(), kFailure);
  EXPECT_EQ(errors.Report(), kFailure) << "every call returns it";
}

TEST(StepErrorsTest, AFailureIsUnreportedUntilACallReturnsIt) {
  StepErrors errors;
  EXPECT_TRUE(errors.Report().ok());
  EXPECT_TRUE(errors.UnreportedFailure().ok());
  errors.Fail(kFailure);
  EXPECT_EQ(errors.UnreportedFailure(), kFailure);
  EXPECT_EQ(errors.Peek(), kFailure);
  EXPECT_EQ(errors.UnreportedFailure(), kFailure) << "Peek does not report";
  EXPECT_EQ(errors.Report(), kFailure);
  EXPECT_TRUE(errors.UnreportedFailure().ok());
}

TEST(StepErrorsTest, TheFirstErrorOfAStepSticksAndEndsWithIt) {
  StepErrors errors;
  errors.Note(kOther);
  EXPECT_TRUE(errors.Peek().ok()) << "no step is open";
  errors.Open(1);
  EXPECT_FALSE(errors.blocked(1));
  errors.Note(absl::OkStatus());
  EXPECT_FALSE(errors.blocked(1));
  errors.Note(kOwn);
  errors.Note(kOther);
  EXPECT_TRUE(errors.blocked(1));
  EXPECT_FALSE(errors.blocked(0));
  EXPECT_EQ(errors.Peek(), kOwn);
  EXPECT_EQ(errors.Report(), kOwn);
  EXPECT_EQ(errors.Report(), kOwn) << "as by Reduce and by Finish";
  errors.Close();
  EXPECT_TRUE(errors.Report().ok());
  EXPECT_TRUE(errors.blocked(1)) << "its early updates may still be in the queue";
  errors.Open(1);
  EXPECT_FALSE(errors.blocked(1));
  EXPECT_TRUE(errors.Peek().ok());
}

TEST(StepErrorsTest, AnEvaluationBlocksNoUpdate) {
  StepErrors errors;
  errors.Open(StepErrors::kEvaluation);
  errors.Note(kOwn);
  EXPECT_FALSE(errors.blocked(0));
  EXPECT_FALSE(errors.blocked(1));
  EXPECT_EQ(errors.Report(), kOwn);
}

TEST(StepErrorsTest, TheErrorOfAStepWithAVerdictIsReturnedOnceAndFailsEveryStepUntilThen) {
  StepErrors errors;
  const int64_t first = errors.NextExchange(), second = errors.NextExchange();
  EXPECT_EQ(second, first + 1);
  errors.NoteJudged(kOther, first);
  errors.NoteJudged(kOwn, second);
  EXPECT_TRUE(errors.has_unreported());
  EXPECT_EQ(errors.Peek(), kOther) << "the oldest";
  EXPECT_LT(errors.known_exchange(), first);
  errors.Open(0);
  EXPECT_TRUE(errors.blocked(0));
  EXPECT_EQ(errors.Report(), kOther);
  EXPECT_FALSE(errors.has_unreported());
  EXPECT_EQ(errors.known_exchange(), second) << "with all that was exchanged by then";
  EXPECT_EQ(errors.Report(), kOther) << "the error of the step that is open";
  errors.Close();
  EXPECT_TRUE(errors.Report().ok());
  errors.NoteJudged(kOwn, second);
  EXPECT_TRUE(errors.Report().ok()) << "the caller knows";
}

TEST(StepErrorsTest, AnErrorReceivedWithinAStepIsAlsoTheErrorOfTheStep) {
  StepErrors errors;
  const int64_t exchange = errors.NextExchange();
  errors.Open(0);
  errors.NoteJudged(kOther, exchange);
  EXPECT_TRUE(errors.blocked(0));
  EXPECT_EQ(errors.Report(), kOther);
  EXPECT_EQ(errors.Report(), kOther);
}

TEST(StepErrorsTest, AnErrorKnownBeforeAFailureIsReturnedBeforeIt) {
  StepErrors errors;
  errors.NoteJudged(kOther, errors.NextExchange());
  errors.Fail(kFailure);
  EXPECT_EQ(errors.Report(), kOther);
  EXPECT_EQ(errors.UnreportedFailure(), kFailure);
  EXPECT_EQ(errors.Report(), kFailure);
  EXPECT_TRUE(errors.UnreportedFailure().ok());
}

TEST(StepErrorsTest, OneOfManyThreadsFailsFirst) {
  StepErrors errors;
  constexpr int kThreads = 8;
  std::vector<std::thread> threads;
  std::vector<absl::Status> seen(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      errors.Fail(absl::AbortedError(std::to_string(i)));
      seen[static_cast<size_t>(i)] = errors.Peek();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : seen) EXPECT_EQ(status, errors.failure());
}

}  // namespace
}  // namespace ebb::step_errors_test
