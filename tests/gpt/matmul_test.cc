#include <algorithm>
#include <cmath>
#include <thread>

#include "ops_fixture.h"
#include "reference.h"

namespace ebb::gpt {
namespace {

struct Product {
  int64_t m, n, k;
};

class MatmulTest : public OpsTest {
 protected:
  // 0, 1: stored as is; otherwise transposed.
  Array Run(const TestOps& ops, const Product& p, bool a_transposed, bool b_transposed, bool bias,
            Target target_like) {
    const Array a = Random(p.m * p.k, 1), b = Random(p.k * p.n, 2);
    const Array row = Random(p.n, 3);
    Array c(target_like.dtype, p.m * p.n);
    if (target_like.beta != 0) c = Array::Random(target_like.dtype, p.m * p.n, 4);
    const std::vector<double> before = c.Values();
    ops->Matmul({.a = a.data(),
                 .a_transposed = a_transposed,
                 .b = b.data(),
                 .b_transposed = b_transposed,
                 .bias = bias ? row.data() : nullptr,
                 .c = {c.data(), target_like.dtype, target_like.beta},
                 .m = p.m,
                 .n = p.n,
                 .k = p.k});
    expected_ =
        reference::Matmul(a.Values(), a_transposed, b.Values(), b_transposed, p.m, p.n, p.k);
    // Some kernels of cuBLASLt round the product to C's dtype before they add to it: on an H200
    // those that add to C, and some that add a bias.
    const bool adds = bias || target_like.beta != 0;
    const bool rounds = OnCuda() && target_like.dtype == Compute() && adds;
    rounded_.assign(rounds ? expected_.size() : 0, 0);
    for (size_t i = 0; i < expected_.size(); ++i) {
      const double product = expected_[i], to_c = target_like.beta != 0 ? before[i] : 0;
      const double to_row = bias ? row[static_cast<int64_t>(i) % p.n] : 0;
      expected_[i] = product + to_row + to_c;
      if (!rounds) continue;
      rounded_[i] = std::abs(product);
      if (bias && target_like.beta != 0)
        rounded_[i] += std::max(std::abs(product + to_row), std::abs(product + to_c));
    }
    return c;
  }
  std::vector<double> expected_, rounded_;
};

// Sums of k products of normals are about sqrt(k); fp32 loses at most k roundings of that.
constexpr double kSumError = 1e-5;

TEST_P(MatmulTest, AgreesWithFp64InEveryForm) {
  for (int threads : {1, 3}) {
    const TestOps ops = NewTestOps({}, threads);
    for (const Product& p : {Product{1, 1, 1}, {33, 70, 19}, {64, 48, 96}}) {
      for (int form = 0; form < 8; ++form) {
        for (DType dtype : kComputeTypes) {
          for (float beta : {0.0f, 1.0f}) {
            const Array c = Run(ops, p, form & 1, form & 2, form & 4, {nullptr, dtype, beta});
            ExpectClose(c, expected_, kSumError,
                        testing::PrintToString(form) + " to " + std::string(Name(dtype)) + " m " +
                            std::to_string(p.m),
                        rounded_);
          }
        }
      }
    }
  }
}

TEST_P(MatmulTest, CrossesItsBlocks) {
  const TestOps ops = NewTestOps({});
  for (const Product& p : {Product{520, 3, 5}, {3, 520, 5}, {4, 5, 1600}}) {
    for (int form = 0; form < 4; ++form) {
      const Array c = Run(ops, p, form & 1, form & 2, true, {nullptr, DType::kFloat16, 1});
      ExpectClose(c, expected_, kSumError,
                  "form " + std::to_string(form) + " m " + std::to_string(p.m), rounded_);
    }
  }
}

TEST_P(MatmulTest, GivesTheSameBitsToRanksThatMultiplyAtOnceAndAtOtherAddresses) {
  const Product p = {70, 90, 50};
  const TestOps alone = NewTestOps({});
  const Array expected = Run(alone, p, false, true, true, {nullptr, Compute(), 0});
  std::vector<std::thread> ranks;
  std::vector<Array> results(3, Array(Compute(), 0));
  for (size_t rank = 0; rank < results.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      const TestOps ops = NewTestOps({});
      const Array a = Random(p.m * p.k + 3, 1), b = Random(p.k * p.n, 2);
      const Array row = Random(p.n, 3);
      // The numbers of `a` further on in memory; on a GPU equally well aligned, because algorithms
      // there depend on that.
      const int64_t further = OnCuda() ? 16 / SizeOf(Compute()) : 1;
      Array moved(Compute(), p.m * p.k + further);
      for (int64_t i = 0; i < p.m * p.k; ++i) moved.Set(i + further, a[i]);
      results[rank] = Array(Compute(), p.m * p.n);
      ops->Matmul({.a = static_cast<const char*>(moved.data()) + further * SizeOf(Compute()),
                   .b = b.data(),
                   .b_transposed = true,
                   .bias = row.data(),
                   .c = {results[rank].data(), Compute(), 0},
                   .m = p.m,
                   .n = p.n,
                   .k = p.k});
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const Array& result : results) EXPECT_EQ(result, expected);
}

INSTANTIATE_TEST_SUITE_P(Devices, MatmulTest, testing::ValuesIn(OpsCases()), OpsTestName);

}  // namespace
}  // namespace ebb::gpt
