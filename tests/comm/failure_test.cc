// Every way of connecting ranks, when a rank fails, leaves, makes a different call or never comes:
// all other ranks get a Status that says so, nothing hangs, and no memory is touched after its
// owner's operation has ended.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/trace/log.h"
#include "failing_ranks.h"
#include "tests/status.h"

namespace ebb::testing::failure_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::Not;

constexpr DType kType = DType::kFloat32;

class FailureTest : public FailingRanks {
 protected:
  static constexpr const char* kMaybeHost = "( on host '[^']+')?";  // the next rank may share it
  // A rank in a line about a wait, as a regular expression.
  static std::string Named(int rank) {
    return absl::StrCat("rank ", rank, GetParam().names_hosts ? " on host '[^']+'" : "");
  }
};

TEST_P(FailureTest, ARankThatReturnsHasLeftAndIsNamed) {
  const auto seen = Seen(3, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "gather"}));
    std::array<float, 3> all = {};
    const float mine = static_cast<float>(world.rank());
    const CollectiveSpan span = {.send = &mine, .receive = all.data(), .count = 1};
    EBB_RETURN_IF_ERROR(After(communicator, [&](Stream& s) {
      return communicator.AllGather(s, {&span, 1}, kType);
    }));
    if (all != std::array{0.0f, 1.0f, 2.0f}) return absl::InternalError("wrong numbers");
    if (world.rank() == 1) return absl::OkStatus();
    return After(communicator, [&](Stream& s) {
      return communicator.AllGather(s, {&span, 1}, kType);
    });
  });
  EXPECT_TRUE(seen[1].ok()) << seen[1];
  for (const size_t rank : {0, 2}) {
    EXPECT_THAT(seen[rank], StatusIs(absl::StatusCode::kUnavailable, "rank 1 has left", "gather"));
  }
}

TEST_P(FailureTest, LeavingAfterTheLastOperationDisturbsNoRank) {
  for (int round = 0; round < 50; ++round) {
    const auto seen = Seen(4, [](World& world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
      float value = 1;
      const CollectiveSpan span = {.send = &value, .receive = &value, .count = 1};
      EBB_RETURN_IF_ERROR(After(communicator, [&](Stream& s) {
        return communicator.AllReduce(s, {&span, 1}, kType);
      }));
      return value == 4 ? absl::OkStatus() : absl::InternalError("wrong sum");
    });
    for (const absl::Status& status : seen) EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_P(FailureTest, RankThatFailsWakesPendingOperationsOfAllCommunicators) {
  const auto seen = Seen(3, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator gathers, world.NewCommunicator({.name = "gather"}));
    EBB_ASSIGN_OR_RETURN(Communicator reductions, world.NewCommunicator({.name = "reduce"}));
    EBB_ASSIGN_OR_RETURN(Stream first, NewStream("first"));
    EBB_ASSIGN_OR_RETURN(Stream second, NewStream("second"));
    float value = 0;
    const CollectiveSpan span = {.send = &value, .receive = &value, .count = 1};
    if (world.rank() == 2) {
      world.Fail(absl::DataLossError("the disk is gone"));
    } else {
      EBB_RETURN_IF_ERROR(gathers.Barrier(first));
      EBB_RETURN_IF_ERROR(reductions.AllReduce(second, {&span, 1}, kType));
      EBB_RETURN_IF_ERROR(reductions.AllReduce(second, {&span, 1}, kType));
      first.WaitIdle();
      second.WaitIdle();
    }
    EXPECT_EQ(gathers.status(), reductions.status());
    EXPECT_EQ(world.NewCommunicator().status(), gathers.status());
    return gathers.status();
  });
  EXPECT_THAT(seen, Each(absl::DataLossError("rank 2 failed: the disk is gone")));
}

TEST_P(FailureTest, AbortFromAnotherThreadEndsWaits) {
  Signal waiting;
  const auto seen = Seen(2, [&](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "gather"}));
    EBB_ASSIGN_OR_RETURN(Communicator other, world.NewCommunicator({.name = "other"}));
    Stream stream = CallerStream();
    if (world.rank() == 0) {
      std::thread aborter([&] {
        waiting.Wait();
        communicator.Abort(absl::CancelledError("interrupted"));
      });
      stream.Enqueue([&] { waiting.Set(); });
      EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
      aborter.join();
    }
    // The barrier of `other` keeps rank 1 here until rank 0 has aborted.
    EBB_RETURN_IF_ERROR(other.Barrier(stream));
    if (!GetParam().fails_as_a_whole) EBB_RETURN_IF_ERROR(other.status());
    EBB_RETURN_IF_ERROR(communicator.Barrier(stream));  // it does nothing
    return communicator.status();
  });
  EXPECT_THAT(seen,
              Each(StatusIs(absl::StatusCode::kCancelled, "rank 0", "'gather'", "interrupted")));
}

