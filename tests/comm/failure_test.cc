// What every way of connecting ranks must do when a rank fails, leaves, calls something else or
// does not come: all others get a Status that says so, nothing hangs, and no memory is touched
// after its owner's operation has ended.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "backends.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/nccl/world_bootstrap.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/trace/log.h"
#include "processes.h"

namespace ebb {
namespace {

using ebb::testing::Backend;
using ebb::testing::Backends;
using ebb::testing::Results;
using ebb::testing::Signal;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr DType kType = DType::kFloat32;

class FailureTest : public ::testing::TestWithParam<Backend> {
 protected:
  // Runs `body` on every rank. What it returns is what that rank saw; the run itself does not fail.
  std::vector<absl::Status> Seen(int ranks, std::function<absl::Status(World&)> body) {
    Results seen;
    const absl::Status status = GetParam().run(ranks, [&](World world) {
      seen.Set(world.rank(), body(world));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return seen.Take(ranks);
  }
};

std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

// Calls `call` on the calling thread's stream and returns what became of the communicator.
template <class Call>
absl::Status After(const Backend& backend, Communicator& communicator, Call call) {
  Stream stream = backend.device(1).CallerStream();
  EBB_RETURN_IF_ERROR(call(stream));
  stream.WaitIdle();
  return communicator.status();
}

TEST_P(FailureTest, RankThatReturnsLeavesAndTheOthersAreToldWho) {
  const auto seen = Seen(3, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "gather"}));
    std::array<float, 3> all = {};
    const float mine = static_cast<float>(world.rank());
    const CollectiveSpan span = {.send = &mine, .receive = all.data(), .count = 1};
    EBB_RETURN_IF_ERROR(After(GetParam(), communicator, [&](Stream& s) {
      return communicator.AllGather(s, {&span, 1}, kType);
    }));
    if (all != std::array{0.0f, 1.0f, 2.0f}) return absl::InternalError("wrong numbers");
    if (world.rank() == 1) return absl::OkStatus();
    return After(GetParam(), communicator, [&](Stream& s) {
      return communicator.AllGather(s, {&span, 1}, kType);
    });
  });
  EXPECT_TRUE(seen[1].ok()) << seen[1];
  for (const int rank : {0, 2}) {
    EXPECT_EQ(seen[static_cast<size_t>(rank)].code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(Message(seen[static_cast<size_t>(rank)]),
                AllOf(HasSubstr("rank 1 has left"), HasSubstr("gather")));
  }
}

TEST_P(FailureTest, LeavingAfterTheLastOperationDisturbsNobody) {
  for (int round = 0; round < 50; ++round) {
    const auto seen = Seen(4, [](World& world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
      float value = 1;
      const CollectiveSpan span = {.send = &value, .receive = &value, .count = 1};
      EBB_RETURN_IF_ERROR(After(GetParam(), communicator, [&](Stream& s) {
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
    EBB_ASSIGN_OR_RETURN(Stream first, GetParam().device(1).NewStream("first"));
    EBB_ASSIGN_OR_RETURN(Stream second, GetParam().device(1).NewStream("second"));
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
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(Message(status), "rank 2 failed: the disk is gone");
  }
}

TEST_P(FailureTest, AbortFromAnotherThreadEndsWhatWaits) {
  Signal waiting;
  const auto seen = Seen(2, [&](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "gather"}));
    EBB_ASSIGN_OR_RETURN(Communicator other, world.NewCommunicator({.name = "other"}));
    Stream stream = GetParam().device(1).CallerStream();
    if (world.rank() == 0) {
      std::thread aborter([&] {
        waiting.Wait();
        communicator.Abort(absl::CancelledError("interrupted"));
      });
      stream.Enqueue([&] { waiting.Set(); });
      EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
      aborter.join();
    }
    // The other communicator has not failed; its barrier keeps rank 1 here until rank 0 has
    // aborted.
    EBB_RETURN_IF_ERROR(other.Barrier(stream));
    EBB_RETURN_IF_ERROR(other.status());
    const int64_t before = communicator.bytes_moved();
    EBB_RETURN_IF_ERROR(communicator.Barrier(stream));  // does nothing
    EXPECT_EQ(communicator.bytes_moved(), before);
    return communicator.status();
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("rank 0"), HasSubstr("'gather'"), HasSubstr("interrupted")));
  }
}

TEST_P(FailureTest, RankThatDoesNotComeInTimeIsNamed) {
  Signal late;
  const auto seen = Seen(4, [&](World& world) -> absl::Status {
    EBB_RETURN_IF_ERROR(
        world.NewCommunicator().status());  // all ranks are here: the next one is created in time
    EBB_ASSIGN_OR_RETURN(Communicator communicator,
                         world.NewCommunicator({.name = "gather", .timeout_seconds = 0.2}));
    if (world.rank() > 0) late.Wait();
    const absl::Status status =
        After(GetParam(), communicator, [&](Stream& s) { return communicator.Barrier(s); });
    late.Set();
    return status;
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Message(status), AllOf(HasSubstr("for rank 1, rank 2, rank 3 in barrier"),
                                       HasSubstr("'gather'"), HasSubstr("0.2 s")));
  }
}

// What the log of this process says while `call` lasts, as an error; else what `call` returns. `said`: a
// line says that a rank has waited.
absl::Status LogOf(Signal& said, absl::FunctionRef<absl::Status()> call) {
  std::string log;
  ::testing::internal::CaptureStderr();
  SurroundLogLines([&](const std::function<void()>& write) {
    write();
    const std::string line = ::testing::internal::GetCapturedStderr();
    ::testing::internal::CaptureStderr();
    log += line;
    if (line.find(" has waited ") != std::string::npos) said.Set();
  });
  const absl::Status status = call();
  SurroundLogLines({});
  log += ::testing::internal::GetCapturedStderr();
  return status.ok() ? absl::UnknownError(log.substr(0, 1000)) : status;
}

constexpr NoticeTimes kSoon{.first_seconds = 0.01, .interval_seconds = 0.01};
constexpr NoticeTimes kNotInThisTest{.first_seconds = 1e6, .interval_seconds = 1e6};

// The last rank comes when that line has been written. Before rank 0 comes, rank 1 may say it for both.
TEST_P(FailureTest, WhoIsWaitedForIsSaidInTheLog) {
  Signal said;
  const auto seen = Seen(3, [&](World& world) -> absl::Status {
    EBB_RETURN_IF_ERROR(world.NewCommunicator().status());
    EBB_ASSIGN_OR_RETURN(Communicator communicator,
                         world.NewCommunicator({.name = "gather", .notices = kSoon}));
    const auto meet = [&] {
      return After(GetParam(), communicator, [&](Stream& s) { return communicator.Barrier(s); });
    };
    if (world.rank() == 2) said.Wait();
    return world.rank() == 0 ? LogOf(said, meet) : meet();
  });
  EXPECT_THAT(
      Message(seen[0]),
      AllOf(AnyOf(HasSubstr("rank 0 has waited "), HasSubstr("rank 1 has waited ")),
            HasSubstr(" s of at most 600 s for "),
            AnyOf(HasSubstr("rank 2 in barrier on "), HasSubstr("for other ranks in barrier on ")),
            HasSubstr("on communicator 'gather'")));
  for (const size_t rank : {1, 2}) EXPECT_TRUE(seen[rank].ok()) << seen[rank];
}

TEST_P(FailureTest, WhoIsWaitedForToCreateACommunicatorIsSaidInTheLog) {
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
  EXPECT_THAT(Message(seen[0]),
              AllOf(HasSubstr("rank 0 has waited "), HasSubstr(" s of at most 600 s for "),
                    HasSubstr("rank 2 to create communicator 'g")));
  for (const size_t rank : {1, 2}) EXPECT_TRUE(seen[rank].ok()) << seen[rank];
}

// Also where ranks before it, which the exchange has nothing to do with, are there.
TEST_P(FailureTest, ThePeerThatIsWaitedForIsSaidInTheLog) {
  Signal said, over;
  const auto seen = Seen(3, [&](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator,
                         world.NewCommunicator({.name = "pipe", .notices = kSoon}));
    float value = 0;
    const CollectiveSpan span = {.send = &value, .receive = &value, .count = 1};
    if (world.rank() == 1) {
      over.Wait();
      return absl::OkStatus();
    }
    if (world.rank() == 0) {
      said.Wait();
      return After(GetParam(), communicator, [&](Stream& s) {
        return communicator.Send(s, {&span, 1}, kType, 2);
      });
    }
    const absl::Status log = LogOf(said, [&] {
      return After(GetParam(), communicator, [&](Stream& s) {
        return communicator.Receive(s, {&span, 1}, kType, 0);
      });
    });
    over.Set();
    return log;
  });
  EXPECT_THAT(Message(seen[2]),
              AllOf(HasSubstr("rank 2 has waited "),
                    AnyOf(HasSubstr("for rank 0 in "), HasSubstr("for other ranks in ")),
                    HasSubstr("in receive of 1 span")));
  for (const size_t rank : {0, 1}) EXPECT_TRUE(seen[rank].ok()) << seen[rank];
}

// Each waits for the others on a communicator of its own, and they differ in what they have said before.
TEST_P(FailureTest, RanksWhoseCallsGoApartAreToldAtOnce) {
  const auto seen = Seen(3, [&](World& world) -> absl::Status {
    CallOrder* const order = world.calls();
    if (order == nullptr) return absl::UnimplementedError("");
    const int engine = order->AddEngine("policy");  // all know its name before any calls
    constexpr NoticeTimes kTells{.first_seconds = 0.05};
    EBB_ASSIGN_OR_RETURN(Communicator first,
                         world.NewCommunicator({.name = "first", .notices = kTells}));
    EBB_ASSIGN_OR_RETURN(Communicator second,
                         world.NewCommunicator({.name = "second", .notices = kTells}));
    const CallKind kind = world.rank() == 2 ? CallKind::kEvaluation : CallKind::kStep;
    const absl::Status apart = order->Note({.kind = kind, .engine = engine});
    if (!apart.ok()) world.Fail(apart);
    Communicator& mine = world.rank() == 2 ? second : first;
    return After(GetParam(), mine, [&](Stream& s) { return mine.Barrier(s); });
  });
  if (absl::IsUnimplemented(seen[0])) GTEST_SKIP() << "these worlds do not compare calls";
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("ranks do different things with the engine 'policy': rank 2 began "
                                "an evaluation where rank "),
                      HasSubstr(" began a step. "), Not(HasSubstr("failed"))));
  }
}

