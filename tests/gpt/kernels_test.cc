#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "ops_fixture.h"
#include "reference.h"

namespace ebb::gpt {
namespace {

// Elementwise arithmetic: some roundings in fp32.
constexpr double kElementError = 4e-6;

class KernelsTest : public OpsTest {
 protected:
  struct Loss {
    std::pmr::vector<float> losses;
    Array gradient;
    bool operator==(const Loss&) const = default;
  };
  static Loss CrossEntropy(const TestOps& ops, const Array& logits,
                           const std::pmr::vector<int32_t>& targets, float scale,
                           const float* loss_scale, bool in_place) {
    const auto rows = static_cast<int64_t>(targets.size());
    Array read = logits;
    Loss loss = {std::pmr::vector<float>(targets.size()), Empty(logits.size())};
    ops->CrossEntropy({.logits = read.data(),
                       .targets = targets.data(),
                       .losses = loss.losses.data(),
                       .gradient = in_place ? read.data() : loss.gradient.data(),
                       .gradient_scale = scale,
                       .loss_scale = loss_scale,
                       .rows = rows,
                       .vocabulary = logits.size() / rows});
    if (in_place) loss.gradient = read;
    return loss;
  }
  static DType Logits() { return LogitsDtype(NewDevice(1), Compute()); }

  struct EmbeddingCase {
    int64_t sequences, tokens, width, vocabulary, context;
    float beta;
    std::pmr::vector<int32_t> ids;
  };
  static void CheckEmbedBackward(const EmbeddingCase& x, DType token_dtype, DType position_dtype) {
    const int64_t rows = x.sequences * x.tokens;
    const TestOps ops = NewTestOps(
        {.rows = rows, .tokens = x.context, .width = x.width, .vocabulary = x.vocabulary});
    const Array dy = Random(rows * x.width, 3);
    const Array tokens_before = Array::Random(token_dtype, x.vocabulary * x.width, 4);
    const Array positions_before = Array::Random(position_dtype, x.context * x.width, 5);
    const auto run = [&](Array& tokens, Array& positions) {
      ops->EmbedBackward({.output_gradient = dy.data(),
                          .ids = x.ids.data(),
                          .token_gradient = {tokens.data(), token_dtype, x.beta},
                          .position_gradient = {positions.data(), position_dtype, 1 - x.beta},
                          .sequences = x.sequences,
                          .tokens = x.tokens,
                          .width = x.width,
                          .vocabulary = x.vocabulary,
                          .context = x.context});
    };
    Array tokens = tokens_before, positions = positions_before;
    run(tokens, positions);
    std::vector<double> token_sums(static_cast<size_t>(tokens.size())),
        position_sums(static_cast<size_t>(positions.size()));
    (x.beta == 0 ? position_sums : token_sums) =
        (x.beta == 0 ? positions_before : tokens_before).Values();
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < x.width; ++c) {
        const int64_t id = x.ids[static_cast<size_t>(r)];
        token_sums[static_cast<size_t>(id * x.width + c)] += dy[r * x.width + c];
        position_sums[static_cast<size_t>(r % x.tokens * x.width + c)] += dy[r * x.width + c];
      }
    }
    ExpectClose(tokens, token_sums, 1e-6, "tokens");
    ExpectClose(positions, position_sums, 1e-6, "positions");
    Array tokens_again = tokens_before, positions_again = positions_before;
    run(tokens_again, positions_again);
    EXPECT_TRUE(tokens_again == tokens && positions_again == positions);
  }
};

// Fused parts of products with an identity.
class FusedTest : public OpsTest {
 protected:
  static constexpr int64_t kSide = 8;

  static Array Identity() {
    Array identity = Empty(kSide * kSide);
    for (int64_t i = 0; i < kSide * kSide; ++i) identity.Set(i, i % (kSide + 1) == 0 ? 1 : 0);
    return identity;
  }
  // [count / kSide, kSide] with the fused part applied.
  static Array Multiply(const Array& a, MatmulArrays fused) {
    const Array identity = Identity();
    Array c = Empty(a.size());
    fused.a = a.data();
    fused.b = identity.data();
    fused.c = {c.data(), Compute(), 0};
    fused.m = a.size() / kSide;
    fused.n = fused.k = kSide;
    NewTestOps({.rows = fused.m, .width = kSide})->Matmul(fused);
    return c;
  }
};

