// The NCCL communicator if a rank fails, never comes or is wrong, and if NCCL or CUDA fail: every
// rank gets a Status that says so, nothing hangs and no memory stays allocated. On the stand-in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/comm/nccl/channel.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/comm/nccl/nccl_world.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/device/device.h"
#include "nccl_ranks.h"
#include "stand_in.h"
#include "tests/status.h"
#include "thread_ranks.h"

namespace ebb::nccl_ranks {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(NcclFailureTest, AMissingCallEndsAllWaitsInTime) {
  const auto seen = Seen(3, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator,
                         world.NewCommunicator({.name = "gather", .timeout_seconds = kShort}));
    Gpu gpu(world);
    if (world.rank() != 2) {
      EBB_RETURN_IF_ERROR(communicator.Barrier(gpu.stream));
      return Outcome(communicator, gpu.stream);
    }
    while (communicator.status().ok()) std::this_thread::yield();
    return communicator.status();
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("rank "), HasSubstr("has waited 0.2 s for other ranks"),
                      HasSubstr("in barrier on communicator 'gather'"),
                      HasSubstr("raise ebb.timeout_seconds")));
  }
}

// The others may wait on the device, or on the host for NCCL's part.
TEST_F(NcclFailureTest, RanksThatCallMoreLearnAtOnceWhichRankHasLeft) {
  for (const bool on_host : {false, true}) {
    std::latch have_met(3);
    const auto seen = Seen(3, [&](World& world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Communicator all, world.NewCommunicator({.name = "all"}));
      EBB_ASSIGN_OR_RETURN(const World reversed, world.Split(0, 2 - world.rank()));
      EBB_ASSIGN_OR_RETURN(Communicator gather, reversed.NewCommunicator({.name = "gather"}));
      Gpu gpu(world);
      EBB_RETURN_IF_ERROR(gather.Barrier(gpu.stream));
      EBB_RETURN_IF_ERROR(Outcome(gather, gpu.stream));
      have_met.arrive_and_wait();
      if (world.rank() == 0) return absl::OkStatus();
      if (on_host) stand_in::StallLaunches();
      EBB_RETURN_IF_ERROR(gather.Barrier(gpu.stream));
      const absl::Status left = Outcome(gather, gpu.stream);
      EXPECT_EQ(all.status(), left);
      return left;
    });
    EXPECT_OK(seen[0]);
    for (const int rank : {1, 2}) {
      EXPECT_EQ(seen[static_cast<size_t>(rank)].code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(Message(seen[static_cast<size_t>(rank)]),
                  HasSubstr("rank 2 (world rank 0) has left communicator 'gather': it has "
                            "destroyed it after 1 calls, of which rank "));
    }
  }
}

TEST_F(NcclFailureTest, RanksMayLeaveOneAfterTheOther) {
  std::atomic<int> left{0};
  const auto seen = Seen(3, [&](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator unaffected, world.NewCommunicator());
    Gpu gpu(world);
    {
      EBB_ASSIGN_OR_RETURN(Communicator goes, world.NewCommunicator());
      EBB_RETURN_IF_ERROR(goes.Barrier(gpu.stream));
      const CollectiveSpan span = gpu.InPlace();
      // The third rank does not count an exchange of the other two.
      if (world.rank() == 1) EBB_RETURN_IF_ERROR(goes.Send(gpu.stream, {&span, 1}, kType, 2));
      if (world.rank() == 2) EBB_RETURN_IF_ERROR(goes.Receive(gpu.stream, {&span, 1}, kType, 1));
      EBB_RETURN_IF_ERROR(Outcome(goes, gpu.stream));
      for (int n = left; n < world.rank(); n = left) left.wait(n);
    }
    ++left;
    left.notify_all();
    for (int i = 0; i < 3; ++i) EBB_RETURN_IF_ERROR(unaffected.Barrier(gpu.stream));
    EBB_RETURN_IF_ERROR(Outcome(unaffected, gpu.stream));
    return world.NewCommunicator().status();
  });
  for (const absl::Status& status : seen) EXPECT_OK(status);
}