// A rank never sees what a failed rank does after its failure before it sees the failure.
TEST_P(FailureTest, ARankThatMeetsAFailedRankKnowsOfTheFailure) {
  for (const bool leaves : {false, true}) {
    const auto seen = Seen(3, [&](World& world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Communicator gathers, world.NewCommunicator({.name = "gather"}));
      for (int round = 0; round < 20; ++round) {
        EBB_ASSIGN_OR_RETURN(Communicator aborted, world.NewCommunicator({.name = "aborted"}));
        EBB_ASSIGN_OR_RETURN(std::optional<Communicator> other,
                             world.NewCommunicator({.name = "other"}));
        if (world.rank() == 2) aborted.Abort(absl::DataLossError("the disk is gone"));
        if (world.rank() == 2 && leaves) {
          other.reset();
        } else {
          Meet(*other).IgnoreError();
        }
        if (aborted.status().ok()) return absl::InternalError("it is not known yet");
        if (!gathers.status().ok()) return aborted.status();  // a world that fails as a whole
        EBB_RETURN_IF_ERROR(Meet(gathers));
        if (round == 19) return aborted.status();
      }
      return absl::OkStatus();
    });
    EXPECT_THAT(seen, Each(Says("rank 2", "'aborted'", "the disk is gone")));
  }
}

TEST_P(FailureTest, RankThatDoesNotComeInTimeIsNamed) {
  Signal late;
  const auto seen = Seen(4, [&](World& world) -> absl::Status {
    EBB_RETURN_IF_ERROR(world.NewCommunicator().status());  // so that the next is in time
    EBB_ASSIGN_OR_RETURN(Communicator communicator,
                         world.NewCommunicator({.name = "gather", .timeout_seconds = 0.2}));
    if (world.rank() > 0) late.Wait();
    const absl::Status status = Meet(communicator);
    late.Set();
    return status;
  });
  const std::string missing =
      absl::StrCat("for rank 1", kMaybeHost, ", rank 2", kMaybeHost, ", ", Named(3), " in barrier");
  EXPECT_THAT(seen, Each(AllOf(StatusIs(absl::StatusCode::kDeadlineExceeded, "'gather'", "0.2 s"),
                               Message(ContainsRegex(missing)))));
}

// The log of this process during `call`, as an error; if nothing is logged, the result of `call`.
// `said`: so many lines say that a rank has waited.
absl::Status LogOf(Signal& said, absl::FunctionRef<absl::Status()> call, int lines = 1) {
  std::string log;
  ::testing::internal::CaptureStderr();
  SurroundLogLines([&](const std::function<void()>& write) {
    write();
    const std::string line = ::testing::internal::GetCapturedStderr();
    ::testing::internal::CaptureStderr();
    log += line;
    if (line.find(" has waited ") != std::string::npos && --lines == 0) said.Set();
  });
  const absl::Status status = call();
  SurroundLogLines({});
  log += ::testing::internal::GetCapturedStderr();
  return status.ok() ? absl::UnknownError(log.substr(0, 1000)) : status;
}

constexpr NoticeTimes kSoon{.first_seconds = 0.01, .interval_seconds = 0.01};
constexpr NoticeTimes kNotInThisTest{.first_seconds = 1e6, .interval_seconds = 1e6};

// The last rank comes when that line has been written. Before rank 0 comes, rank 1 may log it for
// both.
TEST_P(FailureTest, TheLogNamesTheMissingRanks) {
  Signal said;
  const auto seen = Seen(3, [&](World& world) -> absl::Status {
    EBB_RETURN_IF_ERROR(world.NewCommunicator().status());
    EBB_ASSIGN_OR_RETURN(Communicator communicator,
                         world.NewCommunicator({.name = "gather", .notices = kSoon}));
    const auto meet = [&] { return Meet(communicator); };
    if (world.rank() == 2) said.Wait();
    return world.rank() == 0 ? LogOf(said, meet) : meet();
  });
  EXPECT_THAT(seen[0], AllOf(Says(" s of at most 600 s for ", "on communicator 'gather'"),
                             AnyOf(Message(ContainsRegex(Named(0) + " has waited ")),
                                   Message(ContainsRegex(Named(1) + " has waited "))),
                             AnyOf(Message(ContainsRegex(Named(2) + " in barrier on ")),
                                   Says("for other ranks in barrier on "))));
  for (const size_t rank : {1, 2}) EXPECT_TRUE(seen[rank].ok()) << seen[rank];
}