TEST_P(FusedTest, GeluAndItsSlopeAgreeWithFp64) {
  ForEveryTarget([&] {
    const int64_t count = 2056;
    Array x = Random(count, 1, 3), before = Empty(count), again = Empty(count);
    const Array dy = Random(count, 2);
    for (double extreme : {-100.0, -20.0, 0.0, 20.0, 100.0})
      x.Set(static_cast<int64_t>(extreme) + 100, extreme);
    const Array y = Multiply(x, {.before_gelu = before.data()});
    const Array dx = Multiply(dy, {.gelu_input = x.data(), .gelu_output = again.data()});
    EXPECT_EQ(before, x);
    std::vector<double> expected, slopes;
    for (int64_t i = 0; i < count; ++i) {
      expected.push_back(reference::Gelu(x[i]));
      slopes.push_back(dy[i] * (reference::Gelu(x[i] + 1e-5) - reference::Gelu(x[i] - 1e-5)) /
                       2e-5);
    }
    ExpectClose(y, expected, 1e-7, "gelu");
    ExpectClose(again, expected, 1e-7, "gelu again");
    // The slope that cuBLASLt fuses into a product has an error of up to 1.05e-5 of the largest slope
    // (measured on an H200, with cuBLASLt 13).
    ExpectClose(dx, slopes, OnCuda() ? 2e-5 : kElementError, "slope");
  });
}

TEST_P(FusedTest, AdditionsAgreeWithFp64) {
  ForEveryTarget([&] {
    const int64_t count = 2056;
    const Array a = Random(count, 1), b = Random(count, 2);
    std::vector<double> expected;
    for (int64_t i = 0; i < count; ++i) expected.push_back(a[i] + b[i]);
    ExpectClose(Multiply(a, {.added = b.data()}), expected, 0, "add");
  });
}

TEST_P(FusedTest, SumsOfAColumnAgreeWithFp64) {
  ForEveryTarget([&] {
    const int64_t n = 8;
    for (const auto& [k, m] : {std::pair<int64_t, int64_t>{70, 261}, {300, 264}, {1, 8}}) {
      const TestOps ops = NewTestOps({.rows = k, .width = m}, /*threads=*/3);
      const Array a = Random(k * m, 1), b = Random(k * n, 2);
      for (DType dtype : kComputeTypes) {
        for (float beta : {0.0f, 1.0f}) {
          Array c = Empty(m * n), sums = Array::Random(dtype, m, 3);
          std::vector<double> expected =
              beta == 0 ? std::vector<double>(static_cast<size_t>(m)) : sums.Values();
          for (int64_t i = 0; i < k * m; ++i) expected[static_cast<size_t>(i % m)] += a[i];
          ops->Matmul({.a = a.data(),
                       .a_transposed = true,
                       .b = b.data(),
                       .c = {c.data(), Compute(), 0},
                       .a_sums = {sums.data(), dtype, beta},
                       .m = m,
                       .n = n,
                       .k = k});
          ExpectClose(sums, expected, kElementError, "column sums");
          ExpectClose(c, reference::Matmul(a.Values(), true, b.Values(), false, m, n, k), 1e-5,
                      "product");
        }
      }
    }
  });
}

TEST_P(FusedTest, ANanGoesThroughTheGelu) {
  Array x = Random(40, 1), before = Empty(40);
  x.Set(33, std::numeric_limits<double>::quiet_NaN());
  const Array y = Multiply(x, {.before_gelu = before.data()});
  EXPECT_TRUE(std::isnan(y[33]));
  EXPECT_FALSE(std::isnan(y[31]));
}