// Ranks that wait for their GPUs call nothing of the world that connects them beside those.
TEST_P(FailureTest, RanksWhoseCallsGoApartBesideTheirWorldAreToldAtOnce) {
  const auto seen = Seen(3, [](World& world) -> absl::Status {
    CallOrder* const order = world.calls();
    if (order == nullptr) return absl::UnimplementedError("");
    const int engine = order->AddEngine("policy");  // all know its name before any calls
    EBB_ASSIGN_OR_RETURN(const std::shared_ptr<WorldBootstrap> beside,
                         WorldBootstrap::Create(world));
    const auto heard = std::make_shared<std::promise<absl::Status>>();
    beside->OnFailure([heard](const absl::Status& why) { heard->set_value(why); });
    const CallKind kind = world.rank() == 2 ? CallKind::kEvaluation : CallKind::kStep;
    if (const absl::Status apart = order->Note({.kind = kind, .engine = engine}); !apart.ok())
      world.Fail(apart);
    beside->TellCalls();
    std::future<absl::Status> failure = heard->get_future();
    if (failure.wait_for(std::chrono::minutes(1)) != std::future_status::ready)
      return absl::DeadlineExceededError("nothing has been heard");
    return failure.get();
  });
  if (absl::IsUnimplemented(seen[0])) GTEST_SKIP() << "these worlds do not compare calls";
  for (const absl::Status& status : seen) {
    EXPECT_THAT(Message(status), HasSubstr("ranks do different things with the engine 'policy': "
                                           "rank 2 began an evaluation where rank "));
  }
}

