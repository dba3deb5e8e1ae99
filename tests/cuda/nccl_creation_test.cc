// Creation of the NCCL communicator where NCCL, CUDA or a rank fails or never comes, on the stand-in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/device.h"
#include "nccl_ranks.h"
#include "stand_in.h"
#include "thread_ranks.h"

namespace ebb::nccl_ranks {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using NcclCreationFailureTest = NcclFailureTest;

TEST_F(NcclCreationFailureTest, ALibraryThatIsTooOldIsRefused) {
  EXPECT_TRUE(OpenNccl().ok());
  stand_in::SetNcclVersion(21806);
  const absl::Status refused = OpenNccl().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(refused), AllOf(HasSubstr("ranks on GPUs cannot use NCCL 2.18.6"),
                                      HasSubstr("NCCL 2 from 2.19.0 on")));
}

TEST_F(NcclCreationFailureTest, CreationThatNeverFinishesEndsInTime) {
  stand_in::StallCreation();
  const auto seen = Seen(2, [](World& world) {
    return world.NewCommunicator({.name = "gather", .timeout_seconds = kShort}).status();
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Message(status), AllOf(HasSubstr("rank "), HasSubstr("'gather'"),
                                       HasSubstr("0.2 s"), HasSubstr("ebb.timeout_seconds")));
  }
}

TEST_F(NcclCreationFailureTest, RankThatDoesNotCreateIsNamed) {
  std::atomic<bool> done{false};
  const auto seen = Seen(2, [&](World& world) {
    if (world.rank() == 1) {
      done.wait(false);
      return absl::OkStatus();
    }
    const absl::Status status =
        world.NewCommunicator({.name = "gather", .timeout_seconds = kShort}).status();
    done = true;
    done.notify_all();
    return status;
  });
  EXPECT_EQ(seen[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Message(seen[0]), HasSubstr("rank 1"));
}

TEST_F(NcclCreationFailureTest, IdThatCannotBeMadeFailsCreationOnAllRanksAndMayBeRepeated) {
  stand_in::FailCall("ncclGetUniqueId", ncclSystemError);
  const auto seen = Seen(2, [](World& world) -> absl::Status {
    const absl::Status failed = world.NewCommunicator().status();
    EBB_RETURN_IF_ERROR(world.NewCommunicator().status());
    return failed;
  });
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(Message(status), HasSubstr("rank 0 failed: ncclGetUniqueId failed"));
  }
}

// A call that fails on one rank while all make a communicator.
class NcclCreationTest : public NcclCreationFailureTest,
                         public ::testing::WithParamInterface<std::pair<const char*, int>> {};

TEST_P(NcclCreationTest, AFailureOfOneRankIsAnErrorOnAllAtOnce) {
  const auto [function, code] = GetParam();
  std::atomic<int> ready{0};
  const auto seen = Seen(3, [&, function = function, code = code](World& world) -> absl::Status {
    // All have their devices now.
    EBB_ASSIGN_OR_RETURN(const Communicator earlier, world.NewCommunicator());
    if (++ready == 3) stand_in::FailCall(function, code);
    ready.notify_all();
    for (int n = ready; n < 3; n = ready) ready.wait(n);
    const absl::Status failed = world.NewCommunicator({.name = "gather"}).status();
    EXPECT_EQ(earlier.status(), failed);
    EXPECT_EQ(world.NewCommunicator({.name = "again"}).status(), failed);
    return failed;
  });
  EXPECT_FALSE(seen[0].ok());
  EXPECT_THAT(Message(seen[0]), AllOf(HasSubstr("rank "), HasSubstr(" failed: ")));
  for (const absl::Status& status : seen) EXPECT_EQ(status, seen[0]);
}

INSTANTIATE_TEST_SUITE_P(
    Calls, NcclCreationTest,
    ::testing::Values(std::pair("ncclCommInitRankConfig", int{ncclUnhandledCudaError}),
                      std::pair("cudaMalloc", int{cudaErrorMemoryAllocation}),
                      std::pair("cudaEventCreateWithFlags", int{cudaErrorInvalidValue})),
    [](const auto& test) { return std::string(test.param.first); });

TEST_F(NcclCreationFailureTest, CreationWithDifferentOptionsFailsOnAllRanksAndMayBeRepeated) {
  const auto seen = Seen(2, [](World& world) -> absl::Status {
    const absl::Status different =
        world.NewCommunicator({.name = world.rank() == 0 ? "a" : "b"}).status();
    EXPECT_EQ(different.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(Message(different), AllOf(HasSubstr("rank 0 'a'"), HasSubstr("rank 1 'b'")));
    EXPECT_EQ(world.NewCommunicator({.reduction_group = 3}).status().code(),
              absl::StatusCode::kInvalidArgument);
    return world.NewCommunicator().status();
  });
  for (const absl::Status& status : seen) EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace ebb::nccl_ranks