TEST_F(NcclFailureTest, LaunchThatIsNeverReadyEndsInTime) {
  const auto seen = Seen(2, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator,
                         world.NewCommunicator({.timeout_seconds = kShort}));
    Gpu gpu(world);
    stand_in::StallLaunches();
    const CollectiveSpan span = gpu.InPlace();
    EBB_RETURN_IF_ERROR(communicator.AllReduce(gpu.stream, {&span, 1}, kType));
    return Outcome(communicator, gpu.stream);
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Message(status), HasSubstr("all-reduce of 1 span, 4 fp32 elements"));
  }
}

TEST_F(NcclFailureTest, DifferentCallsEndInTime) {
  const auto seen = Seen(2, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator,
                         world.NewCommunicator({.timeout_seconds = kShort}));
    Gpu gpu(world);
    const CollectiveSpan span = gpu.InPlace(world.rank() == 0 ? 4 : 8);
    EBB_RETURN_IF_ERROR(communicator.AllReduce(gpu.stream, {&span, 1}, kType));
    return Outcome(communicator, gpu.stream);
  });
  for (const absl::Status& status : seen)
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(NcclFailureTest, AnAsynchronousErrorIsAnErrorOnAllRanks) {
  const auto seen = Seen(3, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "reduce"}));
    EBB_ASSIGN_OR_RETURN(Communicator other, world.NewCommunicator({.name = "gather"}));
    Gpu gpu(world);
    EBB_RETURN_IF_ERROR(communicator.Barrier(gpu.stream));
    EBB_RETURN_IF_ERROR(Outcome(communicator, gpu.stream));
    if (world.rank() == 1) stand_in::FailCommunicators(1, ncclRemoteError);
    // Rank 2 does not call, so only the error ends this.
    if (world.rank() != 2) EBB_RETURN_IF_ERROR(communicator.Barrier(gpu.stream));
    while (communicator.status().ok()) std::this_thread::yield();
    gpu.stream.WaitIdle();
    EXPECT_EQ(other.status(), communicator.status());
    return communicator.status();
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("rank 1"), HasSubstr("'reduce'"),
                      HasSubstr("remote process exited"), HasSubstr("said the stand-in")));
  }
}

// A thread that watches a call that does not return must be able to report that it is late.
TEST_F(NcclFailureTest, AsynchronousErrorsAreAskedForWithoutWaitingForACall) {
  const NcclLibrary& nccl = **LoadNccl();
  const std::shared_ptr<NcclChannel> channel =
      *NcclChannel::Create(nccl, /*device=*/0, std::make_shared<WorldFailure>());
  testing::ExpectOk(channel->Call("a call", [&](ncclComm_t&) {
    std::thread watch([&] { EXPECT_OK(channel->AsynchronousError()); });
    watch.join();
    return ncclSuccess;
  }));
}

// A call of an operation that fails on one rank.
class NcclOperationTest : public NcclFailureTest,
                          public ::testing::WithParamInterface<const char*> {};

TEST_P(NcclOperationTest, AFailureIsStickyOnAllRanksAndLaterOperationsDoNothing) {
  std::atomic<int> ready{0};
  const auto seen = Seen(2, [&](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "reduce"}));
    Gpu gpu(world);
    if (++ready == 2) stand_in::FailCall(GetParam(), ncclInternalError);
    ready.notify_all();
    for (int n = ready; n < 2; n = ready) ready.wait(n);
    const CollectiveSpan span = gpu.InPlace();
    // For fp16, where inputs are multiplied.
    EBB_RETURN_IF_ERROR(
        communicator.AllReduce(gpu.stream, {&span, 1}, DType::kFloat16, ReduceOp::kSum, 0.5f));
    const absl::Status status = Outcome(communicator, gpu.stream);
    for (int i = 0; i < 3; ++i)
      EBB_RETURN_IF_ERROR(communicator.AllReduce(gpu.stream, {&span, 1}, kType));
    EXPECT_EQ(Outcome(communicator, gpu.stream), status);
    return status;
  });
  EXPECT_EQ(seen[0].code(), absl::StatusCode::kInternal);
  EXPECT_THAT(Message(seen[0]), AllOf(HasSubstr("rank "), HasSubstr("'reduce'"),
                                      HasSubstr("all-reduce of 1 span, 4 fp16 elements")));
  EXPECT_EQ(seen[1], seen[0]);
}