TEST_P(FailureTest, PeerThatDoesNotComeInTimeIsNamed) {
  Signal late;
  const auto seen = Seen(2, [&](World& world) -> absl::Status {
    EBB_RETURN_IF_ERROR(world.NewCommunicator().status());
    EBB_ASSIGN_OR_RETURN(Communicator communicator,
                         world.NewCommunicator({.timeout_seconds = 0.2}));
    float value = 0;
    const CollectiveSpan span = {.send = &value, .receive = &value, .count = 1};
    if (world.rank() == 1) late.Wait();
    const absl::Status status = After(GetParam(), communicator, [&](Stream& s) {
      return world.rank() == 0 ? communicator.Send(s, {&span, 1}, kType, 1)
                               : communicator.Receive(s, {&span, 1}, kType, 0);
    });
    late.Set();
    return status;
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Message(status), HasSubstr("for rank 1 in send of 1 span"));
  }
}

TEST_P(FailureTest, PeerThatHasLeftIsNamed) {
  const auto seen = Seen(3, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    float value = 0;
    const CollectiveSpan span = {.send = &value, .receive = &value, .count = 1};
    if (world.rank() == 1) return absl::OkStatus();
    if (world.rank() == 2) {  // its peer is there: the one that left does not matter to it
      return After(GetParam(), communicator, [&](Stream& s) {
        return communicator.Receive(s, {&span, 1}, kType, 0);
      });
    }
    EBB_RETURN_IF_ERROR(After(GetParam(), communicator, [&](Stream& s) {
      return communicator.Send(s, {&span, 1}, kType, 2);
    }));
    return After(GetParam(), communicator, [&](Stream& s) {
      return communicator.Receive(s, {&span, 1}, kType, 1);
    });
  });
  EXPECT_THAT(Message(seen[0]), HasSubstr("rank 1 has left"));
}