TEST_P(KernelsTest, CrossEntropyAgreesWithFp64) {
  ForEveryTarget([&] {
    for (int64_t vocabulary : {1, 5, 300, 20011}) {
      const TestOps ops = NewTestOps({.rows = 3, .vocabulary = vocabulary});
      const Array logits = Array::Random(Logits(), 3 * vocabulary, 1, 5);
      const std::pmr::vector<int32_t> targets = {0, static_cast<int32_t>(vocabulary - 1),
                                                 static_cast<int32_t>(vocabulary / 3)};
      const std::pmr::vector<float> loss_scale = {4};
      const Loss loss = CrossEntropy(ops, logits, targets, 2, loss_scale.data(), false);
      // A CPU without vectors adds all of them one after the other.
      const double sum_error = OnCuda() || vocabulary <= 300 ? 1e-6 : 1e-5;
      const std::vector<double> values = logits.Values();
      std::vector<double> expected;
      for (size_t r = 0; r < 3; ++r) {
        const std::vector<double> row(values.begin() + static_cast<int64_t>(r) * vocabulary,
                                      values.begin() + static_cast<int64_t>(r + 1) * vocabulary);
        const double of_row = reference::CrossEntropy(row, {targets[r]});
        EXPECT_NEAR(loss.losses[r], of_row, std::max(1e-5, 2 * sum_error));
        const double log_sum_exp = of_row + row[static_cast<size_t>(targets[r])];
        for (int v = 0; v < vocabulary; ++v) {
          const double probability = std::exp(row[static_cast<size_t>(v)] - log_sum_exp);
          expected.push_back(8 * (probability - (v == targets[r] ? 1 : 0)));
        }
      }
      ExpectClose(loss.gradient, expected, sum_error, "gradient");
      EXPECT_EQ(CrossEntropy(ops, logits, targets, 2, loss_scale.data(), false), loss);
      EXPECT_EQ(CrossEntropy(ops, logits, targets, 8, nullptr, Logits() == Compute()), loss);
    }
  });
}

TEST_P(KernelsTest, ANanReachesTheLoss) {
  const TestOps ops = NewTestOps({.rows = 2, .vocabulary = 40});
  Array logits(Logits(), 80);
  for (int64_t i = 0; i < 80; ++i) logits.Set(i, 1);
  logits.Set(5, std::numeric_limits<double>::quiet_NaN());
  const Loss loss = CrossEntropy(ops, logits, {7, 7}, 1, nullptr, false);
  EXPECT_TRUE(std::isnan(loss.losses[0]));
  EXPECT_NEAR(loss.losses[1], std::log(40.0), 1e-5);
}

// Columns [begin, end) of the logits, as a rank has them.
struct CutRows {
  int64_t begin, end;
  std::pmr::vector<float> terms;  // of 3 rows: top, own_top, sum, at_target
  Array logits, gradient;
};

TEST_P(KernelsTest, CutRowsHaveTheLossesOfWholeOnes) {
  ForEveryTarget([&] {
    constexpr int64_t kRows = 3, kVocabulary = 301;
    const TestOps ops = NewTestOps({.rows = kRows, .vocabulary = kVocabulary, .is_cut = true});
    const Array logits = Array::Random(Logits(), kRows * kVocabulary, 1, 5);
    const std::pmr::vector<int32_t> targets = {0, kVocabulary - 1, 150};
    const std::pmr::vector<float> loss_scale = {4};
    const Loss whole = CrossEntropy(ops, logits, targets, 2, loss_scale.data(), false);

    std::vector<CutRows> ranks;
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 151}, {151, 301}}) {
      const int64_t columns = end - begin;
      ranks.push_back({begin, end, std::pmr::vector<float>(4 * kRows),
                       Array(Logits(), kRows * columns), Empty(kRows * columns)});
      for (int64_t i = 0; i < kRows * columns; ++i)
        ranks.back().logits.Set(i, logits[i / columns * kVocabulary + begin + i % columns]);
    }
    std::pmr::vector<float> losses(kRows);
    const auto arrays = [&](CutRows& rank) -> CrossEntropyArrays {
      float* const terms = rank.terms.data();
      return {.logits = rank.logits.data(),
              .targets = targets.data(),
              .losses = losses.data(),
              .gradient = rank.gradient.data(),
              .gradient_scale = 2,
              .loss_scale = loss_scale.data(),
              .rows = kRows,
              .vocabulary = rank.end - rank.begin,
              .first_token = rank.begin,
              .terms = {terms, terms + kRows, terms + 2 * kRows, terms + 3 * kRows}};
    };
    // The ranks exchange these.
    const auto all = [&](size_t first, size_t last, const auto& combine) {
      for (size_t i = first; i < last; ++i) {
        const float result = combine(ranks[0].terms[i], ranks[1].terms[i]);
        ranks[0].terms[i] = ranks[1].terms[i] = result;
      }
    };
    for (CutRows& rank : ranks) ops->LogitTerms(arrays(rank));
    all(0, kRows, [](float a, float b) { return std::max(a, b); });
    for (CutRows& rank : ranks) ops->LogitSums(arrays(rank));
    all(2 * kRows, 4 * kRows, std::plus<>());
    for (CutRows& rank : ranks) {
      ops->CrossEntropy(arrays(rank));
      const int64_t columns = rank.end - rank.begin;
      std::vector<double> expected;
      for (int64_t i = 0; i < kRows * columns; ++i)
        expected.push_back(whole.gradient[i / columns * kVocabulary + rank.begin + i % columns]);
      // Both are rounded.
      std::vector<double> rounded;
      for (const double e : expected) rounded.push_back(std::abs(e));
      ExpectClose(rank.gradient, expected, 1e-6, "gradient", rounded);
      for (size_t r = 0; r < losses.size(); ++r) EXPECT_NEAR(losses[r], whole.losses[r], 1e-5);
    }
  });
}

