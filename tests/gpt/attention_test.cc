#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "ops_fixture.h"
#include "reference.h"

namespace ebb::gpt {
namespace {

struct Shape {
  int64_t sequences = 1, tokens = 1, heads = 1, depth = 8;

  int64_t width() const { return heads * depth; }
  int64_t rows() const { return sequences * tokens; }
};

class AttentionTest : public OpsTest {
 protected:
  // Sums over at most some hundred products in fp32 lose a few of its roundings. In 16 bits weights
  // and gradients of scores may be rounded to the dtype before a product, and backward reads a
  // rounded output. So sums lose a rounding of their largest terms twice.
  static double Error() { return Compute() == DType::kFloat32 ? 1e-5 : 2 * Rounding(Compute()); }

  static Array Random(const Shape& x, int64_t columns, uint64_t seed, double deviation = 1) {
    return OpsTest::Random(x.rows() * columns * x.width(), seed, deviation);
  }
  // Every array begins as NaNs.
  struct Result {
    explicit Result(const Shape& x)
        : output(Empty(x.rows() * x.width())),
          gradient(Empty(x.rows() * 3 * x.width())),
          log_sum_exp(DType::kFloat32, x.sequences * x.heads * x.tokens) {}
    bool operator==(const Result&) const = default;
    Array output, gradient, log_sum_exp;
  };
  static Result Run(const Shape& x, const Array& qkv, const Array& dy, int threads = 2) {
    const TestOps ops = NewTestOps(
        {.rows = x.rows(), .tokens = x.tokens, .width = x.width(), .heads = x.heads}, threads);
    Result result(x);
    ops->Attention({.qkv = qkv.data(),
                    .output = result.output.data(),
                    .log_sum_exp = static_cast<float*>(result.log_sum_exp.data()),
                    .sequences = x.sequences,
                    .tokens = x.tokens,
                    .heads = x.heads,
                    .width = x.width()});
    ops->AttentionBackward({.qkv = qkv.data(),
                            .output = result.output.data(),
                            .output_gradient = dy.data(),
                            .log_sum_exp = static_cast<const float*>(result.log_sum_exp.data()),
                            .qkv_gradient = result.gradient.data(),
                            .sequences = x.sequences,
                            .tokens = x.tokens,
                            .heads = x.heads,
                            .width = x.width()});
    return result;
  }

  static void ExpectAgreesWithFp64(const Shape& x, double deviation, double error) {
    const Array qkv = Random(x, 3, 1, deviation), dy = Random(x, 1, 2);
    const Result result = Run(x, qkv, dy);
    const std::string what = absl::StrCat(", ", x.tokens, " tokens, head width ", x.depth);
    reference::Values output, log_sum_exp, gradient;
    for (int64_t s = 0; s < x.sequences; ++s) {
      const auto of_sequence = [&](const Array& all) {
        const reference::Values values = all.Values();
        const int64_t count = std::ssize(values) / x.sequences;
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
    if (deviation > 1) {
      EXPECT_GT(*std::max_element(log_sum_exp.begin(), log_sum_exp.end()), 400);
    }
    ExpectClose(result.output, output, error, "output" + what);
    ExpectClose(result.log_sum_exp, log_sum_exp, 1e-6, "log_sum_exp" + what);
    ExpectClose(result.gradient, gradient, error, "gradient" + what);
  }
};

// Widths of 5, of 6 and of more than 128 are not for tensor cores.
TEST_P(AttentionTest, AgreesWithFp64) {
  for (int64_t tokens : {1, 2, 31, 63, 64, 65, 150})
    ExpectAgreesWithFp64({.sequences = 2, .tokens = tokens, .heads = 2, .depth = 64}, 1, Error());
  for (int64_t depth : {5, 6, 8, 16, 80, 96, 128, 130, 264})
    ExpectAgreesWithFp64({.tokens = 130, .heads = depth < 96 ? 2 : 1, .depth = depth}, 1, Error());
}

// Scores of some hundreds, for which exp would be infinite or 0: one key has nearly all the weight,
// and it differs from tile to tile. A score of 500 in fp32 is off by 500 * 2^-24 and more, and so is
// its weight, relatively. The CPU rounds both in bf16.
TEST_P(AttentionTest, TakesLargeScores) {
  ExpectAgreesWithFp64({.tokens = 200, .depth = 64}, 12, (OnCuda() ? 1 : 2) * Error() + 1e-3);
}

// The reference that the other tests trust.
TEST(AttentionReference, BackwardAgreesWithFiniteDifferences) {
  const int64_t heads = 2, width = 6, tokens = 9;
  const reference::Values qkv = Array::Random(DType::kFloat32, tokens * 3 * width, 1).Values(),
                          dy = Array::Random(DType::kFloat32, tokens * width, 2).Values();
  const auto loss = [&](int64_t at, double step) {
    reference::Values moved = qkv;
    moved[at] += step;
    const reference::Values output = reference::Attention(moved, tokens, heads);
    return std::inner_product(output.begin(), output.end(), dy.begin(), 0.0);
  };
  const reference::Values gradient =
      reference::AttentionBackward(qkv, dy, tokens, heads).qkv_gradient;
  for (int64_t i = 0; i < tokens * 3 * width; ++i)
    EXPECT_NEAR(gradient[i], (loss(i, 1e-5) - loss(i, -1e-5)) / 2e-5, 1e-8) << i;
}

TEST_P(AttentionTest, GivesTheSameBitsForAnyNumberOfThreads) {
  const Shape x = {.sequences = 2, .tokens = 70, .heads = 3, .depth = 8};
  const Array qkv = Random(x, 3, 1), dy = Random(x, 1, 2);
  const Result one = Run(x, qkv, dy, 1);
  for (int threads : {2, 5}) EXPECT_EQ(one, Run(x, qkv, dy, threads));
}

TEST_P(AttentionTest, NothingComesFromLaterTokens) {
  const Shape x = {.tokens = 140, .depth = 64};
  const int64_t last = 70;  // of those that stay unchanged
  const Array qkv = Random(x, 3, 1);
  Array changed = qkv, dy = Empty(x.rows() * x.width());
  for (int64_t i = (last + 1) * 3 * x.width(); i < changed.size(); ++i)
    changed.Set(i, 3 - changed[i]);
  for (int64_t i = 0; i < dy.size(); ++i) dy.Set(i, i / x.width() == last ? 1 + i % 3 : 0);
  const Result before = Run(x, qkv, dy), after = Run(x, changed, dy);
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

TEST_P(AttentionTest, NaNsReachAllTokensThatSeeThem) {
  const Shape x = {.tokens = 70, .depth = 64};
  for (int64_t third : {0, 1, 2}) {
    Array qkv = Random(x, 3, 1);
    qkv.Set((66 * 3 + third) * x.width() + 7, NAN);
    const Result result = Run(x, qkv, Random(x, 1, 2));
    EXPECT_TRUE(std::isnan(result.output[66 * x.width() + 7])) << third;
    EXPECT_TRUE(std::isnan(result.gradient[66 * 3 * x.width() + 7])) << third;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, AttentionTest, testing::ValuesIn(OpsCases()), OpsTestName);

}  // namespace
}  // namespace ebb::gpt