INSTANTIATE_TEST_SUITE_P(Calls, NcclOperationTest,
                         ::testing::Values("ncclAllReduce", "ncclGroupEnd",
                                           "ncclRedOpCreatePreMulSum"),
                         [](const auto& test) { return std::string(test.param); });

TEST_F(NcclFailureTest, AFailedDeviceIsAnErrorOnAll) {
  const auto seen = Seen(2, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "reduce"}));
    Gpu gpu(world);
    EBB_RETURN_IF_ERROR(communicator.Barrier(gpu.stream));
    EBB_RETURN_IF_ERROR(Outcome(communicator, gpu.stream));
    if (world.rank() == 1) {
      stand_in::FailCall("cudaMemsetAsync", cudaErrorIllegalAddress);
      gpu.stream.Zero(gpu.memory.data(), 16);
      EBB_RETURN_IF_ERROR(communicator.Barrier(gpu.stream));
    }
    while (communicator.status().ok()) std::this_thread::yield();
    return Outcome(communicator, gpu.stream);
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(Message(status), AllOf(HasSubstr("rank 1 in barrier on communicator 'reduce'"),
                                       HasSubstr("cudaMemsetAsync on stream 'comm'")));
  }
}

TEST_F(NcclFailureTest, AbortEndsTheWaitsOfAllRanks) {
  const auto seen = Seen(3, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "gather"}));
    Gpu gpu(world);
    if (world.rank() == 2) {
      communicator.Abort(absl::CancelledError("interrupted"));
    } else {
      EBB_RETURN_IF_ERROR(communicator.Barrier(gpu.stream));
    }
    return Outcome(communicator, gpu.stream);
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("rank 2"), HasSubstr("'gather'"), HasSubstr("interrupted")));
  }
}

TEST_F(NcclFailureTest, WorldThatFailsEndsAllItsCommunicatorsAndMakesNoNewOnes) {
  const auto seen = Seen(4, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator all, world.NewCommunicator());
    EBB_ASSIGN_OR_RETURN(const World half, world.Split(world.rank() / 2, 0));
    EBB_ASSIGN_OR_RETURN(Communicator part, half.NewCommunicator());
    Gpu gpu(world);
    if (world.rank() == 3) {
      world.Fail(absl::DataLossError("the disk is gone"));
    } else {
      EBB_RETURN_IF_ERROR(all.Barrier(gpu.stream));
    }
    gpu.stream.WaitIdle();
    EXPECT_EQ(part.status(), all.status());
    EXPECT_EQ(world.NewCommunicator().status(), all.status());
    return all.status();
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(Message(status), "rank 3 failed: the disk is gone");
  }
}

// A killed process destroys nothing, so its communicators stay until the others know.
TEST_F(NcclFailureTest, ARankIsNamedWhenItsProcessEnds) {
  std::vector<absl::Status> seen(3);
  std::vector<Communicator> of_the_dead;
  std::latch others_know(2);
  std::atomic<int> created{0};
  const absl::Status run = testing::RunOnGpus(3, kRanksMax, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    created.fetch_add(1);
    created.notify_all();
    if (world.rank() == 1) {
      for (int seen_created = created; seen_created < 3; seen_created = created)
        created.wait(seen_created);
      of_the_dead.push_back(std::move(communicator));
      return absl::AbortedError("chosen");
    }
    Gpu gpu(world);
    EBB_RETURN_IF_ERROR(communicator.Barrier(gpu.stream));
    seen[static_cast<size_t>(world.rank())] = Outcome(communicator, gpu.stream);
    others_know.arrive_and_wait();
    if (world.rank() == 0) of_the_dead.clear();
    return absl::OkStatus();
  });
  EXPECT_EQ(run.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Message(seen[0]), "rank 1 has ended");
  EXPECT_EQ(Message(seen[2]), "rank 1 has ended");
}