TEST_P(KernelsTest, BiasAndResidualAreAddedToEachRow) {
  ForEveryTarget([&] {
    for (const int64_t width : {21, 264}) {
      constexpr int64_t kRows = 5;
      const TestOps ops =
          NewTestOps({.rows = kRows, .width = width, .is_cut = true}, /*threads=*/3);
      const Array bias = Random(width, 2), residual = Random(kRows * width, 3);
      Array rows = Random(kRows * width, 1);
      std::vector<double> expected;
      for (int64_t i = 0; i < kRows * width; ++i)
        expected.push_back(rows[i] + bias[i % width] + residual[i]);
      ops->AddBias({.input = rows.data(),
                    .bias = bias.data(),
                    .residual = residual.data(),
                    .output = rows.data(),
                    .rows = kRows,
                    .width = width});
      ExpectClose(rows, expected, 1e-7, "sum");
      for (const float beta : {0.0f, 1.0f}) {
        Array sums = Array::Random(DType::kFloat32, width, 4);
        std::vector<double> of_columns =
            beta == 0 ? std::vector<double>(static_cast<size_t>(width)) : sums.Values();
        for (int64_t i = 0; i < kRows * width; ++i)
          of_columns[static_cast<size_t>(i % width)] += rows[i];
        ops->ColumnSums(rows.data(), kRows, width, {sums.data(), DType::kFloat32, beta});
        ExpectClose(sums, of_columns, kElementError, "column sums");
      }
    }
  });
}