TEST_P(FailureTest, TheLogNamesTheRanksMissingFromACreation) {
  Signal said;
  const auto seen = Seen(3, [&](World& world) -> absl::Status {
    EBB_RETURN_IF_ERROR(world.NewCommunicator().status());
    const auto create = [&] {
      const NoticeTimes& notices = world.rank() == 0 ? kSoon : kNotInThisTest;
      return world.NewCommunicator({.name = "gather", .notices = notices}).status();
    };
    if (world.rank() == 2) said.Wait();
    return world.rank() == 0 ? LogOf(said, create) : create();
  });
  EXPECT_THAT(seen[0], AllOf(Says(" s of at most 600 s for "),
                             Message(ContainsRegex(Named(0) + " has waited ")),
                             Message(ContainsRegex(Named(2) + " to create communicator 'g"))));
  for (const size_t rank : {1, 2}) EXPECT_TRUE(seen[rank].ok()) << seen[rank];
}

// True also if ranks before it, which are not part of the exchange, are there.
TEST_P(FailureTest, TheLogNamesTheMissingPeer) {
  Signal said, over;
  const auto seen = Seen(3, [&](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator,
                         world.NewCommunicator({.name = "pipe", .notices = kSoon}));
    if (world.rank() == 1) {
      over.Wait();
      return absl::OkStatus();
    }
    if (world.rank() == 0) {
      said.Wait();
      return Send(communicator, 2);
    }
    const absl::Status log = LogOf(said, [&] { return Receive(communicator, 0); });
    over.Set();
    return log;
  });
  EXPECT_THAT(seen[2],
              AllOf(Says("in receive of 1 span"), Message(ContainsRegex(Named(2) + " has waited ")),
                    AnyOf(Message(ContainsRegex("for " + Named(0) + " in ")),
                          Says("for other ranks in "))));
  for (const size_t rank : {0, 1}) EXPECT_TRUE(seen[rank].ok()) << seen[rank];
}

// Each rank waits for the others on a communicator of its own, and their earlier calls differ.
TEST_P(FailureTest, DifferentCallsAreAnErrorAtOnce) {
  const auto seen = Seen(3, [&](World& world) -> absl::Status {
    CallOrder* const order = world.calls();
    if (order == nullptr) return absl::UnimplementedError("");
    const int engine = order->AddEngine("policy");  // all ranks know its name before any calls
    constexpr NoticeTimes kEarlyNotices{.first_seconds = 0.05};
    EBB_ASSIGN_OR_RETURN(Communicator first,
                         world.NewCommunicator({.name = "first", .notices = kEarlyNotices}));
    EBB_ASSIGN_OR_RETURN(Communicator second,
                         world.NewCommunicator({.name = "second", .notices = kEarlyNotices}));
    const CallKind kind = world.rank() == 2 ? CallKind::kEvaluation : CallKind::kStep;
    const absl::Status apart = order->Note({.kind = kind, .engine = engine});
    if (!apart.ok()) world.Fail(apart);
    return Meet(world.rank() == 2 ? second : first);
  });
  if (absl::IsUnimplemented(seen[0])) GTEST_SKIP() << "these worlds do not compare calls";
  EXPECT_THAT(seen, Each(AllOf(StatusIs(absl::StatusCode::kFailedPrecondition,
                                        "ranks do different things with the engine 'policy': "
                                        "rank 2 began an evaluation where rank ",
                                        " began a step. "),
                               Not(Says("failed")))));
}

