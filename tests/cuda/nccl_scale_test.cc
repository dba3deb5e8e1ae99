// How the scale of a sum is applied over NCCL: exactly, and so that NCCL can use all that it has
// for plain sums. On the stand-in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "../comm/numbers.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/comm/nccl/operations.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/device.h"
#include "stand_in.h"
#include "thread_ranks.h"

namespace ebb::nccl_scale_test {
namespace {

using ::testing::HasSubstr;
using testing::Numbers;

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
    const absl::Status status = testing::RunOnGpu(kRanks, [&](World world) -> absl::Status {
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
    });
    EXPECT_TRUE(status.ok()) << status;
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
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank 0 in all-reduce of 4 spans, 192 bf16 elements, scale 0.5 on "
                        "communicator 'reduce': launching a reduction's kernel"));
}

}  // namespace
}  // namespace ebb::nccl_scale_test
