#include "ebb/runtime/comm/wait_cycles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/rank_errors.h"

namespace ebb::wait_cycles_test {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two ranks with an engine and two communicators. They share memory, or send each other texts.
class WaitCyclesTest : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr int kRanks = 2, kOthers = 1;

  WaitCyclesTest()
      : records_(std::make_unique<CallRecord[]>(kRanks)),
        logs_(std::make_unique<RankLog[]>(kRanks)) {
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<CallRecord*> records(kRanks);
      std::vector<RankLog*> logs;
      for (size_t other = 0; other < kRanks && shares(); ++other) {
        records[other] = &records_[other];
        logs.push_back(&logs_[other]);
      }
      orders_[rank] = std::make_unique<CallOrder>(rank, records, logs);
      for (const char* name : {"policy", "other"}) orders_[rank]->AddEngine(name, {"a", "b"});
      gather_[rank].emplace(orders_[rank]->cycles(), "gather");
      reduce_[rank].emplace(orders_[rank]->cycles(), "reduce");
    }
  }
  bool shares() const { return GetParam(); }

  void Call(int rank, CallKind kind, int engine = 0) {
    orders_[rank]->Note({.kind = kind, .engine = engine}).IgnoreError();
  }
  void Scopes(int rank, int count, int engine = 0) {
    for (int i = 0; i < count; ++i) orders_[rank]->NoteScope(engine, CallKind::kForward, i % 2);
  }
  // Rank `rank` has enqueued its next collective and waits in it for the other one.
  absl::Status Wait(int rank, std::optional<WaitCycles::Lane> (&lane)[kRanks]) {
    lane[rank]->Enqueued(++enqueued_[rank][&lane == &gather_]);
    lane[rank]->Begin(enqueued_[rank][&lane == &gather_]);
    const int other = kOthers - rank;
    const absl::Status seen = lane[rank]->Waits({&other, 1});
    return shares() ? seen : orders_[other]->Receive(orders_[rank]->Pack());
  }
  // Each rank waits in another collective.
  void ExpectNoDifference() {
    EXPECT_TRUE(Wait(0, reduce_).ok());
    EXPECT_TRUE(Wait(1, gather_).ok());
  }
  void EndWait(int rank, std::optional<WaitCycles::Lane> (&lane)[kRanks]) { lane[rank]->End(); }

  // An evaluation of two scopes on rank 0; rank 1 opens a third one. Each waits for the other.
  void GoApart() {
    for (const int rank : {0, 1}) {
      Call(rank, CallKind::kEvaluation);
      Scopes(rank, 2 + rank);
    }
    Call(0, CallKind::kFinishEvaluation);
  }

  std::unique_ptr<CallRecord[]> records_;
  std::unique_ptr<RankLog[]> logs_;
  std::unique_ptr<CallOrder> orders_[kRanks];
  std::optional<WaitCycles::Lane> gather_[kRanks], reduce_[kRanks];
  uint64_t enqueued_[kRanks][2] = {};
};
INSTANTIATE_TEST_SUITE_P(Memory, WaitCyclesTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "shared" : "sent"; });

TEST_P(WaitCyclesTest, TheSecondOfTwoThatWaitForEachOtherFindsTheDifference) {
  GoApart();
  EXPECT_TRUE(Wait(0, reduce_).ok()) << "rank 1 may still come";
  const absl::Status apart = Wait(1, gather_);
  EXPECT_EQ(apart.message(),
            "ranks opened different scopes: as number 3 of the step rank 0 opened nothing more, "
            "rank 1 Forward('a'); every rank must open the same scopes in the same order");
  EXPECT_TRUE(IsDifference(apart)) << apart;
}

TEST_P(WaitCyclesTest, ARankWhoseWaitTheOtherHasEndedLearnsItToo) {
  if (!shares()) GTEST_SKIP() << "the world fails there";
  GoApart();
  EXPECT_TRUE(Wait(0, reduce_).ok());
  EXPECT_FALSE(Wait(1, gather_).ok());
  EndWait(1, gather_);
  EXPECT_FALSE(reduce_[0]->Waits({&kOthers, 1}).ok());
}

TEST_P(WaitCyclesTest, ARankThatOnlyLagsIsNoDifference) {
  for (const int rank : {0, 1}) {
    Call(rank, CallKind::kEvaluation);
    Scopes(rank, 2 + 40 * rank);
  }
  EXPECT_TRUE(Wait(0, reduce_).ok());
  EXPECT_TRUE(Wait(1, gather_).ok()) << "its streams lag behind its host";
}

TEST_P(WaitCyclesTest, ADifferenceWhereTheOtherRankHasEnqueuedTheCollectiveIsLeftToTheExchange) {
  GoApart();
  gather_[0]->Enqueued(1);  // as Finish does for scopes that are left out
  enqueued_[0][1] = 1;
  ExpectNoDifference();
}

TEST_P(WaitCyclesTest, ARankThatIsAwaitedShowsForWhomItWaitsItself) {
  GoApart();
  const int first[] = {0};
  EXPECT_EQ(orders_[1]->Describe(first).find("waits for"), std::string::npos);
  EXPECT_TRUE(Wait(0, reduce_).ok());
  EXPECT_EQ(orders_[1]->cycles().AwaitedBy(0), shares() ? std::vector{1} : std::vector<int>());
  if (shares()) {
    EXPECT_THAT(orders_[1]->Describe(first), EndsWith("; rank 0 waits for rank 1"));
  }
  EndWait(0, reduce_);
  EXPECT_THAT(orders_[1]->cycles().AwaitedBy(0), IsEmpty());
}