// What two ranks call, and what must be said about it.
struct Mismatch {
  std::string name;
  std::function<absl::Status(Communicator&, Stream&, std::span<const CollectiveSpan>)> first,
      second;
  std::string first_text, second_text;
};
void PrintTo(const Mismatch& mismatch, std::ostream* out) {
  *out << mismatch.name;
}

std::vector<Mismatch> Mismatches() {
  using Spans = std::span<const CollectiveSpan>;
  const auto gather = [](Communicator& c, Stream& s, Spans spans) {
    return c.AllGather(s, spans, kType);
  };
  const auto reduce = [](Communicator& c, Stream& s, Spans spans) {
    return c.AllReduce(s, spans, kType);
  };
  const auto send = [](Communicator& c, Stream& s, Spans spans) {
    return c.Send(s, spans, kType, 1 - c.rank());
  };
  const auto receive = [](Communicator& c, Stream& s, Spans spans) {
    return c.Receive(s, spans, kType, 1 - c.rank());
  };
  const std::string gathered = "all-gather of 2 spans, 5 fp32 elements",
                    reduced = "all-reduce of 2 spans, 5 fp32 elements";
  return {
      {"kind", gather, reduce, gathered, reduced},
      {"dtype", gather,
       [](Communicator& c, Stream& s, Spans spans) { return c.AllGather(s, spans, DType::kInt8); },
       gathered, "all-gather of 2 spans, 5 int8 elements"},
      {"spans", gather,
       [&](Communicator& c, Stream& s, Spans spans) {
         return c.AllGather(s, spans.first(1), kType);
       },
       gathered, "all-gather of 1 span, 3 fp32 elements"},
      {"counts", gather,
       [](Communicator& c, Stream& s, Spans spans) {
         std::array swapped = {spans[1], spans[0]};
         return c.AllGather(s, swapped, kType);
       },
       gathered, "span 0 has 3 elements on rank 0 and 2 on rank 1"},
      {"op", reduce,
       [](Communicator& c, Stream& s, Spans spans) {
         return c.AllReduce(s, spans, kType, ReduceOp::kMax);
       },
       reduced, reduced + ", maximum"},
      {"scale", reduce,
       [](Communicator& c, Stream& s, Spans spans) {
         return c.AllReduce(s, spans, kType, ReduceOp::kSum, 0.5f);
       },
       reduced, reduced + ", scale 0.5"},
      {"root",
       [](Communicator& c, Stream& s, Spans spans) { return c.Broadcast(s, spans, kType, 0); },
       [](Communicator& c, Stream& s, Spans spans) { return c.Broadcast(s, spans, kType, 1); },
       "root 0", "root 1"},
      {"both_send", send, send, "send of 2 spans, 5 fp32 elements, to 1",
       "send of 2 spans, 5 fp32 elements, to 0"},
      {"exchange_counts", send,
       [](Communicator& c, Stream& s, Spans spans) {
         return c.Receive(s, spans.first(1), kType, 0);
       },
       "send of 2 spans, 5 fp32 elements, to 1", "receive of 1 span, 3 fp32 elements, from 0"},
      {"send_and_collective", send, gather, "send of 2 spans, 5 fp32 elements, to 1", gathered},
      {"collective_and_receive", reduce, receive, reduced,
       "receive of 2 spans, 5 fp32 elements, from 0"},
  };
}

