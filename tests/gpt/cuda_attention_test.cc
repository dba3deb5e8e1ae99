// The kernels of attention themselves, with the host in place of the device: each launch runs its
// blocks at once, in an order that the test chooses.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "host_matrix_thread.h"
#include "ops/cuda/attention_plain.h"
#include "ops_fixture.h"
#include "reference.h"

namespace ebb::kernel {
namespace {

unsigned order_of_blocks = 0;  // 0: ascending, else a seed
int plain_launches = 0;

}  // namespace

template <class Kernel>
cudaError_t LaunchKernel(cudaStream_t, const Grid& grid, const typename Kernel::Arrays& arrays) {
  plain_launches += std::is_base_of_v<gpt::cuda::Plain, Kernel>;
  std::vector<int64_t> order(static_cast<size_t>(grid.blocks));
  std::iota(order.begin(), order.end(), 0);
  if (order_of_blocks != 0)
    std::shuffle(order.begin(), order.end(), std::minstd_rand(order_of_blocks));
  for (const int64_t block : order) {
    stand_in::RunBlock(block, grid.blocks, Kernel::kThreads, grid.shared_bytes,
                       [&](stand_in::HostThread& thread) { Kernel::Run(thread, arrays); });
  }
  return cudaSuccess;
}

template <class... Kernels>
cudaError_t LoadKernels() {
  return cudaSuccess;
}

}  // namespace ebb::kernel

#include "ops/cuda/attention_backward.cu"
#include "ops/cuda/attention_forward.cu"

namespace ebb::gpt {
namespace {

struct Shape {
  int64_t sequences = 1, tokens = 1, heads = 1, depth = 8;

  int64_t width() const { return heads * depth; }
  int64_t rows() const { return sequences * tokens; }
};

// Every array begins as NaNs, the scratch too.
struct Result {
  Result(DType dtype, const Shape& x)
      : output(dtype, x.rows() * x.width()),
        gradient(dtype, x.rows() * 3 * x.width()),
        log_sum_exp(DType::kFloat32, x.sequences * x.heads * x.tokens) {}
  bool operator==(const Result&) const = default;
  Array output, gradient, log_sum_exp;
};

AttentionArrays Forward(const Shape& x, const Array& qkv, Result& result) {
  return {.qkv = qkv.data(),
          .output = result.output.data(),
          .log_sum_exp = static_cast<float*>(result.log_sum_exp.data()),
          .sequences = x.sequences,
          .tokens = x.tokens,
          .heads = x.heads,
          .width = x.width()};
}
AttentionBackwardArrays Backward(const Shape& x, const Array& qkv, const Array& dy,
                                 Result& result) {
  return {.qkv = qkv.data(),
          .output = result.output.data(),
          .output_gradient = dy.data(),
          .log_sum_exp = static_cast<const float*>(result.log_sum_exp.data()),
          .qkv_gradient = result.gradient.data(),
          .sequences = x.sequences,
          .tokens = x.tokens,
          .heads = x.heads,
          .width = x.width()};
}

Result RunBoth(const Shape& x, const Array& qkv, const Array& dy) {
  Result result(qkv.dtype(), x);
  EXPECT_EQ(cuda::LaunchAttention(nullptr, qkv.dtype(), Forward(x, qkv, result)), cudaSuccess);
  Array scratch(DType::kFloat32,
                cuda::AttentionScratchBytes(x.sequences, x.tokens, x.heads) / int64_t{4});
  EXPECT_EQ(cuda::LaunchAttentionBackward(nullptr, qkv.dtype(), Backward(x, qkv, dy, result),
                                          scratch.data()),
            cudaSuccess);
  return result;
}

class CudaAttentionTest : public testing::TestWithParam<DType> {
 protected:
  ~CudaAttentionTest() override { kernel::order_of_blocks = 0; }

  static Array Random(const Shape& x, int64_t columns, uint64_t seed, double deviation = 1) {
    return Array::Random(GetParam(), x.rows() * columns * x.width(), seed, deviation);
  }
  // Sums over at most some hundred products in fp32 lose a few of its roundings. On tensor cores
  // each weight and each score's gradient is rounded to the dtype before the product, and backward
  // reads a rounded output. So sums lose a rounding of their largest terms twice.
  static double Error() { return GetParam() == DType::kFloat32 ? 1e-5 : 2 * Rounding(GetParam()); }

  // A score of 500 in fp32 is off by 500 * 2^-24 and more, and so is its weight, relatively.
  static double ScoreError() { return Error() + 1e-3; }

