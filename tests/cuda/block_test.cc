// The host's blocks run kernels as a device would, and show that a kernel forgot to wait.
#include "block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace ebb::stand_in {
namespace {

using kernel::kWarp;

// The sum over a block, through shared memory.
template <bool kWaits>
struct SumKernel {
  static constexpr int kThreads = 4 * kWarp;
  struct Arrays {
    const float* numbers;
    float* sums;  // one for each thread
  };
  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& arrays) {
    auto* const partial = reinterpret_cast<float*>(thread.shared());
    const float sum =
        kernel::WarpSum(thread, arrays.numbers[thread.block() * kThreads + thread.index()]);
    if (thread.lane() == 0) partial[thread.warp()] = sum;
    if constexpr (kWaits) thread.Sync();
    float total = 0;
    for (int w = 0; w < kThreads / kWarp; ++w) total += partial[w];
    arrays.sums[thread.block() * kThreads + thread.index()] = total;
  }
};

template <class Kernel>
std::vector<float> Sums(int64_t blocks) {
  std::vector<float> numbers(static_cast<size_t>(blocks) * Kernel::kThreads), sums(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i);
  RunKernel<Kernel>(blocks, 64, {numbers.data(), sums.data()});
  return sums;
}

TEST(Block, SumsOverItsThreads) {
  const std::vector<float> sums = Sums<SumKernel<true>>(3);
  for (size_t i = 0; i < sums.size(); ++i)
    EXPECT_EQ(sums[i], 128.0f * 128 * static_cast<float>(i / 128) + 128 * 127 / 2) << i;
}

TEST(Block, ShowsAForgottenWait) {
  const std::vector<float> sums = Sums<SumKernel<false>>(1);
  EXPECT_TRUE(std::any_of(sums.begin(), sums.end(), [](float sum) { return std::isnan(sum); }));
}

TEST(Block, ExchangesManyTimesWithoutMixingThem) {
  std::vector<int> wrong(2 * kWarp, 0);
  RunBlocks(1, 2 * kWarp, 0, [&](HostThread& thread) {
    for (int i = 0; i < 100; ++i) {
      const int got = thread.Shuffle(1000 * i + thread.index(), (thread.lane() + i) % kWarp);
      const int expected = 1000 * i + thread.warp() * kWarp + (thread.lane() + i) % kWarp;
      wrong[static_cast<size_t>(thread.index())] += got != expected;
    }
  });
  EXPECT_EQ(wrong, std::vector<int>(2 * kWarp, 0));
}

TEST(BlockDeathTest, ThreadsThatWaitInVainAreNamed) {
  EXPECT_DEATH(RunBlocks(1, kWarp, 0,
                         [](HostThread& thread) {
                           if (thread.index() != 7) thread.Sync();
                         }),
               "31 threads of block 0 wait for others that never come");
}

}  // namespace
}  // namespace ebb::stand_in
