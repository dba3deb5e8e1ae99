#include <algorithm>
#include <limits>

#include "../optim/every_target.h"
#include "ops_fixture.h"
#include "reference.h"

namespace ebb::gpt {
namespace {

// Elementwise arithmetic and sums over a row: some tens of fp32 roundings.
constexpr double kRowError = 4e-6;

class KernelsTest : public testing::TestWithParam<DType> {
 protected:
  Array Random(int64_t count, uint64_t seed, double deviation = 1) const {
    return Array::Random(GetParam(), count, seed, deviation);
  }
  Array Empty(int64_t count) const { return Array(GetParam(), count); }
};

TEST_P(KernelsTest, NormAgreesWithFp64AtEverySimdWidth) {
  optim::ForEveryTarget([&] {
    for (int64_t width : {1, 7, 48, 100}) {
      const int64_t rows = 5;
      const TestOps ops(GetParam(), 2, {});
      const Array x = Random(rows * width, 1, 3), r = Random(rows * width, 2), w = Random(width, 3),
                  b = Random(width, 4);
      Array sum = Empty(rows * width), y = Empty(rows * width);
      std::vector<float> mean(rows), deviation(rows);
      ops->Norm({.input = x.data(),
                 .residual = r.data(),
                 .sum = sum.data(),
                 .weight = w.data(),
                 .bias = b.data(),
                 .output = y.data(),
                 .mean = mean.data(),
                 .reciprocal_deviation = deviation.data(),
                 .rows = rows,
                 .width = width});
      std::vector<double> added(static_cast<size_t>(rows * width));
      for (int64_t i = 0; i < rows * width; ++i) added[static_cast<size_t>(i)] = x[i] + r[i];
      ExpectClose(sum, added, 0, "sum");
      // A row of one column is its own mean: what is left is bias.
      ExpectClose(y, reference::Norm(sum.Values(), w.Values(), b.Values()), kRowError,
                  "norm " + std::to_string(width));
    }
  });
}

TEST_P(KernelsTest, NormBackwardAgreesWithFiniteDifferences) {
  optim::ForEveryTarget([&] {
    const int64_t rows = 4, width = 37;
    const TestOps ops(GetParam(), 2, {});
    const Array x = Random(rows * width, 1), w = Random(width, 2), dy = Random(rows * width, 3),
                b = Random(width, 4);
    Array y = Empty(rows * width), dx = Random(rows * width, 5);
    const std::vector<double> residual = dx.Values();
    std::vector<float> mean(rows), deviation(rows);
    ops->Norm({.input = x.data(),
               .weight = w.data(),
               .bias = b.data(),
               .output = y.data(),
               .mean = mean.data(),
               .reciprocal_deviation = deviation.data(),
               .rows = rows,
               .width = width});
    for (DType dtype : kComputeTypes) {
      Array dw(dtype, width), db = Array::Random(dtype, width, 6);
      const std::vector<double> db_before = db.Values();
      Array in_place = dx;
      ops->NormBackward({.input = x.data(),
                         .weight = w.data(),
                         .mean = mean.data(),
                         .reciprocal_deviation = deviation.data(),
                         .output_gradient = dy.data(),
                         .residual_gradient = in_place.data(),
                         .input_gradient = in_place.data(),
                         .weight_gradient = {dw.data(), dtype, 0},
                         .bias_gradient = {db.data(), dtype, 1},
                         .rows = rows,
                         .width = width});
      // The sum of outputs weighted by dy, as a function of each argument.
      const auto loss = [&](const std::vector<double>& input, const std::vector<double>& weight) {
        const std::vector<double> output = reference::Norm(input, weight, b.Values());
        double total = 0;
        for (int64_t i = 0; i < rows * width; ++i) total += output[static_cast<size_t>(i)] * dy[i];
        return total;
      };
      const auto slope = [&](bool of_input, size_t i) {
        double values[2];
        for (int side : {0, 1}) {
          std::vector<double> input = x.Values(), weight = w.Values();
          (of_input ? input : weight)[i] += side == 0 ? -1e-5 : 1e-5;
          values[side] = loss(input, weight);
        }
        return (values[1] - values[0]) / 2e-5;
      };
      std::vector<double> expected_dx, expected_dw, expected_db = db_before;
      for (size_t i = 0; i < static_cast<size_t>(rows * width); ++i)
        expected_dx.push_back(residual[i] + slope(true, i));
      for (size_t i = 0; i < static_cast<size_t>(width); ++i)
        expected_dw.push_back(slope(false, i));
      for (int64_t i = 0; i < rows * width; ++i)
        expected_db[static_cast<size_t>(i % width)] += dy[i];
      ExpectClose(in_place, expected_dx, kRowError, "input");
      ExpectClose(dw, expected_dw, kRowError, "weight");
      ExpectClose(db, expected_db, kRowError, "bias");
    }
  });
}

TEST_P(KernelsTest, GeluAndItsSlopeAgreeWithFp64) {
  optim::ForEveryTarget([&] {
    const int64_t count = 2051;
    const TestOps ops(GetParam(), 2, {});
    Array x = Random(count, 1, 3), dy = Random(count, 2), y = Empty(count), again = Empty(count);
    for (double extreme : {-100.0, -20.0, 0.0, 20.0, 100.0})
      x.Set(static_cast<int64_t>(extreme) + 100, extreme);
    const std::vector<double> gradient = dy.Values();
    ops->Gelu(x.data(), y.data(), count);
    ops->GeluBackward(x.data(), again.data(), dy.data(), count);
    EXPECT_EQ(y, again);
    std::vector<double> expected, slopes;
    for (int64_t i = 0; i < count; ++i) {
      expected.push_back(reference::Gelu(x[i]));
      slopes.push_back(gradient[static_cast<size_t>(i)] *
                       (reference::Gelu(x[i] + 1e-5) - reference::Gelu(x[i] - 1e-5)) / 2e-5);
    }
    ExpectClose(y, expected, 1e-7, "gelu");
    ExpectClose(dy, slopes, kRowError, "slope");
  });
}

TEST_P(KernelsTest, AddAndColumnSumsAgreeWithFp64) {
  optim::ForEveryTarget([&] {
    const int64_t rows = 70, columns = 261;
    const TestOps ops(GetParam(), 3, {});
    const Array a = Random(rows * columns, 1), b = Random(rows * columns, 2);
    Array sum = Empty(rows * columns);
    ops->Add(a.data(), b.data(), sum.data(), rows * columns);
    std::vector<double> expected;
    for (int64_t i = 0; i < rows * columns; ++i) expected.push_back(a[i] + b[i]);
    ExpectClose(sum, expected, 0, "add");
    for (DType dtype : kComputeTypes) {
      for (float beta : {0.0f, 1.0f}) {
        Array sums = Array::Random(dtype, columns, 3);
        std::vector<double> column_sums = beta == 0 ? std::vector<double>(columns) : sums.Values();
        for (int64_t i = 0; i < rows * columns; ++i)
          column_sums[static_cast<size_t>(i % columns)] += a[i];
        ops->ColumnSums(a.data(), rows, columns, {sums.data(), dtype, beta});
        ExpectClose(sums, column_sums, kRowError, "column sums");
      }
    }
  });
}

TEST_P(KernelsTest, CrossEntropyAgreesWithFp64) {
  optim::ForEveryTarget([&] {
    const int64_t rows = 3, vocabulary = 300;
    const float scale = 8;
    const TestOps ops(GetParam(), 2, {});
    const Array logits = Array::Random(DType::kFloat32, rows * vocabulary, 1, 5);
    const std::vector<int32_t> targets = {0, 299, 17};
    std::vector<float> losses(rows);
    Array gradient = Empty(rows * vocabulary);
    ops->CrossEntropy({.logits = static_cast<const float*>(logits.data()),
                       .targets = targets.data(),
                       .losses = losses.data(),
                       .gradient = gradient.data(),
                       .gradient_scale = scale,
                       .rows = rows,
                       .vocabulary = vocabulary});
    const std::vector<double> values = logits.Values();
    std::vector<double> expected;
    for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
      const std::vector<double> row(values.begin() + static_cast<int64_t>(r) * vocabulary,
                                    values.begin() + static_cast<int64_t>(r + 1) * vocabulary);
      EXPECT_NEAR(losses[r], reference::CrossEntropy(row, {targets[r]}), 1e-5);
      for (int v = 0; v < vocabulary; ++v) {
        const double probability = std::exp(-reference::CrossEntropy(row, {v}));
        expected.push_back(scale * (probability - (v == targets[r] ? 1 : 0)));
      }
    }
    ExpectClose(gradient, expected, 1e-6, "gradient");
  });
}

TEST_P(KernelsTest, EmbeddingAddsTablesAndItsGradientSumsPositions) {
  optim::ForEveryTarget([&] {
    const int64_t sequences = 2, tokens = 5, width = 21, vocabulary = 9, context = 7,
                  rows = sequences * tokens;
    const TestOps ops(GetParam(), 2, {.rows = rows, .tokens = context, .vocabulary = vocabulary});
    const Array table = Random(vocabulary * width, 1), positions = Random(context * width, 2),
                dy = Random(rows * width, 3);
    const std::vector<int32_t> ids = {3, 3, 8, 0, 3, 1, 8, 3, 2, 2};
    Array y = Empty(rows * width);
    ops->Embed({.token_table = table.data(),
                .position_table = positions.data(),
                .ids = ids.data(),
                .output = y.data(),
                .sequences = sequences,
                .tokens = tokens,
                .width = width});
    std::vector<double> expected, token_sums(static_cast<size_t>(vocabulary * width)),
        position_sums(static_cast<size_t>(context * width));
    Array token_gradient(DType::kFloat32, vocabulary * width);
    Array position_gradient = Array::Random(DType::kBFloat16, context * width, 4);
    for (int64_t i = 0; i < context * width; ++i)
      position_sums[static_cast<size_t>(i)] = position_gradient[i];
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < width; ++c) {
        const int64_t token = ids[static_cast<size_t>(r)] * width + c,
                      position = r % tokens * width + c;
        expected.push_back(table[token] + positions[position]);
        token_sums[static_cast<size_t>(token)] += dy[r * width + c];
        position_sums[static_cast<size_t>(position)] += dy[r * width + c];
      }
    }
    ops->EmbedBackward({.output_gradient = dy.data(),
                        .ids = ids.data(),
                        .token_gradient = {token_gradient.data(), DType::kFloat32, 0},
                        .position_gradient = {position_gradient.data(), DType::kBFloat16, 1},
                        .sequences = sequences,
                        .tokens = tokens,
                        .width = width,
                        .vocabulary = vocabulary,
                        .context = context});
    ExpectClose(y, expected, 0, "embedding");
    ExpectClose(token_gradient, token_sums, 1e-6, "tokens");
    ExpectClose(position_gradient, position_sums, 1e-6, "positions");
  });
}

TEST_P(KernelsTest, ANanReachesTheLoss) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const TestOps ops(GetParam(), 1, {});
  Array x = Random(40, 1), y = Empty(40);
  x.Set(33, nan);
  ops->Gelu(x.data(), y.data(), 40);
  EXPECT_TRUE(std::isnan(y[33]));
  EXPECT_FALSE(std::isnan(y[32]));
  std::vector<float> logits(40, 1.0f);
  logits[5] = std::numeric_limits<float>::quiet_NaN();
  const int32_t target = 7;
  float loss = 0;
  ops->CrossEntropy(
      {.logits = logits.data(), .targets = &target, .losses = &loss, .rows = 1, .vocabulary = 40});
  EXPECT_TRUE(std::isnan(loss));
}

INSTANTIATE_TEST_SUITE_P(Types, KernelsTest, testing::ValuesIn(kComputeTypes), DTypeName);

}  // namespace
}  // namespace ebb::gpt