  static void ExpectAgreesWithFp64(const Shape& x) {
    const Array qkv = Random(x, 3, 1), dy = Random(x, 1, 2);
    const Result result = RunBoth(x, qkv, dy);
    const std::string what =
        "tokens " + std::to_string(x.tokens) + ", head width " + std::to_string(x.depth);
    reference::Values output, log_sum_exp, gradient;
    for (int64_t s = 0; s < x.sequences; ++s) {
      const auto of_sequence = [&](const Array& all) {
        const reference::Values values = all.Values();
        const auto count = static_cast<int64_t>(values.size()) / x.sequences;
        return reference::Values(values.begin() + s * count, values.begin() + (s + 1) * count);
      };
      const auto append = [](reference::Values& to, const reference::Values& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(output, reference::Attention(of_sequence(qkv), x.tokens, x.heads));
      const auto pass =
          reference::AttentionBackward(of_sequence(qkv), of_sequence(dy), x.tokens, x.heads);
      append(log_sum_exp, pass.log_sum_exp);
      append(gradient, pass.qkv_gradient);
    }
    ExpectClose(result.output, output, Error(), "output, " + what);
    ExpectClose(result.log_sum_exp, log_sum_exp, 1e-6, "log_sum_exp, " + what);
    ExpectClose(result.gradient, gradient, Error(), "gradient, " + what);
  }
};

TEST_P(CudaAttentionTest, AgreesWithFp64) {
  for (int64_t tokens : {1, 2, 31, 64, 65, 130}) {
    ExpectAgreesWithFp64({.sequences = 2, .tokens = tokens, .heads = 2, .depth = 64});
    if (HasFatalFailure()) return;
  }
}

// Widths of 5, of 6 and of more than 128 are not for tensor cores.
TEST_P(CudaAttentionTest, AgreesWithFp64ForAnyHeadWidth) {
  for (int64_t depth : {5, 6, 8, 16, 80, 96, 128, 130, 264}) {
    ExpectAgreesWithFp64({.tokens = 130, .heads = depth < 96 ? 2 : 1, .depth = depth});
    if (HasFatalFailure()) return;
  }
}

// Scores of some hundreds, for which exp would be infinite or 0: one key has nearly all the weight,
// and it differs from tile to tile.
TEST_P(CudaAttentionTest, TakesLargeScores) {
  const Shape x = {.sequences = 1, .tokens = 200, .heads = 1, .depth = 64};
  const Array qkv = Random(x, 3, 1, 12), dy = Random(x, 1, 2);
  const Result result = RunBoth(x, qkv, dy);
  const auto pass = reference::AttentionBackward(qkv.Values(), dy.Values(), x.tokens, x.heads);
  EXPECT_GT(*std::max_element(pass.log_sum_exp.begin(), pass.log_sum_exp.end()), 400);
  ExpectClose(result.output, reference::Attention(qkv.Values(), x.tokens, x.heads), ScoreError(),
              "output");
  ExpectClose(result.log_sum_exp, pass.log_sum_exp, 1e-6, "log_sum_exp");
  ExpectClose(result.gradient, pass.qkv_gradient, ScoreError(), "gradient");
}

TEST_P(CudaAttentionTest, AgreesWithTheCpu) {
  const Shape x = {.sequences = 2, .tokens = 100, .heads = 3, .depth = 64};
  const Array qkv = Random(x, 3, 1), dy = Random(x, 1, 2);
  const Result gpu = RunBoth(x, qkv, dy);
  Result cpu(GetParam(), x);
  const TestOps ops(Device::Cpu(1), GetParam(),
                    {.rows = x.rows(), .tokens = x.tokens, .width = x.width(), .heads = x.heads});
  ops->Attention(Forward(x, qkv, cpu));
  ops->AttentionBackward(Backward(x, qkv, dy, cpu));
  // Each differs by at most this much.
  ExpectClose(gpu.output, cpu.output.Values(), 2 * Error(), "output");
  ExpectClose(gpu.log_sum_exp, cpu.log_sum_exp.Values(), 1e-6, "log_sum_exp");
  ExpectClose(gpu.gradient, cpu.gradient.Values(), 2 * Error(), "gradient");
}

TEST_P(CudaAttentionTest, GivesTheSameBitsInAnyOrderOfBlocks) {
  const Shape x = {.sequences = 2, .tokens = 130, .heads = 2, .depth = 32};
  const Array qkv = Random(x, 3, 1), dy = Random(x, 1, 2);
  const Result first = RunBoth(x, qkv, dy);
  for (unsigned seed : {0u, 1u}) {
    kernel::order_of_blocks = seed;
    EXPECT_EQ(RunBoth(x, qkv, dy), first) << "order " << seed;
  }
}

TEST_P(CudaAttentionTest, NothingComesFromLaterTokens) {
  const Shape x = {.sequences = 1, .tokens = 140, .heads = 1, .depth = 64};
  const int64_t last = 70;  // of those that stay unchanged
  const Array qkv = Random(x, 3, 1);
  Array changed = qkv, dy(GetParam(), x.rows() * x.width());
  for (int64_t i = (last + 1) * 3 * x.width(); i < changed.size(); ++i)
    changed.Set(i, 3 - changed[i]);
  for (int64_t i = 0; i < dy.size(); ++i) dy.Set(i, i / x.width() == last ? 1 + i % 3 : 0);
  const Result before = RunBoth(x, qkv, dy), after = RunBoth(x, changed, dy);
  for (int64_t i = 0; i < (last + 1) * x.width(); ++i)
    ASSERT_EQ(before.output[i], after.output[i]) << i;
  for (int64_t i = 0; i < before.gradient.size(); ++i) {
    const int64_t token = i / (3 * x.width()), third = i / x.width() % 3;
    // One query has a loss. No other query, and no key or value that it does not see, has a
    // gradient.
    if (token > last || (third == 0 && token != last)) {
      ASSERT_EQ(before.gradient[i], 0) << i;
    }
    ASSERT_EQ(before.gradient[i], after.gradient[i]) << i;
  }
}

TEST_P(CudaAttentionTest, NaNsReachAllTokensThatSeeThem) {
  const Shape x = {.sequences = 1, .tokens = 70, .heads = 1, .depth = 64};
  for (int64_t third : {0, 1, 2}) {
    Array qkv = Random(x, 3, 1);
    qkv.Set((66 * 3 + third) * x.width() + 7, NAN);
    const Result result = RunBoth(x, qkv, Random(x, 1, 2));
    const int64_t output = 66 * x.width() + 7;
    EXPECT_TRUE(std::isnan(result.output[output])) << third;
    EXPECT_TRUE(std::isnan(result.gradient[66 * 3 * x.width() + 7])) << third;
  }
}

TEST_P(CudaAttentionTest, NothingIsLaunchedForNoTokens) {
  for (const Shape& x : {Shape{.sequences = 0, .tokens = 4}, Shape{.sequences = 3, .tokens = 0}})
    RunBoth(x, Random(x, 3, 1), Random(x, 1, 2));
}

INSTANTIATE_TEST_SUITE_P(Types, CudaAttentionTest, testing::ValuesIn(kComputeTypes),
                         [](const auto& type) { return std::string(Name(type.param)); });

TEST(CudaAttention, TensorCoresTakeAlignedArrays) {
  const auto plain_launches = [](DType dtype, int64_t depth, size_t offset) {
    const Shape x = {.tokens = 3, .depth = depth};
    const int before = kernel::plain_launches;
    std::vector<std::byte> memory(4096);
    const Array dy = Array::Random(dtype, x.rows() * x.width(), 2);
    Result result(dtype, x);
    AttentionArrays arrays = Forward(x, dy, result);
    void* place = memory.data();
    size_t left = memory.size();
    arrays.qkv = static_cast<std::byte*>(std::align(16, 2048, place, left)) + offset;
    EXPECT_EQ(cuda::LaunchAttention(nullptr, dtype, arrays), cudaSuccess);
    return kernel::plain_launches - before;
  };
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (int64_t depth : {8, 64, 104, 128}) EXPECT_EQ(plain_launches(dtype, depth, 0), 0) << depth;
    for (int64_t depth : {4, 12, 63, 136}) EXPECT_EQ(plain_launches(dtype, depth, 0), 1) << depth;
    EXPECT_EQ(plain_launches(dtype, 64, 8), 1);
  }
  EXPECT_EQ(plain_launches(DType::kFloat32, 64, 0), 1);
}

TEST(CudaAttention, RefusesIntegers) {
  const Shape x = {.tokens = 3};
  const Array qkv(DType::kInt8, 3 * x.rows() * x.width());
  Result result(DType::kInt8, x);
  EXPECT_EQ(cuda::LaunchAttention(nullptr, DType::kInt8, Forward(x, qkv, result)),
            cudaErrorInvalidValue);
  EXPECT_EQ(
      cuda::LaunchAttentionBackward(nullptr, DType::kInt8, Backward(x, qkv, qkv, result), nullptr),
      cudaErrorInvalidValue);
}

TEST(CudaAttention, TilesHaveNoBankConflicts) {
  const int64_t before = stand_in::bank_conflicts;
  for (int64_t depth : {64, 128}) {
    const Shape x = {.tokens = 70, .depth = depth};
    RunBoth(x, Array::Random(DType::kBFloat16, x.rows() * 3 * x.width(), 1),
            Array::Random(DType::kBFloat16, x.rows() * x.width(), 2));
    EXPECT_EQ(stand_in::bank_conflicts, before) << depth;
  }
}

}  // namespace
}  // namespace ebb::gpt
