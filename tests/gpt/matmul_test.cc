#include <thread>

#include "ops_fixture.h"
#include "reference.h"

namespace ebb::gpt {
namespace {

struct Product {
  int64_t m, n, k;
};

class MatmulTest : public testing::TestWithParam<DType> {
 protected:
  // 0, 1: stored as is; else transposed.
  Array Run(Ops& ops, const Product& p, bool a_transposed, bool b_transposed, bool bias,
            Target target_like) {
    const Array a = Array::Random(GetParam(), p.m * p.k, 1),
                b = Array::Random(GetParam(), p.k * p.n, 2);
    const Array row = Array::Random(GetParam(), p.n, 3);
    Array c(target_like.dtype, p.m * p.n);
    if (target_like.beta != 0) c = Array::Random(target_like.dtype, p.m * p.n, 4);
    const std::vector<double> before = c.Values();
    ops.Matmul({.a = a.data(),
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
    for (size_t i = 0; i < expected_.size(); ++i) {
      if (bias) expected_[i] += row[static_cast<int64_t>(i) % p.n];
      if (target_like.beta != 0) expected_[i] += before[i];
    }
    return c;
  }
  std::vector<double> expected_;
};

// Sums of k products of normals are about sqrt(k); fp32 loses at most k roundings of that.
constexpr double kSumError = 1e-5;

TEST_P(MatmulTest, AgreesWithFp64InEveryForm) {
  for (int threads : {1, 3}) {
    const TestOps ops(GetParam(), threads, {});
    for (const Product& p : {Product{1, 1, 1}, {33, 70, 19}, {64, 48, 96}}) {
      for (int form = 0; form < 8; ++form) {
        for (DType dtype : kComputeTypes) {
          for (float beta : {0.0f, 1.0f}) {
            const Array c = Run(*ops.ops, p, form & 1, form & 2, form & 4, {nullptr, dtype, beta});
            ExpectClose(c, expected_, kSumError,
                        testing::PrintToString(form) + " to " + std::string(Name(dtype)) + " m " +
                            std::to_string(p.m));
          }
        }
      }
    }
  }
}

TEST_P(MatmulTest, CrossesItsBlocks) {
  const TestOps ops(GetParam(), 2, {});
  for (const Product& p : {Product{520, 3, 5}, {3, 520, 5}, {4, 5, 1600}}) {
    for (int form = 0; form < 4; ++form) {
      const Array c = Run(*ops.ops, p, form & 1, form & 2, true, {nullptr, DType::kFloat16, 1});
      ExpectClose(c, expected_, kSumError,
                  "form " + std::to_string(form) + " m " + std::to_string(p.m));
    }
  }
}

TEST_P(MatmulTest, GivesTheSameBitsToRanksThatMultiplyAtOnceAndAtOtherAddresses) {
  const Product p = {70, 90, 50};
  const TestOps alone(GetParam(), 2, {});
  const Array expected = Run(*alone.ops, p, false, true, true, {nullptr, GetParam(), 0});
  std::vector<std::thread> ranks;
  std::vector<Array> results(3, Array(GetParam(), 0));
  for (size_t rank = 0; rank < results.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      const TestOps ops(GetParam(), 2, {});
      const Array a = Array::Random(GetParam(), p.m * p.k + 3, 1),
                  b = Array::Random(GetParam(), p.k * p.n, 2);
      const Array row = Array::Random(GetParam(), p.n, 3);
      // The same numbers, one element further in memory.
      Array moved(GetParam(), p.m * p.k + 1);
      for (int64_t i = 0; i < p.m * p.k; ++i) moved.Set(i + 1, a[i]);
      results[rank] = Array(GetParam(), p.m * p.n);
      ops->Matmul({.a = static_cast<const char*>(moved.data()) + SizeOf(GetParam()),
                   .b = b.data(),
                   .b_transposed = true,
                   .bias = row.data(),
                   .c = {results[rank].data(), GetParam(), 0},
                   .m = p.m,
                   .n = p.n,
                   .k = p.k});
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const Array& result : results) EXPECT_EQ(result, expected);
}

INSTANTIATE_TEST_SUITE_P(Types, MatmulTest, testing::ValuesIn(kComputeTypes), DTypeName);

}  // namespace
}  // namespace ebb::gpt
