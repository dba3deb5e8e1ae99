// The kernels of attention as they are, with the host in the place of the device: each launch runs
// its blocks at once, in an order that the test chooses.
#include <algorithm>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "host_matrix_thread.h"
#include "ops/cuda/attention.h"
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
  // Sums over at most some hundred products in fp32 lose few of its roundings. On tensor cores each
  // weight and each score's gradient is rounded to the dtype before it is multiplied, and backward
  // reads an output that was rounded, so sums lose a rounding of their largest terms twice.
  static double Error() { return GetParam() == DType::kFloat32 ? 1e-5 : 2 * Rounding(GetParam()); }

  static void ExpectAgreesWithFp64(const Shape& x, double deviation) {
    const Array qkv = Random(x, 3, 1, deviation), dy = Random(x, 1, 2);
    const Result result = RunBoth(x, qkv, dy);
    const std::string what = "tokens " + std::to_string(x.tokens) + ", head width " +
                             std::to_string(x.depth);
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
  for (int64_t depth : {8, 16, 64, 80, 128}) {
    for (int64_t tokens : {1, 2, 31, 64, 65, 130}) {
      ExpectAgreesWithFp64({.sequences = 2, .tokens = tokens, .heads = 2, .depth = depth}, 1);
      if (HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CudaAttentionTest, testing::ValuesIn(kComputeTypes), DTypeName);

}  // namespace
}  // namespace ebb::gpt
