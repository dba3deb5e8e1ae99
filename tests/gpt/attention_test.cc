#include "ops_fixture.h"
#include "reference.h"

namespace ebb::gpt {
namespace {

class AttentionTest : public OpsTest {
 protected:
  // Backward reads rounded outputs. Probabilities are rounded too, if the CPU multiplies in bf16.
  // Sums lose that much.
  static double Error() { return Compute() == DType::kFloat32 ? 1e-5 : 2 * Rounding(Compute()); }

  struct Result {
    Array output, gradient;
  };
  Result Run(int64_t sequences, int64_t tokens, int64_t heads, int64_t width, int threads,
             const Array& qkv, const Array& dy) {
    const TestOps ops = NewTestOps(
        {.rows = sequences * tokens, .tokens = tokens, .width = width, .heads = heads}, threads);
    Result result = {Empty(sequences * tokens * width), Empty(sequences * tokens * 3 * width)};
    std::pmr::vector<float> kept(static_cast<size_t>(sequences * heads * tokens));
    ops->Attention({.qkv = qkv.data(),
                    .output = result.output.data(),
                    .log_sum_exp = kept.data(),
                    .sequences = sequences,
                    .tokens = tokens,
                    .heads = heads,
                    .width = width});
    ops->AttentionBackward({.qkv = qkv.data(),
                            .output = result.output.data(),
                            .output_gradient = dy.data(),
                            .log_sum_exp = kept.data(),
                            .qkv_gradient = result.gradient.data(),
                            .sequences = sequences,
                            .tokens = tokens,
                            .heads = heads,
                            .width = width});
    return result;
  }
};

TEST_P(AttentionTest, ForwardAgreesWithFp64) {
  const int64_t sequences = 2, heads = 3, width = 24;
  for (int64_t tokens : {1, 63, 64, 65, 150}) {
    const int64_t rows = sequences * tokens;
    const Array qkv = Random(rows * 3 * width, 1), dy = Random(rows * width, 2);
    const Result result = Run(sequences, tokens, heads, width, 2, qkv, dy);
    std::vector<double> expected;
    const std::vector<double> values = qkv.Values();
    for (int64_t s = 0; s < sequences; ++s) {
      const auto begin = values.begin() + s * tokens * 3 * width;
      const auto one = reference::Attention({begin, begin + tokens * 3 * width}, tokens, heads);
      expected.insert(expected.end(), one.begin(), one.end());
    }
    ExpectClose(result.output, expected, Error(), "tokens " + std::to_string(tokens));
  }
}

TEST_P(AttentionTest, BackwardAgreesWithFiniteDifferences) {
  const int64_t heads = 2, width = 6, tokens = 70;  // two blocks of rows, the second short
  const Array qkv = Random(tokens * 3 * width, 1), dy = Random(tokens * width, 2);
  const Result result = Run(1, tokens, heads, width, 1, qkv, dy);
  const std::vector<double> values = qkv.Values();
  const auto loss = [&](const std::vector<double>& input) {
    const std::vector<double> output = reference::Attention(input, tokens, heads);
    double total = 0;
    for (int64_t i = 0; i < tokens * width; ++i) total += output[static_cast<size_t>(i)] * dy[i];
    return total;
  };
  std::vector<double> expected;
  Array got(Compute(),
            (tokens * 3 * width + 4) / 5);  // every fifth, because each costs two forward passes
  for (int64_t i = 0; i < tokens * 3 * width; i += 5) {
    std::vector<double> up = values, down = values;
    up[static_cast<size_t>(i)] += 1e-5, down[static_cast<size_t>(i)] -= 1e-5;
    got.Set(static_cast<int64_t>(expected.size()), result.gradient[i]);
    expected.push_back((loss(up) - loss(down)) / 2e-5);
  }
  ExpectClose(got, expected, Error(), "gradient");
}

TEST_P(AttentionTest, GivesTheSameBitsForAnyNumberOfThreads) {
  const int64_t sequences = 2, tokens = 70, heads = 3, width = 24, rows = sequences * tokens;
  const Array qkv = Random(rows * 3 * width, 1), dy = Random(rows * width, 2);
  const Result one = Run(sequences, tokens, heads, width, 1, qkv, dy);
  for (int threads : {2, 5}) {
    const Result more = Run(sequences, tokens, heads, width, threads, qkv, dy);
    EXPECT_EQ(one.output, more.output);
    EXPECT_EQ(one.gradient, more.gradient);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, AttentionTest, testing::ValuesIn(OpsCases()), OpsTestName);

}  // namespace
}  // namespace ebb::gpt
