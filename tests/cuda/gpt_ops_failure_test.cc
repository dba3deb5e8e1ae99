// How gpt's ops on a CUDA device fail, on the stand-in. ../gpt/kernels_test.cc checks their
// results.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/device/device.h"
#include "ops/cuda/product.h"
#include "ops/ops.h"
#include "small_ops.h"
#include "stand_in.h"

namespace ebb::gpt::gpt_ops_failure_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// For all calls below, in memory that the test reads too.
struct Memory {
  float input[kRows * kWidth] = {}, output[kRows * kWidth] = {}, square[kWidth * kWidth] = {};
  float weight[kWidth] = {}, bias[kWidth] = {}, mean[kRows] = {}, deviation[kRows] = {};
  int32_t ids[kRows] = {};
};

void Norm(Ops& ops, Memory& memory) {
  ops.Norm({.input = memory.input,
            .weight = memory.weight,
            .bias = memory.bias,
            .output = memory.output,
            .mean = memory.mean,
            .reciprocal_deviation = memory.deviation,
            .rows = kRows,
            .width = kWidth});
}

struct Failure {
  const char* kernel;
  const char* named;  // in the message
  std::function<void(Ops&, Memory&)> call;
};
void PrintTo(const Failure& failure, std::ostream* out) {
  *out << failure.kernel;
}

std::vector<Failure> Failures() {
  const auto norm_backward = [](Ops& ops, Memory& m) {
    ops.NormBackward({.input = m.input,
                      .weight = m.weight,
                      .mean = m.mean,
                      .reciprocal_deviation = m.deviation,
                      .output_gradient = m.input,
                      .input_gradient = m.output,
                      .weight_gradient = {m.square},
                      .bias_gradient = {m.square + kWidth},
                      .rows = kRows,
                      .width = kWidth});
  };
  const auto embed_backward = [](Ops& ops, Memory& m) {
    ops.EmbedBackward({.output_gradient = m.input,
                       .ids = m.ids,
                       .token_gradient = {m.square},
                       .position_gradient = {m.output},
                       .sequences = 1,
                       .tokens = kRows,
                       .width = kWidth,
                       .vocabulary = kWidth,
                       .context = kRows});
  };
  const auto column_sums = [](Ops& ops, Memory& m) {
    ops.Matmul({.a = m.input,
                .a_transposed = true,
                .b = m.input,
                .c = {m.square},
                .a_sums = {.data = m.bias, .beta = 1},
                .m = kWidth,
                .n = kWidth,
                .k = kRows});
  };
  return {{"NormKernel", "a layer norm", &Norm},
          {"NormBackwardKernel", "a layer norm's backward", norm_backward},
          {"AddPartsKernel", "a layer norm's backward", norm_backward},
          {"PlaceRowsKernel", "an embedding's backward", embed_backward},
          {"StartsKernel", "an embedding's backward", embed_backward},
          {"TableSumsKernel", "an embedding's backward", embed_backward},
          {"ColumnSumsKernel", "sums of columns", column_sums},
          {"EmbedKernel", "an embedding",
           [](Ops& ops, Memory& m) {
             ops.Embed({.token_table = m.square,
                        .position_table = m.input,
                        .ids = m.ids,
                        .output = m.output,
                        .sequences = 1,
                        .tokens = kRows,
                        .width = kWidth});
           }},
          {"CrossEntropyKernel", "cross-entropy",
           [](Ops& ops, Memory& m) {
             ops.CrossEntropy({.logits = m.input,
                               .targets = m.ids,
                               .losses = m.mean,
                               .rows = kRows,
                               .vocabulary = kWidth});
           }},
          {"MeanKernel", "a mean", [](Ops& ops, Memory& m) { ops.Mean(m.input, kRows, m.mean); }}};
}

class GptOpsFailureTest : public ::testing::TestWithParam<Failure> {
 protected:
  void TearDown() override { stand_in::Reset(); }
};

TEST_P(GptOpsFailureTest, ALaunchThatFailsIsNamedAndNothingIsEnqueuedAnyMore) {
  SmallOpsOn<Memory> small;
  Ops& ops = *small.ops;
  GetParam().call(ops, *small.memory);
  EXPECT_TRUE(ops.status().ok()) << ops.status();
  small.stream.WaitIdle();

  stand_in::FailCall(GetParam().kernel, cudaErrorInvalidValue);
  GetParam().call(ops, *small.memory);
  const absl::Status status = ops.status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(std::string("launching ") + GetParam().named),
                    HasSubstr("an error of the stand-in")));

  small.memory->mean[0] = 5;
  Norm(ops, *small.memory);
  small.stream.WaitIdle();
  EXPECT_EQ(small.memory->mean[0], 5);
  EXPECT_EQ(ops.status(), status);
}

INSTANTIATE_TEST_SUITE_P(Kernels, GptOpsFailureTest, ::testing::ValuesIn(Failures()),
                         [](const ::testing::TestParamInfo<Failure>& failure) {
                           return std::string(failure.param.kernel);
                         });

TEST(GptOpsFailure, ADeviceWithoutCodeInTheBuildIsAnError) {
  const Device device = *Device::Cuda();
  const Buffer scratch = ScratchFor(device, DType::kBFloat16);
  stand_in::FailCall("LoadKernels", cudaErrorNoKernelImageForDevice);
  EXPECT_THAT(
      std::string(NewOps(device, DType::kBFloat16, kLimits, scratch.span()).status().message()),
      AllOf(HasSubstr("loading gpt's kernels"), HasSubstr("CUDA device 0 (stand-in)")));
  EXPECT_TRUE(NewOps(device, DType::kBFloat16, kLimits, scratch.span()).ok());
  stand_in::Reset();
}

TEST(GptOpsFailure, ACublasLtOfAnotherMajorVersionIsRefused) {
  EXPECT_TRUE(cuda::OpenCublasLt().ok());
  stand_in::SetCublasLtVersion((CUBLAS_VER_MAJOR - 1) * 10000 + 900);
  const absl::Status older = cuda::OpenCublasLt().status();
  EXPECT_EQ(older.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(
      std::string(older.message()),
      AllOf(HasSubstr("matrix products on a GPU cannot use cuBLASLt " +
                      std::to_string(CUBLAS_VER_MAJOR - 1) + ".9.0"),
            HasSubstr(std::to_string(CUBLAS_VER_MAJOR) + ".0.0"), HasSubstr("--device cpu")));
  stand_in::SetCublasLtVersion((CUBLAS_VER_MAJOR + 1) * 10000);
  EXPECT_FALSE(cuda::OpenCublasLt().ok());
  stand_in::Reset();
}

TEST(GptOpsFailure, ScratchThatIsNotAlignedForCublasLtIsRefused) {
  const Device device = *Device::Cuda();
  const Buffer scratch =
      *device.Allocate(64 + ScratchBytes(device, DType::kFloat32, kLimits), "scratch");
  EXPECT_THAT(
      std::string(
          NewOps(device, DType::kFloat32, kLimits, scratch.span().subspan(64)).status().message()),
      HasSubstr("a multiple of 256 bytes"));
}

TEST(GptOpsFailure, TooLittleScratchIsRefused) {
  const Device device = *Device::Cuda();
  const Buffer scratch = *device.Allocate(256, "scratch");
  EXPECT_THAT(
      std::string(NewOps(device, DType::kFloat32, kLimits, scratch.span()).status().message()),
      HasSubstr("256 bytes of scratch"));
}

}  // namespace
}  // namespace ebb::gpt::gpt_ops_failure_test