// Each communicator has a kernel on the device that waits for the dead rank. Aborting one
// communicator waits for the device, and so for all of them.
TEST_F(NcclFailureTest, TheEndOfARanksProcessEndsAllCommunicatorsOfTheOthers) {
  constexpr int kRanks = 3, kCommunicators = 4;
  std::vector<absl::Status> seen(kRanks);
  std::vector<Communicator> of_the_dead;
  std::latch enqueued(kRanks), others_know(kRanks - 1);
  const absl::Status run = testing::RunOnGpus(kRanks, kRanksMax, [&](World world) -> absl::Status {
    std::vector<Communicator> communicators;
    std::vector<Gpu> gpus;
    for (int i = 0; i < kCommunicators; ++i) {
      gpus.emplace_back(world);
      EBB_ASSIGN_OR_RETURN(Communicator made, world.NewCommunicator());
      communicators.push_back(std::move(made));
    }
    if (world.rank() == 1) {
      of_the_dead = std::move(communicators);
      enqueued.arrive_and_wait();
      return absl::AbortedError("chosen");
    }
    for (size_t i = 0; i < kCommunicators; ++i)
      EBB_RETURN_IF_ERROR(communicators[i].Barrier(gpus[i].stream));
    enqueued.arrive_and_wait();
    for (size_t i = 0; i < kCommunicators; ++i)
      seen[static_cast<size_t>(world.rank())].Update(Outcome(communicators[i], gpus[i].stream));
    others_know.arrive_and_wait();
    if (world.rank() == 0) of_the_dead.clear();
    return absl::OkStatus();
  });
  EXPECT_EQ(run.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Message(seen[0]), "rank 1 has ended");
  EXPECT_EQ(Message(seen[2]), "rank 1 has ended");
}

TEST_F(NcclFailureTest, ACreationThatARankDoesNotCallEndsInTime) {
  const auto seen = Seen(2, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    if (world.rank() == 0)
      return world.NewCommunicator({.name = "gather", .timeout_seconds = kShort}).status();
    while (communicator.status().ok()) std::this_thread::yield();
    return communicator.status();
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Message(status), HasSubstr("communicator 'gather' has waited 0.2 s for rank 1"));
  }
}

TEST_F(NcclFailureTest, CallsThatNcclCannotDoAreRefusedAtOnce) {
  const auto seen = Seen(2, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    Gpu gpu(world);
    Stream cpu = *Device::Cpu(1).NewStream("cpu");
    const CollectiveSpan span = gpu.InPlace();
    const std::vector<std::pair<absl::Status, const char*>> refused = {
        {communicator.AllReduce(gpu.stream, {&span, 1}, DType::kInt8), "int8"},
        {communicator.AllReduce(gpu.stream, {&span, 1}, kType, ReduceOp::kMax, 0.5f), "maxima"},
        {communicator.AllReduce(cpu, {&span, 1}, kType), "need a stream of CUDA device"},
    };
    for (const auto& [status, text] : refused) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(Message(status), HasSubstr(text));
    }
    EBB_RETURN_IF_ERROR(
        communicator.AllReduce(gpu.stream, {&span, 1}, DType::kInt8, ReduceOp::kMax));
    return Outcome(communicator, gpu.stream);
  });
  for (const absl::Status& status : seen) EXPECT_OK(status);
}

TEST_F(NcclFailureTest, WorldNeedsACudaDevice) {
  const auto alone = std::make_shared<SharedRank>(SharedWorld::OfThreads(1)[0]);
  EXPECT_EQ(NewNcclWorld(alone, Device::Cpu(1)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(NcclFailureTest, MoreOperationsAreEnqueuedThanAreUnderWay) {
  const auto seen = Seen(2, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    Gpu gpu(world);
    const CollectiveSpan span = gpu.InPlace();
    for (int i = 0; i < 1000; ++i)
      EBB_RETURN_IF_ERROR(
          communicator.AllReduce(gpu.stream, {&span, 1}, kType, ReduceOp::kSum, 0.5f));
    EBB_RETURN_IF_ERROR(Outcome(communicator, gpu.stream));
    EXPECT_EQ(communicator.bytes_enqueued(), 1000 * 16);
    return absl::OkStatus();
  });
  for (const absl::Status& status : seen) EXPECT_OK(status);
}

}  // namespace
}  // namespace ebb::nccl_ranks