class MismatchTest : public ::testing::TestWithParam<std::tuple<Backend, Mismatch>> {};

TEST_P(MismatchTest, EveryRankIsToldWhatTheTwoCalled) {
  const auto& [backend, mismatch] = GetParam();
  for (int round = 0; round < 20; ++round) {
    Results seen;
    const absl::Status run =
        backend.run(2, [&, &backend = backend, &mismatch = mismatch](World world) -> absl::Status {
          EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
          std::array<float, 32> send = {}, receive = {};
          const std::array spans = {CollectiveSpan{send.data(), receive.data(), 3},
                                    CollectiveSpan{send.data() + 8, receive.data() + 8, 2}};
          const absl::Status status = After(backend, communicator, [&](Stream& s) {
            return world.rank() == 0 ? mismatch.first(communicator, s, spans)
                                     : mismatch.second(communicator, s, spans);
          });
          EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
          seen.Set(world.rank(), status);
          return absl::OkStatus();
        });
    EXPECT_TRUE(run.ok()) << run;
    EXPECT_EQ(seen.Get(0), seen.Get(1));
    EXPECT_THAT(Message(seen.Get(0)),
                AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr(mismatch.first_text),
                      HasSubstr(mismatch.second_text)));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, MismatchTest,
                         ::testing::Combine(::testing::ValuesIn(Backends()),
                                            ::testing::ValuesIn(Mismatches())),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + "_" + std::get<1>(test.param).name;
                         });

TEST_P(FailureTest, MismatchOfOneAmongManyNamesIt) {
  const auto seen = Seen(5, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "reduce"}));
    std::array<float, 8> values = {};
    const CollectiveSpan span = {
        .send = values.data(), .receive = values.data(), .count = world.rank() == 3 ? 8 : 4};
    return After(GetParam(), communicator, [&](Stream& s) {
      return communicator.AllReduce(s, {&span, 1}, kType);
    });
  });
  for (const absl::Status& status : seen) {
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("'reduce'"), HasSubstr("4 elements on rank 0 and 8 on rank 3")));
  }
}

TEST_P(FailureTest, CreationDoesNotWaitForARankThatHasLeftOrFailed) {
  const auto left = Seen(3, [](World& world) -> absl::Status {
    if (world.rank() == 1) return absl::OkStatus();
    return world.NewCommunicator().status();
  });
  EXPECT_THAT(Message(left[0]), HasSubstr("rank 1 has left"));
  EXPECT_THAT(Message(left[2]), HasSubstr("rank 1 has left"));

  const auto failed = Seen(3, [](World& world) -> absl::Status {
    if (world.rank() == 1) world.Fail(absl::InternalError("broken"));
    return world.NewCommunicator().status();
  });
  for (const absl::Status& status : failed) EXPECT_EQ(Message(status), "rank 1 failed: broken");
}

