#include "ebb/runtime/comm/call_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

namespace ebb::call_order_test {
namespace {

using ::testing::HasSubstr;

// The ranks of a world that share memory, each with its CallOrder.
class CallOrderTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;

  CallOrderTest() : records_(std::make_unique<CallRecord[]>(kRanks)) {
    std::vector<CallRecord*> records;
    for (int rank = 0; rank < kRanks; ++rank)
      records.push_back(&records_[static_cast<size_t>(rank)]);
    for (int rank = 0; rank < kRanks; ++rank) {
      orders_.push_back(std::make_unique<CallOrder>(rank, records));
      orders_.back()->AddEngine("policy");
      orders_.back()->AddEngine("other");
    }
  }
  absl::Status Note(int rank, CallKind kind, int engine = 0) {
    return orders_[static_cast<size_t>(rank)]->Note({.kind = kind, .engine = engine});
  }
  void Fail(int rank, int engine = 0, bool in_call = true) {
    orders_[static_cast<size_t>(rank)]->NoteError(engine, in_call);
  }
  const CallOrder& order(int rank) const { return *orders_[static_cast<size_t>(rank)]; }
  static std::string Text(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    return std::string(status.message());
  }

  std::unique_ptr<CallRecord[]> records_;
  std::vector<std::unique_ptr<CallOrder>> orders_;
};

TEST_F(CallOrderTest, TheSecondOfTwoDifferentCallsIsAnError) {
  EXPECT_TRUE(Note(0, CallKind::kStep).ok());
  EXPECT_TRUE(Note(1, CallKind::kStep).ok());
  EXPECT_EQ(Text(Note(2, CallKind::kEvaluation)),
            "ranks do different things with the engine 'policy': rank 2 began an evaluation where "
            "rank 0 began a step. Every rank has to make the same calls in the same order");
}

TEST_F(CallOrderTest, RankZeroComparesWithAllThatCameBefore) {
  EXPECT_TRUE(Note(1, CallKind::kStep).ok());
  EXPECT_TRUE(Note(2, CallKind::kGather).ok()) << "compared with rank 0 only, which has not come";
  EXPECT_THAT(Text(order(1).Check()),
              HasSubstr("rank 2 gathered a parameter where rank 1 began a step"));
  EXPECT_THAT(Text(Note(0, CallKind::kStep)),
              HasSubstr("rank 2 gathered a parameter where rank 0 began a step"));
}

TEST_F(CallOrderTest, EnginesInDifferentOrdersAreNamed) {
  EXPECT_TRUE(Note(0, CallKind::kStep, 0).ok());
  EXPECT_THAT(
      Text(Note(1, CallKind::kStep, 1)),
      HasSubstr("ranks do different things: rank 1 began a step of the engine 'other' where "
                "rank 0 began a step of the engine 'policy'"));
}

TEST_F(CallOrderTest, SuspendResumeAndCopyMayMeetEachOther) {
  EXPECT_TRUE(Note(0, CallKind::kSuspend).ok());
  EXPECT_TRUE(Note(1, CallKind::kResume).ok());
  EXPECT_TRUE(Note(2, CallKind::kCopy).ok());
  EXPECT_TRUE(Note(0, CallKind::kSuspend, 0).ok());
  EXPECT_FALSE(Note(1, CallKind::kSuspend, 1).ok()) << "of another engine";
}

TEST_F(CallOrderTest, ARankMayBeAheadOrBehind) {
  for (int call = 0; call < 3; ++call) EXPECT_TRUE(Note(0, CallKind::kStep).ok());
  EXPECT_TRUE(Note(1, CallKind::kStep).ok());
  EXPECT_TRUE(order(2).Check().ok());
  EXPECT_TRUE(order(0).IsBehind(1));
  EXPECT_FALSE(order(1).IsBehind(0));
}

TEST_F(CallOrderTest, CallsThatHaveLeftTheRecordAreNotCompared) {
  for (uint64_t call = 0; call < 3 * CallRecord::kKept; ++call)
    EXPECT_TRUE(Note(0, CallKind::kStep).ok());
  EXPECT_TRUE(Note(1, CallKind::kEvaluation).ok());
  EXPECT_TRUE(order(1).Check().ok());
}

// Some ranks learn of a failure a step later than others.
TEST_F(CallOrderTest, AfterAnErrorOfOneRankItsCallsAreNotCompared) {
  Fail(0);
  EXPECT_TRUE(Note(0, CallKind::kCreate).ok());
  EXPECT_TRUE(Note(1, CallKind::kStep).ok());
  EXPECT_TRUE(order(2).Check().ok());
  EXPECT_EQ(order(1).Describe(0), "");
  EXPECT_FALSE(order(0).IsBehind(1));
}

TEST_F(CallOrderTest, ACallBeforeAnErrorIsNotComparedAfterIt) {
  EXPECT_TRUE(Note(0, CallKind::kStep).ok());
  Fail(0);
  EXPECT_TRUE(Note(1, CallKind::kEvaluation).ok());
  EXPECT_TRUE(order(2).Check().ok());
}

TEST_F(CallOrderTest, RanksAreComparedAgainAfterErrorsOfTheSameCall) {
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_TRUE(Note(rank, CallKind::kFinish).ok());
  for (const int rank : {0, 0, 1}) Fail(rank);  // rank 0 returns its error twice
  EXPECT_TRUE(Note(0, CallKind::kStep).ok());
  EXPECT_TRUE(Note(2, CallKind::kStep).ok()) << "which has had none";
  EXPECT_EQ(Text(Note(1, CallKind::kEvaluation)),
            "ranks do different things with the engine 'policy': rank 1 began an evaluation where "
            "rank 0 began a step. Every rank has to make the same calls in the same order");
}

// Rank 0 makes its new engine while rank 1 is in a step that is dropped.
TEST_F(CallOrderTest, RanksWithErrorsOfDifferentCallsAreNotCompared) {
  for (const int rank : {0, 1}) EXPECT_TRUE(Note(rank, CallKind::kFinish).ok());
  Fail(0);
  EXPECT_TRUE(Note(0, CallKind::kCreate).ok());
  EXPECT_TRUE(Note(1, CallKind::kStep).ok());
  Fail(1);
  for (const CallKind kind : {CallKind::kStep, CallKind::kFinish, CallKind::kStep})
    EXPECT_TRUE(Note(0, kind).ok());
  for (const CallKind kind : {CallKind::kCreate, CallKind::kStep, CallKind::kFinish})
    EXPECT_TRUE(Note(1, kind).ok());
  EXPECT_TRUE(order(2).Check().ok());
}

// On a GPU rank 0 knows of its own error in Finish. Rank 1 learns of the error when it asks for the
// report.
TEST_F(CallOrderTest, ARankThatOnlyAsksForAnErrorIsNotCompared) {
  for (const int rank : {0, 1}) EXPECT_TRUE(Note(rank, CallKind::kFinish).ok());
  Fail(0);
  Fail(0, /*engine=*/0, /*in_call=*/false);  // the report returns the same error
  Fail(1, /*engine=*/0, /*in_call=*/false);
  EXPECT_TRUE(Note(0, CallKind::kCreate).ok());
  EXPECT_TRUE(Note(1, CallKind::kStep).ok());
}

TEST_F(CallOrderTest, ErrorsOfDifferentEnginesDiffer) {
  Fail(0, /*engine=*/0);
  Fail(1, /*engine=*/1);
  EXPECT_TRUE(Note(0, CallKind::kCreate).ok());
  EXPECT_TRUE(Note(1, CallKind::kStep).ok());
  Fail(0, 1);
  Fail(1, 0);
  EXPECT_TRUE(order(2).Check().ok()) << "of calls made before";
}

TEST_F(CallOrderTest, SaysWhatARankHasCalledLast) {
  EXPECT_EQ(order(0).Describe(1), "");
  EXPECT_TRUE(Note(1, CallKind::kFinish).ok());
  EXPECT_TRUE(Note(0, CallKind::kFinish).ok());
  EXPECT_EQ(order(0).Describe(1),
            "rank 1 last finished a step of the engine 'policy', as rank 0 did");
  EXPECT_TRUE(Note(0, CallKind::kStep, 1).ok());
  EXPECT_EQ(order(0).Describe(1),
            "rank 1 last finished a step of the engine 'policy'; rank 0 then began a step of the "
            "engine 'other'");
  const int ranks[] = {1, 2};
  EXPECT_EQ(order(0).Describe(ranks), order(0).Describe(1)) << "of rank 2 nothing is known";
}

// Ranks without shared memory: one rank packs its calls, and another one reads them.
TEST_F(CallOrderTest, RanksOfOtherHostsCompareTheCallsTheyReceive) {
  CallOrder first(0, std::vector<CallRecord*>(2)), second(1, std::vector<CallRecord*>(2));
  for (CallOrder* const order : {&first, &second}) {
    order->AddEngine("policy");
    EXPECT_TRUE(order->Note({.kind = CallKind::kStep, .engine = 0}).ok());
  }
  EXPECT_TRUE(first.Note({.kind = CallKind::kFinish, .engine = 0}).ok());
  EXPECT_TRUE(second.Receive(first.Pack()).ok()) << "ahead";
  EXPECT_THAT(Text(second.Note({.kind = CallKind::kEvaluation, .engine = 0})),
              HasSubstr("rank 1 began an evaluation where rank 0 finished a step"));
  EXPECT_THAT(Text(first.Receive(second.Pack())),
              HasSubstr("rank 1 began an evaluation where rank 0 finished a step"));
  first.NoteError(0);
  EXPECT_TRUE(second.Receive(first.Pack()).ok());
}

TEST_F(CallOrderTest, TextsThatCannotBeReadAreIgnored) {
  CallOrder order(0, std::vector<CallRecord*>(2));
  EXPECT_TRUE(order.Note({.kind = CallKind::kStep}).ok());
  std::string text = order.Pack();
  for (size_t bytes = 0; bytes <= text.size(); ++bytes)
    EXPECT_TRUE(order.Receive(text.substr(0, bytes)).ok());
  text[0] = 9;  // a rank that does not exist
  EXPECT_TRUE(order.Receive(text).ok());
}

TEST_F(CallOrderTest, TheFirstRankThatHasComeSoFarKnowsIt) {
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_TRUE(Note(rank, CallKind::kStep).ok());
  EXPECT_TRUE(order(0).IsFirstHere());
  EXPECT_FALSE(order(1).IsFirstHere());
  EXPECT_FALSE(order(2).IsFirstHere());
  EXPECT_TRUE(Note(2, CallKind::kFinish).ok());
  EXPECT_TRUE(order(2).IsFirstHere()) << "the others have not come";
  EXPECT_TRUE(Note(1, CallKind::kFinish).ok());
  EXPECT_TRUE(order(1).IsFirstHere());
  EXPECT_FALSE(order(2).IsFirstHere());
  orders_[0]->NoteError(0);
  EXPECT_FALSE(order(1).IsFirstHere()) << "rank 0 is not known any more";
}

TEST_F(CallOrderTest, AReceivedRecordIsComparedWithAllKnownRecords) {
  CallOrder here(0, std::vector<CallRecord*>(kRanks));
  here.AddEngine("policy");
  const CallKind kinds[] = {CallKind::kNone, CallKind::kStep, CallKind::kEvaluation};
  absl::Status heard;
  for (const int rank : {1, 2}) {
    EXPECT_TRUE(heard.ok()) << heard;
    CallOrder there(rank, std::vector<CallRecord*>(kRanks));
    EXPECT_TRUE(there.Note({.kind = kinds[rank], .engine = 0}).ok());
    heard = here.Receive(there.Pack());
  }
  EXPECT_THAT(Text(heard), HasSubstr("rank 2 began an evaluation where rank 1 began a step"));
}

// The rank that comes second sees it. If two come at once, at least one of them does.
TEST_F(CallOrderTest, OneOfTwoDifferentCallsAtTheSameTimeIsAnError) {
  constexpr int kRounds = 20'000;
  std::vector<char> heard[2] = {std::vector<char>(kRounds), std::vector<char>(kRounds)};
  std::barrier together(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      for (size_t round = 0; round < kRounds; ++round) {
        together.arrive_and_wait();
        const absl::Status apart = Note(rank, rank == 0 ? CallKind::kStep : CallKind::kEvaluation);
        heard[rank][round] = apart.ok() ? 0 : 1;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (size_t round = 0; round < kRounds; ++round)
    ASSERT_TRUE(heard[0][round] != 0 || heard[1][round] != 0) << "round " << round;
}

// Ranks that make the same calls never seem to differ, whichever rank looks, and when.
TEST_F(CallOrderTest, RanksThatMakeTheSameCallsNeverDiffer) {
  std::atomic<int> apart{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      for (int call = 0; call < 20'000; ++call) {
        const auto kind = static_cast<CallKind>(1 + call % 9);
        if (!Note(rank, kind, call % 7).ok() || !order(rank).Check().ok()) ++apart;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(apart, 0);
}

}  // namespace
}  // namespace ebb::call_order_test