// The table is cut between tokens 4 and 5 of 9.
TEST_P(KernelsTest, CutTablesAddUpToTheWholeOne) {
  ForEveryTarget([&] {
    constexpr int64_t kSequences = 2, kTokens = 5, kContext = 7, kRows = kSequences * kTokens;
    const std::pmr::vector<int32_t> ids = {3, 3, 8, 0, 3, 1, 8, 4, 2, 5};
    for (const int64_t width : {21, 264}) {
      const TestOps ops =
          NewTestOps({.rows = kRows, .tokens = kContext, .width = width, .vocabulary = 9});
      const Array table = Random(9 * width, 1), positions = Random(kContext * width, 2),
                  dy = Random(kRows * width, 3);
      const auto embed = [&](int64_t first, int64_t end) {
        Array y = Empty(kRows * width);
        ops->Embed({.token_table = static_cast<const std::byte*>(table.data()) +
                                   first * width * SizeOf(Compute()),
                    .position_table = positions.data(),
                    .ids = ids.data(),
                    .output = y.data(),
                    .sequences = kSequences,
                    .tokens = kTokens,
                    .width = width,
                    .first_token = first,
                    .end_token = end});
        return y.Values();
      };
      const std::vector<double> whole = embed(0, 9), low = embed(0, 5), high = embed(5, 9);
      for (size_t i = 0; i < whole.size(); ++i) {
        const bool is_low = ids[i / static_cast<size_t>(width)] < 5;
        EXPECT_EQ(is_low ? low[i] : high[i], whole[i]) << i;
        EXPECT_EQ(is_low ? high[i] : low[i], 0) << i;
      }
      const auto backward = [&](int64_t first, int64_t end) {
        Array tokens(DType::kFloat32, (end - first) * width),
            of_positions(DType::kFloat32, kContext * width);
        ops->EmbedBackward({.output_gradient = dy.data(),
                            .ids = ids.data(),
                            .token_gradient = {tokens.data(), DType::kFloat32, 0},
                            .position_gradient = {of_positions.data(), DType::kFloat32, 0},
                            .sequences = kSequences,
                            .tokens = kTokens,
                            .width = width,
                            .vocabulary = end - first,
                            .context = kContext,
                            .first_token = first});
        std::vector<double> values = tokens.Values();
        return std::pair(values, of_positions.Values());
      };
      const auto all = backward(0, 9);
      auto [parts, of_low] = backward(0, 5);
      const auto [more, of_high] = backward(5, 9);
      parts.insert(parts.end(), more.begin(), more.end());
      EXPECT_EQ(parts, all.first);
      EXPECT_EQ(of_low, all.second);
      EXPECT_EQ(of_high, all.second);
    }
  });
}

TEST_P(KernelsTest, TheMeanIsAddedInFp64) {
  const TestOps ops = NewTestOps({});
  for (size_t count : {size_t{1}, size_t{5000}}) {
    std::pmr::vector<float> numbers(count, 0.1f), mean(1);
    numbers[count / 2] += 1e7f;
    ops->Mean(numbers.data(), static_cast<int64_t>(count), mean.data());
    EXPECT_EQ(mean[0], static_cast<float>(std::accumulate(numbers.begin(), numbers.end(), 0.0) /
                                          static_cast<double>(count)));
  }
}

TEST_P(KernelsTest, EmbeddingAddsTables) {
  ForEveryTarget([&] {
    const int64_t sequences = 2, tokens = 5, vocabulary = 9, context = 7, rows = sequences * tokens;
    for (int64_t width : {21, 264}) {
      const TestOps ops = NewTestOps({.rows = rows, .width = width, .vocabulary = vocabulary});
      const Array table = Random(vocabulary * width, 1), positions = Random(context * width, 2);
      const std::pmr::vector<int32_t> ids = {3, 3, 8, 0, 3, 1, 8, 3, 2, 2};
      Array y = Empty(rows * width);
      ops->Embed({.token_table = table.data(),
                  .position_table = positions.data(),
                  .ids = ids.data(),
                  .output = y.data(),
                  .sequences = sequences,
                  .tokens = tokens,
                  .width = width});
      std::vector<double> expected;
      for (int64_t i = 0; i < rows * width; ++i) {
        const int64_t row = i / width, column = i % width;
        expected.push_back(table[ids[static_cast<size_t>(row)] * width + column] +
                           positions[row % tokens * width + column]);
      }
      ExpectClose(y, expected, 0, "embedding");
    }
  });
}

TEST_P(KernelsTest, TheEmbeddingsGradientSumsPositions) {
  ForEveryTarget([&] {
    for (float beta : {0.0f, 1.0f}) {
      CheckEmbedBackward({2, 5, 21, 9, 7, beta, {3, 3, 8, 0, 3, 1, 8, 3, 2, 2}}, DType::kFloat32,
                         DType::kBFloat16);
      // More rows of one id, and more sequences, than one warp sums.
      EmbeddingCase many = {40, 3, 264, 5, 3, beta, {}};
      for (int i = 0; i < 120; ++i) many.ids.push_back(i % 7 == 0 ? 2 : 4);
      CheckEmbedBackward(many, DType::kFloat16, DType::kFloat32);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Devices, KernelsTest, testing::ValuesIn(OpsCases()), OpsTestName);
INSTANTIATE_TEST_SUITE_P(Devices, FusedTest, testing::ValuesIn(OpsCases()), OpsTestName);

}  // namespace
}  // namespace ebb::gpt