TEST_P(FailureTest, CreationThatARankIsLateForFails) {
  Signal late;
  const auto seen = Seen(2, [&](World& world) -> absl::Status {
    if (world.rank() == 1) late.Wait();
    const absl::Status status =
        world.NewCommunicator({.name = "gather", .timeout_seconds = 0.05}).status();
    late.Set();
    return status;
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Message(status), AllOf(HasSubstr("'gather'"), HasSubstr("rank 1")));
  }
}

TEST_P(FailureTest, CreationWithDifferentOrImpossibleOptionsFailsOnAllRanksAndMayBeRepeated) {
  const auto seen = Seen(2, [](World& world) -> absl::Status {
    const absl::Status different =
        world.NewCommunicator({.name = world.rank() == 0 ? "a" : "b"}).status();
    EXPECT_EQ(different.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(Message(different), AllOf(HasSubstr("rank 0 'a'"), HasSubstr("rank 1 'b'")));
    for (const int group : {-1, 3, 4}) {
      const absl::Status impossible = world.NewCommunicator({.reduction_group = group}).status();
      EXPECT_EQ(impossible.code(), absl::StatusCode::kInvalidArgument);
    }
    EXPECT_EQ(world.NewCommunicator({.timeout_seconds = 0}).status().code(),
              absl::StatusCode::kInvalidArgument);
    return world.NewCommunicator().status();
  });
  for (const absl::Status& status : seen) EXPECT_TRUE(status.ok()) << status;
}

TEST_P(FailureTest, SplitDoesNotWaitForACommunicatorThatIsGone) {
  const auto seen = Seen(3, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    if (world.rank() == 2) return absl::OkStatus();
    return communicator.Split(0, 0).status();
  });
  EXPECT_THAT(Message(seen[0]), HasSubstr("rank 2 has left"));
  EXPECT_THAT(Message(seen[1]), HasSubstr("rank 2 has left"));
}

TEST_P(FailureTest, PartsOfASplitFailWithTheWorld) {
  const auto seen = Seen(4, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator all, world.NewCommunicator());
    EBB_ASSIGN_OR_RETURN(Communicator part, all.Split(world.rank() / 2, 0));
    if (world.rank() == 3) {
      world.Fail(absl::InternalError("broken"));
      return absl::OkStatus();
    }
    while (part.status().ok()) {
      EBB_RETURN_IF_ERROR(After(GetParam(), part, [&](Stream& s) { return part.Barrier(s); }));
    }
    return part.status();
  });
  for (const int rank : {0, 1, 2})
    EXPECT_EQ(Message(seen[static_cast<size_t>(rank)]), "rank 3 failed: broken");
}

TEST_P(FailureTest, PartsOfASplitAreNamed) {
  const auto seen = Seen(4, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator all, world.NewCommunicator({.name = "all"}));
    EBB_ASSIGN_OR_RETURN(Communicator named, all.Split(world.rank() / 2, 0, "half"));
    EBB_ASSIGN_OR_RETURN(Communicator unnamed, named.Split(0, 0));
    Communicator& aborted = world.rank() < 2 ? named : unnamed;
    aborted.Abort(absl::InternalError("broken"));
    return aborted.status();
  });
  for (size_t rank = 0; rank < 4; ++rank)
    EXPECT_THAT(Message(seen[rank]), HasSubstr("communicator 'half': broken"));
}

// Operations on memory that is freed as soon as they have ended, while ranks fail in all ways at
// random moments.
TEST_P(FailureTest, NoMemoryIsTouchedAfterItsOperationHasEnded) {
  const uint64_t seed = ebb::testing::RandomSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 60; ++round) {
    const int ranks = 2 + static_cast<int>(random() % 4),
              culprit = static_cast<int>(random() % static_cast<uint64_t>(ranks));
    const int fails_after = static_cast<int>(random() % 12), way = static_cast<int>(random() % 4);
    const auto seen = Seen(ranks, [&](World& world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
      EBB_ASSIGN_OR_RETURN(Stream stream, GetParam().device(1).NewStream("comm"));
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
      EXPECT_THAT(Message(seen[static_cast<size_t>(rank)]),
                  HasSubstr("rank " + std::to_string(culprit)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, FailureTest, ::testing::ValuesIn(Backends()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ebb
