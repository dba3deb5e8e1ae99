#include "ops_fixture.h"
#include "reference.h"

namespace ebb::gpt {
namespace {

// Sums over a row of some tens of fp32 roundings.
constexpr double kRowError = 4e-6;

// Each way in which a kernel spreads a row over its threads is taken, by groups of aligned numbers
// and one by one.
constexpr int64_t kWidths[] = {1, 7, 48, 100, 776, 1032, 1537, 2051, 4104, 12296, 16392};

class LayerNormTest : public OpsTest {
 protected:
  struct Forward {
    Array sum, output;
    std::pmr::vector<float> mean, deviation;
  };
  static Forward Norm(const TestOps& ops, const Array& input, const Array* residual,
                      const Array& weight, const Array& bias) {
    const int64_t width = weight.size(), rows = input.size() / width;
    Forward forward = {Empty(input.size()), Empty(input.size()),
                       std::pmr::vector<float>(static_cast<size_t>(rows)),
                       std::pmr::vector<float>(static_cast<size_t>(rows))};
    ops->Norm({.input = input.data(),
               .residual = residual == nullptr ? nullptr : residual->data(),
               .sum = residual == nullptr ? nullptr : forward.sum.data(),
               .weight = weight.data(),
               .bias = bias.data(),
               .output = forward.output.data(),
               .mean = forward.mean.data(),
               .reciprocal_deviation = forward.deviation.data(),
               .rows = rows,
               .width = width});
    return forward;
  }

  struct Backward {
    Array input_gradient, weight_gradient, bias_gradient;
    bool operator==(const Backward&) const = default;
  };
  // In place of the residual's gradient if there is one. The bias's gradient is added to the old
  // one.
  static Backward NormBackward(const TestOps& ops, const Array& input, const Array& weight,
                               const Forward& forward, const Array& output_gradient,
                               const Array* residual_gradient, DType dtype) {
    const int64_t width = weight.size(), rows = input.size() / width;
    Backward backward = {residual_gradient == nullptr ? Empty(input.size()) : *residual_gradient,
                         Array(dtype, width), Array::Random(dtype, width, 6)};
    void* const to = backward.input_gradient.data();
    ops->NormBackward({.input = input.data(),
                       .weight = weight.data(),
                       .mean = forward.mean.data(),
                       .reciprocal_deviation = forward.deviation.data(),
                       .output_gradient = output_gradient.data(),
                       .residual_gradient = residual_gradient == nullptr ? nullptr : to,
                       .input_gradient = to,
                       .weight_gradient = {backward.weight_gradient.data(), dtype, 0},
                       .bias_gradient = {backward.bias_gradient.data(), dtype, 1},
                       .rows = rows,
                       .width = width});
    return backward;
  }
};

TEST_P(LayerNormTest, AgreesWithFp64AtEveryWidth) {
  ForEveryTarget([&] {
    for (int64_t width : kWidths) {
      const int64_t rows = width > 200 ? 2 : 11;
      const TestOps ops = NewTestOps({.rows = rows, .width = width});
      const Array x = Random(rows * width, 1, 3), r = Random(rows * width, 2), w = Random(width, 3),
                  b = Random(width, 4);
      const Forward with = Norm(ops, x, &r, w, b);
      std::vector<double> added;
      for (int64_t i = 0; i < rows * width; ++i) added.push_back(x[i] + r[i]);
      ExpectClose(with.sum, added, 0, "sum");
      // A row of one column is its own mean, so only the bias is left.
      ExpectClose(with.output, reference::Norm(with.sum.Values(), w.Values(), b.Values()),
                  kRowError, "norm " + std::to_string(width));
      ExpectClose(Norm(ops, x, nullptr, w, b).output,
                  reference::Norm(x.Values(), w.Values(), b.Values()), kRowError,
                  "norm alone " + std::to_string(width));
    }
  });
}

TEST_P(LayerNormTest, BackwardAgreesWithFp64AtEveryWidth) {
  ForEveryTarget([&] {
    for (int64_t width : kWidths) {
      const int64_t rows = width > 200 ? 2 : 37;
      const TestOps ops = NewTestOps({.rows = rows, .width = width});
      const Array x = Random(rows * width, 1), w = Random(width, 2), dy = Random(rows * width, 3),
                  residual = Random(rows * width, 5);
      const Forward forward = Norm(ops, x, nullptr, w, Random(width, 4));
      for (DType dtype : kComputeTypes) {
        const bool in_place = dtype != Compute();
        const Backward got =
            NormBackward(ops, x, w, forward, dy, in_place ? &residual : nullptr, dtype);
        std::vector<double> dx(static_cast<size_t>(rows * width)), dw(static_cast<size_t>(width)),
            db = Array::Random(dtype, width, 6).Values();
        if (in_place) dx = residual.Values();
        reference::NormBackward(x.Values(), w.Values(), dy.Values(), dx, dw, db);
        ExpectClose(got.input_gradient, dx, kRowError, "input " + std::to_string(width));
        ExpectClose(got.weight_gradient, dw, kRowError, "weight " + std::to_string(width));
        ExpectClose(got.bias_gradient, db, kRowError, "bias " + std::to_string(width));
      }
    }
  });
}

TEST_P(LayerNormTest, BackwardAgreesWithFiniteDifferences) {
  const int64_t rows = 4, width = 37;
  const TestOps ops = NewTestOps({.rows = rows, .width = width});
  const Array x = Random(rows * width, 1), w = Random(width, 2), dy = Random(rows * width, 3),
              b = Random(width, 4);
  const Backward got =
      NormBackward(ops, x, w, Norm(ops, x, nullptr, w, b), dy, nullptr, DType::kFloat32);
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
  std::vector<double> dx, dw;
  for (size_t i = 0; i < static_cast<size_t>(rows * width); ++i) dx.push_back(slope(true, i));
  for (size_t i = 0; i < static_cast<size_t>(width); ++i) dw.push_back(slope(false, i));
  ExpectClose(got.input_gradient, dx, kRowError, "input");
  ExpectClose(got.weight_gradient, dw, kRowError, "weight");
}

TEST_P(LayerNormTest, BackwardGivesTheSameBitsAgain) {
  const int64_t rows = 70, width = 264;
  const TestOps ops = NewTestOps({.rows = rows, .width = width});
  const Array x = Random(rows * width, 1), w = Random(width, 2), dy = Random(rows * width, 3);
  const Forward forward = Norm(ops, x, nullptr, w, w);
  const auto run = [&] { return NormBackward(ops, x, w, forward, dy, &x, DType::kFloat32); };
  EXPECT_TRUE(run() == run());
}

INSTANTIATE_TEST_SUITE_P(Devices, LayerNormTest, testing::ValuesIn(OpsCases()), OpsTestName);

}  // namespace
}  // namespace ebb::gpt
