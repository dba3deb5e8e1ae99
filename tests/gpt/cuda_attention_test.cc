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

constexpr int64_t kSequences = 2, kTokens = 130, kHeads = 2, kRows = kSequences * kTokens;

// Every array begins as NaNs, the scratch too.
struct Pass {
  Pass(DType dtype, int64_t head_width)
      : width(kHeads * head_width),
        qkv(Array::Random(dtype, kRows * 3 * width, 1)),
        dy(Array::Random(dtype, kRows * width, 2)),
        output(dtype, kRows * width),
        gradient(dtype, kRows * 3 * width),
        log_sum_exp(DType::kFloat32, kRows * kHeads),
        scratch(DType::kFloat32, cuda::AttentionScratchBytes(kSequences, kTokens, kHeads) / 4) {}
  bool operator==(const Pass&) const = default;

  cudaError_t Forward(const void* from) {
    return cuda::LaunchAttention(nullptr, qkv.dtype(),
                                 {.qkv = from,
                                  .output = output.data(),
                                  .log_sum_exp = static_cast<float*>(log_sum_exp.data()),
                                  .sequences = kSequences,
                                  .tokens = kTokens,
                                  .heads = kHeads,
                                  .width = width});
  }
  cudaError_t Backward(int64_t sequences = kSequences) {
    return cuda::LaunchAttentionBackward(
        nullptr, qkv.dtype(),
        {.qkv = qkv.data(),
         .output = output.data(),
         .output_gradient = dy.data(),
         .log_sum_exp = static_cast<const float*>(log_sum_exp.data()),
         .qkv_gradient = gradient.data(),
         .sequences = sequences,
         .tokens = kTokens,
         .heads = kHeads,
         .width = width},
        scratch.data());
  }
  Pass& Run() {
    EXPECT_EQ(Forward(qkv.data()), cudaSuccess);
    EXPECT_EQ(Backward(), cudaSuccess);
    return *this;
  }

  int64_t width;
  Array qkv, dy, output, gradient, log_sum_exp, scratch;
};

TEST(CudaAttention, GivesTheSameBitsInAnyOrderOfBlocks) {
  for (const DType dtype : kComputeTypes) {
    kernel::order_of_blocks = 0;
    const Pass first = Pass(dtype, 32).Run();
    kernel::order_of_blocks = 1;
    EXPECT_EQ(Pass(dtype, 32).Run(), first) << Name(dtype);
  }
  kernel::order_of_blocks = 0;
}

TEST(CudaAttention, NothingIsLaunchedForNoTokens) {
  Pass pass(DType::kFloat32, 8);
  EXPECT_EQ(pass.Backward(/*sequences=*/0), cudaSuccess);
  EXPECT_TRUE(std::isnan(pass.gradient[0]));
  EXPECT_EQ(
      cuda::LaunchAttention(nullptr, DType::kFloat32, {.sequences = 3, .heads = 1, .width = 8}),
      cudaSuccess);
}

TEST(CudaAttention, TensorCoresTakeAlignedArrays) {
  const auto plain_launches = [](DType dtype, int64_t depth, size_t offset) {
    const int before = kernel::plain_launches;
    Pass pass(dtype, depth);
    std::vector<std::byte> memory(kRows * kHeads * 3 * depth * SizeOf(dtype) + 64);
    void* place = memory.data();
    size_t left = memory.size();
    std::align(16, left - 32, place, left);
    EXPECT_EQ(pass.Forward(static_cast<std::byte*>(place) + offset), cudaSuccess);
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
  Pass pass(DType::kFloat32, 8);
  pass.qkv = Array(DType::kInt8, kRows * kHeads * 24);
  EXPECT_EQ(pass.Forward(pass.qkv.data()), cudaErrorInvalidValue);
  EXPECT_EQ(pass.Backward(), cudaErrorInvalidValue);
}

TEST(CudaAttention, TilesHaveNoBankConflicts) {
  const int64_t before = stand_in::bank_conflicts;
  for (int64_t depth : {64, 128}) {
    Pass(DType::kBFloat16, depth).Run();
    EXPECT_EQ(stand_in::bank_conflicts, before) << depth;
  }
}

}  // namespace
}  // namespace ebb::gpt
