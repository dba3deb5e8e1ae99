// Creation of the NCCL communicator where NCCL, CUDA or a rank fails or never comes, on the stand-in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "../comm/numbers.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/comm/nccl/operations.h"
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
using testing::Numbers;

using NcclCreationFailureTest = NcclFailureTest;

TEST_F(NcclCreationFailureTest, ALibraryThatIsTooOldIsRefused) {
  EXPECT_OK(OpenNccl());
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
  for (const absl::Status& status : seen) EXPECT_OK(status);
}

// How the scale of a sum is applied over NCCL: exactly, and so that NCCL can use all that it has
// for plain sums. On the stand-in.

class NcclScaleTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;
  static constexpr int64_t kCount = 9;  // each rank's part of the scattered numbers

  void TearDown() override {
    EXPECT_EQ(stand_in::Alive(), stand_in::Live{}) << "something was not given back";
    stand_in::Reset();
  }

  // Checks every element of a reduce-scatter if rank r sends r + 1 times `first`. Also counts the
  // operators that all ranks made.
  void ExpectOneRounding(DType dtype, float first, float scale) {
    testing::ExpectOk(testing::RunOnGpu(kRanks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
      EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
      EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("comm"));
      EBB_ASSIGN_OR_RETURN(const Buffer memory,
                           device.Allocate(kRanks * kCount * SizeOf(dtype), "test"));
      Numbers numbers(dtype, kRanks * kCount);
      for (int64_t i = 0; i < numbers.size(); ++i)
        numbers.Set(i, first * static_cast<float>((world.rank() + 1) * (i % 5 - 2)));
      stream.Copy(memory.data(), numbers.at(0), memory.bytes());
      std::byte* const mine = memory.data() + world.rank() * kCount * SizeOf(dtype);
      const CollectiveSpan span = {.send = memory.data(), .receive = mine, .count = kCount};
      EBB_RETURN_IF_ERROR(communicator.ReduceScatter(stream, {&span, 1}, dtype, scale));
      Numbers result(dtype, kCount), expected(dtype, kCount);
      stream.WaitIdle();
      stream.Copy(result.at(0), mine, kCount * SizeOf(dtype));
      stream.WaitIdle();
      for (int64_t i = 0; i < kCount; ++i) {
        const int64_t of = world.rank() * kCount + i;
        expected.Set(i, first * static_cast<float>(6 * (of % 5 - 2)) * scale);
        EXPECT_EQ(result.Get(i), expected.Get(i)) << "element " << of;
      }
      return communicator.status();
    }));
  }
};

TEST_F(NcclScaleTest, SumsThatHaveTheRangeArePlain) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const float scale : {1.0f, 1.0f / 3, 1.0f / 56, 0.0f, 2.5f}) {
      const NcclScale parts = ScaleFor(
          {.kind = CollectiveKind::kReduceScatter, .dtype = dtype, .scale = scale}, kRanks);
      EXPECT_EQ(parts.inputs, 1);
      EXPECT_EQ(parts.sum, scale);
    }
  }
  // A call that makes an operator would fail.
  stand_in::FailCall("ncclRedOpCreatePreMulSum", ncclInternalError);
  ExpectOneRounding(DType::kBFloat16, 1, 1.0f / 6);
  ExpectOneRounding(DType::kFloat32, 1, 1.0f / 6);
}

TEST_F(NcclScaleTest, AMeanOverThreeRanksIsRoundedOnce) {
  // bf16's third is 0.2% too large, and so would be every mean.
  ExpectOneRounding(DType::kBFloat16, 5, 1.0f / 3);
  ExpectOneRounding(DType::kFloat16, 5, 1.0f / 3);
  ExpectOneRounding(DType::kFloat32, 5, 1.0f / 3);
}

TEST_F(NcclScaleTest, HalfSumsNeitherOverflowNorRoundTheScale) {
  // The sum of three is beyond fp16's 65504, and the scale below its normal numbers.
  ExpectOneRounding(DType::kFloat16, 6144, 1.0f / 393216);
  for (const int ranks : {1, 2, 3, 8, 384}) {
    for (const float scale : {1.0f / static_cast<float>(ranks), 1.0f / 393216, -0.75f, 0.0f}) {
      const NcclScale parts = ScaleFor(
          {.kind = CollectiveKind::kAllReduce, .dtype = DType::kFloat16, .scale = scale}, ranks);
      EXPECT_EQ(parts.inputs * parts.sum, scale);
      if (scale == 1) continue;
      EXPECT_LE(parts.inputs * static_cast<float>(ranks), 1);
      EXPECT_EQ(static_cast<float>(Float16(parts.inputs)), parts.inputs);
    }
  }
  // A result that does not fit may come from a sum that does not fit.
  EXPECT_EQ(ScaleFor({.kind = CollectiveKind::kAllReduce, .dtype = DType::kFloat16, .scale = 2}, 8)
                .inputs,
            1);
}

// For a group of spans, as for one.
TEST_F(NcclScaleTest, AGroupIsMultipliedByOneKernelThatMayFail) {
  const absl::Status status = testing::RunOnGpu(1, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "reduce"}));
    EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
    EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("comm"));
    EBB_ASSIGN_OR_RETURN(const Buffer memory, device.Allocate(4096, "test"));
    std::vector<CollectiveSpan> spans;
    for (const int64_t at : {0, 512, 1024, 2048}) {
      std::byte* const data = memory.data() + at;
      spans.push_back({.send = data, .receive = data, .count = at == 512 ? 0 : 64});
    }
    const auto enqueue = [&] {
      return communicator.AllReduce(stream, spans, DType::kBFloat16, ReduceOp::kSum, 0.5f);
    };
    stand_in::FailCall("cudaLaunchKernel", cudaErrorLaunchOutOfResources, /*nth=*/2);
    EBB_RETURN_IF_ERROR(enqueue());
    EBB_RETURN_IF_ERROR(communicator.status());
    EBB_RETURN_IF_ERROR(enqueue());
    stream.WaitIdle();
    return communicator.status();
  });
  EXPECT_THAT(status,
              testing::Says("rank 0 in all-reduce of 4 spans, 192 bf16 elements, scale 0.5 on "
                            "communicator 'reduce': launching a reduction's kernel"));
}

}  // namespace
}  // namespace ebb::nccl_ranks
