// The host's matrix products have the device's layout, and its copies show that a thread did not
// wait.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "host_matrix_thread.h"

namespace ebb::stand_in {
namespace {

using kernel::kWarp;
using MatrixThread = kernel::MatrixThread<HostThread>;

template <class T>
uint16_t BitsOf(float value) {
  return T(value).bits;
}

// A 16x16 and an 8x16 matrix with different numbers everywhere; sums of 16 products are exact.
float A(int row, int column) {
  return static_cast<float>((row * 5 + column * 3) % 17 - 8);
}
float B(int row, int column) {
  return static_cast<float>((row * 7 + column * 11) % 13 - 6);
}

// Writes a matrix to shared memory, in rows of `kColumns` numbers.
template <class T, int kRows, int kColumns, class Numbers>
void Write(HostThread& thread, int place, const Numbers& numbers) {
  for (int i = thread.lane(); i < kRows * kColumns; i += kWarp) {
    const uint16_t bits = BitsOf<T>(numbers(i / kColumns, i % kColumns));
    std::memcpy(thread.shared() + place + 2 * i, &bits, 2);
  }
}

template <class T>
class MatrixThreadTest : public testing::Test {};
using Types = testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(MatrixThreadTest, Types);

// Fragments as in PTX's tables, element by element: a0 to a7 of A, b0 to b3 of B, c0 to c3 of C.
TYPED_TEST(MatrixThreadTest, MultipliesAsTheTablesSay) {
  std::vector<float> product(16 * 8, NAN);
  RunBlocks(1, kWarp, 0, [&](HostThread& host) {
    MatrixThread thread(host);
    const int group = thread.lane() >> 2, in_group = thread.lane() % 4;
    uint16_t a[8], b[4];
    for (int i = 0; i < 8; ++i) {
      const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
      const int column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
      a[i] = BitsOf<TypeParam>(A(row, column));
    }
    for (int i = 0; i < 4; ++i) {
      const int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
      b[i] = BitsOf<TypeParam>(B(row, group));
    }
    uint32_t a_words[4], b_words[2];
    std::memcpy(a_words, a, sizeof a);
    std::memcpy(b_words, b, sizeof b);
    float c[4] = {1, 2, 3, 4};
    thread.MultiplyAdd<TypeParam>(c, a_words, b_words[0], b_words[1]);
    for (int i = 0; i < 4; ++i) {
      const int row = i < 2 ? group : group + 8, column = in_group * 2 + (i & 1);
      product[static_cast<size_t>(row * 8 + column)] = c[i] - static_cast<float>(i + 1);
    }
  });
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += A(row, k) * B(k, column);
      EXPECT_EQ(product[static_cast<size_t>(row * 8 + column)], sum) << row << ", " << column;
    }
  }
}

// Lane i gets numbers 2 * (i % 4) and the next one, of row i / 4 of each matrix; or, transposed, of
// column i / 4.
TYPED_TEST(MatrixThreadTest, LoadsFourMatrices) {
  for (bool transposed : {false, true}) {
    std::array<int, kWarp> wrong = {};
    RunBlocks(1, kWarp, 4 * 8 * 16, [&](HostThread& host) {
      MatrixThread thread(host);
      Write<TypeParam, 32, 8>(thread, 0, A);
      thread.Sync();
      const int lane = thread.lane();
      uint32_t words[4];
      if (transposed) {
        thread.LoadMatricesTransposed(lane * 16, words);
      } else {
        thread.LoadMatrices(lane * 16, words);
      }
      for (int m = 0; m < 4; ++m) {
        float low, high;
        kernel::UnpackPair<TypeParam>(words[m], low, high);
        const int outer = lane / 4, inner = 2 * (lane % 4);
        const auto at = [&](int i) {
          return transposed ? A(8 * m + inner + i, outer) : A(8 * m + outer, inner + i);
        };
        wrong[static_cast<size_t>(lane)] += low != at(0) || high != at(1);
      }
    });
    EXPECT_EQ(wrong, (std::array<int, kWarp>{})) << (transposed ? "transposed" : "as they are");
  }
}

TEST(MatrixThread, CountsRowsInTheSameBanks) {
  const auto conflicts = [](int stride) {
    const int64_t before = bank_conflicts;
    RunBlocks(1, kWarp, 32 * 256, [&](HostThread& host) {
      MatrixThread thread(host);
      uint32_t words[4];
      thread.LoadMatrices(thread.lane() * stride, words);
    });
    return bank_conflicts - before;
  };
  EXPECT_EQ(conflicts(16), 0);
  EXPECT_EQ(conflicts(128 + 16), 0);
  EXPECT_EQ(conflicts(128), 4);
  EXPECT_EQ(conflicts(32), 4);
}

// Reads between the begin of a copy and the wait for it, and after the wait.
TEST(MatrixThread, CopiesArriveWhenTheyAreWaitedFor) {
  alignas(16) const std::array<float, 8> numbers = {1, 2, 3, 4, 5, 6, 7, 8};
  RunBlocks(1, kWarp, 128, [&](HostThread& host) {
    MatrixThread thread(host);
    if (thread.index() != 0) return;
    auto* const shared = reinterpret_cast<float*>(thread.shared());
    std::fill_n(shared, 12, 9.0f);
    thread.CopyAsync(0, &numbers[0], true);
    thread.CommitCopies();
    thread.CopyAsync(16, &numbers[4], true);
    thread.CopyAsync(32, nullptr, false);
    thread.CommitCopies();
    for (int i = 0; i < 12; ++i) EXPECT_TRUE(std::isnan(shared[i])) << i;
    thread.WaitForCopies<1>();
    EXPECT_EQ(shared[3], 4);
    EXPECT_TRUE(std::isnan(shared[4]) && std::isnan(shared[8]));
    thread.WaitForCopies<0>();
    EXPECT_EQ(shared[7], 8);
    EXPECT_EQ(shared[8], 0);
  });
}

TEST(MatrixThreadDeathTest, AbortsWhereADeviceWouldRefuseOrLoseWork) {
  alignas(16) const std::array<float, 8> numbers = {};
  const auto run = [](const auto& body) {
    RunBlocks(1, kWarp, 128, [&](HostThread& host) {
      MatrixThread thread(host);
      body(thread);
    });
  };
  EXPECT_DEATH(run([&](auto& thread) { thread.CopyAsync(8, &numbers[0], true); }),
               "a copy that is not aligned");
  EXPECT_DEATH(run([&](auto& thread) { thread.CopyAsync(0, &numbers[1], true); }),
               "a copy that is not aligned");
  EXPECT_DEATH(run([&](auto& thread) { thread.CopyAsync(0, &numbers[0], true); }),
               "never waited for");
  EXPECT_DEATH(run([&](auto& thread) {
                 uint32_t words[4];
                 thread.LoadMatrices(4 * thread.lane(), words);
               }),
               "a matrix's row that is not aligned");
}

}  // namespace
}  // namespace ebb::stand_in