// The calls of both are the same so far, and each communicator sees one rank alone.
TEST_P(FailureTest, RanksThatWaitForEachOtherForEverAllLearnIt) {
  const auto seen = Seen(3, [&](World& world) -> absl::Status {
    CallOrder* const order = world.calls();
    if (order == nullptr) return absl::UnimplementedError("");
    const int engine = order->AddEngine("policy", {"embed", "head"});
    constexpr NoticeTimes kEarlyNotices{.first_seconds = 0.05};
    EBB_ASSIGN_OR_RETURN(Communicator gather,
                         world.NewCommunicator({.name = "gather", .notices = kEarlyNotices}));
    EBB_ASSIGN_OR_RETURN(Communicator reduce,
                         world.NewCommunicator({.name = "reduce", .notices = kEarlyNotices}));
    EBB_RETURN_IF_ERROR(order->Note({.kind = CallKind::kEvaluation, .engine = engine}));
    for (const int unit : {0, 1}) order->NoteScope(engine, CallKind::kForward, unit);
    const bool goes_on = world.rank() == 2;
    if (goes_on) {
      order->NoteScope(engine, CallKind::kForward, 0);
    } else {
      EBB_RETURN_IF_ERROR(order->Note({.kind = CallKind::kFinishEvaluation, .engine = engine}));
    }
    // Ends behind the other one: no rank is named because it has left.
    Communicator &first = goes_on ? gather : reduce, &second = goes_on ? reduce : gather;
    const absl::Status status = Meet(first);
    second.Abort(status);
    return status;
  });
  if (absl::IsUnimplemented(seen[0])) GTEST_SKIP() << "these worlds do not compare calls";
  EXPECT_THAT(seen, Each(AllOf(StatusIs(absl::StatusCode::kFailedPrecondition,
                                        "ranks opened different scopes: as number 3 of the step "
                                        "rank ",
                                        " opened nothing more, rank 2 Forward('embed'); "),
                               Not(Says("aborted")))));
}

// Each waits for the other in vain at first: the thread of rank 2 is late, and its stream is ahead
// in a communicator to which the others come afterwards.
TEST_P(FailureTest, ARankThatLagsBehindIsNoDifference) {
  if (GetParam().device(1).kind() != DeviceKind::kCpu)
    GTEST_SKIP() << "a call there waits on the host";
  Signal said;
  const auto seen = Seen(3, [&](World& world) -> absl::Status {
    CallOrder* const order = world.calls();
    if (order == nullptr) return absl::UnimplementedError("");
    const int engine = order->AddEngine("policy", {"embed", "head"});
    EBB_ASSIGN_OR_RETURN(Communicator gather,
                         world.NewCommunicator({.name = "gather", .notices = kSoon}));
    EBB_ASSIGN_OR_RETURN(Communicator reduce,
                         world.NewCommunicator({.name = "reduce", .notices = kSoon}));
    EBB_ASSIGN_OR_RETURN(Stream ahead, NewStream("ahead"));
    EBB_RETURN_IF_ERROR(order->Note({.kind = CallKind::kEvaluation, .engine = engine}));
    order->NoteScope(engine, CallKind::kForward, 0);
    const bool is_late = world.rank() == 2;
    if (is_late) {
      EBB_RETURN_IF_ERROR(gather.Barrier(ahead));
      said.Wait();
    }
    order->NoteScope(engine, CallKind::kForward, 1);
    const auto end = [&]() -> absl::Status {
      EBB_RETURN_IF_ERROR(order->Note({.kind = CallKind::kFinishEvaluation, .engine = engine}));
      EBB_RETURN_IF_ERROR(Meet(reduce));
      if (!is_late) EBB_RETURN_IF_ERROR(gather.Barrier(ahead));
      ahead.WaitIdle();
      return gather.status();
    };
    constexpr int kLines = 5;  // meanwhile each has looked several times
    return world.rank() == 0 ? LogOf(said, end, kLines) : end();
  });
  if (absl::IsUnimplemented(seen[0])) GTEST_SKIP() << "these worlds do not compare calls";
  EXPECT_EQ(seen[0].code(), absl::StatusCode::kUnknown) << seen[0];
  for (const size_t rank : {1, 2}) EXPECT_TRUE(seen[rank].ok()) << seen[rank];
}