TEST_P(WaitCyclesTest, AWaitThatHasEndedIsNoWait) {
  GoApart();
  EXPECT_TRUE(Wait(0, reduce_).ok());
  EndWait(0, reduce_);
  EXPECT_TRUE(Wait(1, gather_).ok());
}

TEST_P(WaitCyclesTest, AnErrorOfAllRanksEndsItsDifference) {
  GoApart();
  Call(1, CallKind::kFinishEvaluation);
  for (const int rank : {0, 1}) {
    orders_[rank]->NoteError(0);
    Call(rank, CallKind::kStep);
    Scopes(rank, 3 - rank);
  }
  ExpectNoDifference();
}

TEST_P(WaitCyclesTest, AnErrorThatOneRankKnowsEndsTheComparison) {
  GoApart();
  orders_[0]->NoteError(0);
  ExpectNoDifference();
}

TEST_P(WaitCyclesTest, AnErrorOfOneRankBeforeAnEngineWasMadeDoesNotCount) {
  orders_[1]->NoteError(0);
  Call(1, CallKind::kEvaluation);  // as a loop that goes on alone
  for (const int rank : {0, 1}) {
    const int engine = orders_[rank]->AddEngine("third", {"a", "b"});
    Call(rank, CallKind::kCreate, engine);
    Call(rank, CallKind::kEvaluation, engine);
    Scopes(rank, 2 + rank, engine);
  }
  Call(0, CallKind::kFinishEvaluation, 2);
  EXPECT_TRUE(Wait(0, reduce_).ok());
  EXPECT_TRUE(IsDifference(Wait(1, gather_)));
}

TEST_P(WaitCyclesTest, StepsThatBothRanksHaveDroppedAreNotCompared) {
  for (const int rank : {0, 1}) {
    Call(rank, CallKind::kStep);
    Scopes(rank, 3 + rank);
    orders_[rank]->NoteScope(0, CallKind::kDrop);
    Call(rank, CallKind::kStep);
    Scopes(rank, 2 + rank);
  }
  ExpectNoDifference();
}

TEST_P(WaitCyclesTest, AStepThatOneRankHasDroppedIsADifference) {
  for (const int rank : {0, 1}) {
    Call(rank, CallKind::kStep);
    Scopes(rank, 4 - rank);
  }
  orders_[1]->NoteScope(0, CallKind::kDrop);
  EXPECT_TRUE(Wait(0, gather_).ok());
  EXPECT_EQ(Wait(1, reduce_).message(),
            "ranks do different things with the engine 'policy': rank 1 dropped a step or "
            "evaluation where rank 0 opened Forward('b'). Every rank has to make the same calls in "
            "the same order");
}

// Positions behind an evaluation that ranks have dropped at different scopes are not comparable.
TEST_P(WaitCyclesTest, ADroppedEvaluationInAStepEndsTheLogOfTheStep) {
  for (const int rank : {0, 1}) {
    Call(rank, CallKind::kStep);
    Scopes(rank, 2);
    Call(rank, CallKind::kEvaluation);
    Scopes(rank, 2 + rank);
    orders_[rank]->NoteScope(0, CallKind::kDrop);
    Scopes(rank, 5);
  }
  ExpectNoDifference();
  for (const int rank : {0, 1}) {
    EndWait(rank, rank == 0 ? reduce_ : gather_);
    Call(rank, CallKind::kFinish);
    Call(rank, CallKind::kEvaluation);
    Scopes(rank, 1 + rank);
  }
  Call(0, CallKind::kFinishEvaluation);
  EXPECT_TRUE(Wait(0, reduce_).ok());
  EXPECT_THAT(std::string(Wait(1, gather_).message()), HasSubstr("as number 2 of the step"));
}

TEST_P(WaitCyclesTest, ScopesOfTwoEnginesMayComeInDifferentOrder) {
  for (const int rank : {0, 1}) {
    for (const int engine : {0, 1}) Call(rank, CallKind::kEvaluation, engine);
    for (const int engine : {rank, 1 - rank}) Scopes(rank, 3, engine);
  }
  ExpectNoDifference();
}

TEST_P(WaitCyclesTest, ManyScopesLaterTheDifferenceIsStillKnown) {
  GoApart();
  Scopes(1, 300);
  EXPECT_TRUE(Wait(1, gather_).ok());
  const absl::Status apart = Wait(0, reduce_);
  EXPECT_THAT(std::string(apart.message()),
              HasSubstr("rank 0 opened nothing more, rank 1 Forward"));
}

TEST_P(WaitCyclesTest, ATextOfAnotherVersionIsNoDifference) {
  GoApart();
  EXPECT_TRUE(Wait(0, reduce_).ok());
  const std::string text = orders_[1]->Pack();
  for (size_t bytes = 0; bytes < text.size(); bytes += 7)
    EXPECT_TRUE(orders_[0]->Receive(text.substr(0, bytes)).ok());
}

}  // namespace
}  // namespace ebb::wait_cycles_test