// Ranks that wait for their GPUs make no call of the world that connects them.
TEST_P(FailureTest, DifferentCallsOutsideOfTheWorldAreAnErrorAtOnce) {
  const auto seen = Seen(3, [](World& world) -> absl::Status {
    CallOrder* const order = world.calls();
    if (order == nullptr) return absl::UnimplementedError("");
    const int engine = order->AddEngine("policy");
    EBB_ASSIGN_OR_RETURN(const std::shared_ptr<StoreGroup> beside, world.backend()->bootstrap());
    EBB_RETURN_IF_ERROR(beside->AllGather("", 60).status());  // all know the engine's name
    const auto heard = std::make_shared<std::promise<absl::Status>>();
    beside->store().OnFailure([heard](const absl::Status& why) { heard->set_value(why); });
    const CallKind kind = world.rank() == 2 ? CallKind::kEvaluation : CallKind::kStep;
    if (const absl::Status apart = order->Note({.kind = kind, .engine = engine}); !apart.ok())
      world.Fail(apart);
    beside->store().SendCalls();
    std::future<absl::Status> failure = heard->get_future();
    if (failure.wait_for(std::chrono::minutes(1)) != std::future_status::ready)
      return absl::DeadlineExceededError("nothing has been heard");
    return failure.get();
  });
  if (absl::IsUnimplemented(seen[0])) GTEST_SKIP() << "these worlds do not compare calls";
  EXPECT_THAT(seen, Each(Says("ranks do different things with the engine 'policy': "
                              "rank 2 began an evaluation where rank ")));
}

TEST_P(FailureTest, PeerThatDoesNotComeInTimeIsNamed) {
  Signal late;
  const auto seen = Seen(2, [&](World& world) -> absl::Status {
    EBB_RETURN_IF_ERROR(world.NewCommunicator().status());
    EBB_ASSIGN_OR_RETURN(Communicator communicator,
                         world.NewCommunicator({.timeout_seconds = 0.2}));
    if (world.rank() == 1) late.Wait();
    const absl::Status status =
        world.rank() == 0 ? Send(communicator, 1) : Receive(communicator, 0);
    late.Set();
    return status;
  });
  EXPECT_THAT(seen, Each(AllOf(StatusIs(absl::StatusCode::kDeadlineExceeded),
                               Message(ContainsRegex("for " + Named(1) + " in send of 1 span")))));
}

TEST_P(FailureTest, PeerThatHasLeftIsNamed) {
  const auto seen = Seen(3, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    if (world.rank() == 1) return absl::OkStatus();
    // Rank 2's peer is there, so it does not need the rank that left.
    if (world.rank() == 2) return Receive(communicator, 0);
    EBB_RETURN_IF_ERROR(Send(communicator, 2));
    return Receive(communicator, 1);
  });
  EXPECT_THAT(seen[0], Says("rank 1 has left"));
}

// Operations on memory that is freed as soon as they have ended, while ranks fail in all ways at
// random times.
TEST_P(FailureTest, NoMemoryIsTouchedAfterItsOperationHasEnded) {
  const uint64_t seed = RandomSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 60; ++round) {
    const int ranks = 2 + static_cast<int>(random() % 4),
              culprit = static_cast<int>(random() % static_cast<uint64_t>(ranks));
    const int fails_after = static_cast<int>(random() % 12), way = static_cast<int>(random() % 4);
    const auto seen = Seen(ranks, [&](World& world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
      EBB_ASSIGN_OR_RETURN(Stream stream, NewStream());
      std::optional<std::thread> aborter;
      for (int i = 0; communicator.status().ok(); ++i) {
        if (world.rank() == culprit && i == fails_after) {
          if (way == 0) return absl::OkStatus();
          if (way == 1) world.Fail(absl::InternalError("chosen"));
          if (way == 2) communicator.Abort(absl::InternalError("chosen"));
          if (way == 3) aborter.emplace([&] { communicator.Abort(absl::InternalError("chosen")); });
        }
        std::vector<float> send(static_cast<size_t>(300 * ranks), 1), receive(send.size());
        const CollectiveSpan span = {.send = send.data(), .receive = receive.data(), .count = 300};
        EBB_RETURN_IF_ERROR(i % 3 == 0   ? communicator.AllGather(stream, {&span, 1}, kType)
                            : i % 3 == 1 ? communicator.AllReduce(stream, {&span, 1}, kType)
                                         : communicator.ReduceScatter(stream, {&span, 1}, kType));
        stream.WaitIdle();
      }
      if (aborter) aborter->join();
      return communicator.status();
    });
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == culprit && way == 0) continue;
      EXPECT_THAT(seen[static_cast<size_t>(rank)], Says("rank " + std::to_string(culprit)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, FailureTest, ::testing::ValuesIn(Backends()), NameOf);

}  // namespace
}  // namespace ebb::testing::failure_test
