// Norms of whole parameters: their sums are exact in any order; and LAMB and LARS, which scale by
// them, against the papers in fp64.
#include "ebb/optim/parameter_norms.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ebb/optim/update.h"
#include "every_target.h"
#include "numbers.h"
#include "reference.h"

namespace ebb::optim::parameter_norms_test {
namespace {

ExactSum SumOf(const std::vector<double>& numbers) {
  ExactSum sum = {};
  for (const double number : numbers) Add(number, sum);
  return sum;
}

TEST(ExactSumTest, RoundsOnceToNearestAndTiesToEven) {
  EXPECT_EQ(Rounded(SumOf({})), 0);
  EXPECT_EQ(Rounded(SumOf({0.0})), 0);
  EXPECT_EQ(Rounded(SumOf({1, 0x1p-53})), 1);
  EXPECT_EQ(Rounded(SumOf({1, 0x1p-53, 0x1p-298})), 1 + 0x1p-52);
  EXPECT_EQ(Rounded(SumOf({1 + 0x1p-52, 0x1p-53})), 1 + 0x1p-51);
  EXPECT_EQ(Rounded(SumOf({0x1p-298})), 0x1p-298);
  EXPECT_EQ(Rounded(SumOf({0x1p-298, 0x1p-298, 0x1p-298})), 0x1.8p-297);
  EXPECT_EQ(Rounded(SumOf(std::vector<double>(3000, 0.1))), 3000 * 0.1);  // it also rounds once
  const double largest = std::numeric_limits<float>::max();
  EXPECT_EQ(Rounded(SumOf({64 * largest * largest, 1})), 64 * largest * largest);
  EXPECT_EQ(Rounded(SumOf({0x1.fffffffffffffp0, 0x1p-60})), 0x1.fffffffffffffp0);
  EXPECT_EQ(Rounded(SumOf({0x1.fffffffffffffp0, 0x1p-53})), 2);  // a carry out of the mantissa
}

TEST(ExactSumTest, AnInfinityOrNaNStays) {
  for (const double bad : {std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN(), 0x1p300}) {
    ExactSum sum = SumOf({1, bad});
    EXPECT_TRUE(std::isnan(Rounded(sum)));
    ExactSum total = SumOf({2});
    Add(Pack(sum), total);
    EXPECT_TRUE(std::isnan(Rounded(total)));
  }
}

// Squares of all magnitudes, in any order and in any parts, and with carries through many limbs.
TEST(ExactSumTest, IsTheSameInEveryOrder) {
  std::vector<double> squares;
  for (const float number : Numbers<float>(5000, 3))
    squares.push_back(double{number} * double{number});
  const double sum = Rounded(SumOf(squares));
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    std::shuffle(squares.begin(), squares.end(), random);
    EXPECT_EQ(Rounded(SumOf(squares)), sum);
    const size_t cut = random() % squares.size();
    ExactSum total = SumOf({squares.begin(), squares.begin() + static_cast<long>(cut)});
    Add(Pack(SumOf({squares.begin() + static_cast<long>(cut), squares.end()})), total);
    EXPECT_EQ(Rounded(total), sum);
  }
  ExactSum carries = {};
  for (int i = 0; i < 100'000; ++i) Add(0x1.fffffffffffffp40, carries);
  EXPECT_EQ(Rounded(carries), 100'000 * 0x1.fffffffffffffp40);
}

struct Arrays {
  std::vector<float> master, gradient, momentum, variance;
  Arrays(int64_t count, uint64_t seed)
      : master(Numbers<float>(count, seed, Range::kNearOne)),
        gradient(Numbers<float>(count, seed + 1, Range::kNearOne)),
        momentum(Numbers<float>(count, seed + 2, Range::kNearOne)),
        variance(Numbers<float>(count, seed + 3, Range::kNearOne)) {
    for (float& v : variance) v *= v;
  }
  UpdateArrays From(int64_t begin, int64_t count) {
    return {.master = master.data() + begin,
            .gradient = gradient.data() + begin,
            .states = {{momentum.data() + begin}, {variance.data() + begin}},
            .count = count};
  }
};

const OptimizerConfig kOptimizers[] = {
    {.type = OptimizerType::kLamb, .weight_decay = 0.1},
    {.type = OptimizerType::kLamb, .epsilon = 1e-2, .epsilon_inside_root = true},
    {.type = OptimizerType::kLamb, .weight_decay = 0.01, .bias_correction = false},
    {.type = OptimizerType::kLars, .weight_decay = 0.1},
    {.type = OptimizerType::kLars, .momentum = 0.9},
};
constexpr UpdateScalars kScalars = {.step = 3, .learning_rate = 0.1, .gradient_factor = 0.5f};

// The definition, block by block, with the reference's direction.
NormSums ReferenceNorms(const OptimizerConfig& optimizer, const Arrays& before) {
  NormSums sums = {};
  Arrays arrays = before;
  const size_t count = arrays.master.size();
  for (size_t block = 0; block < count; block += kExactBlock) {
    double parameter[32] = {}, direction[32] = {};
    for (size_t i = block; i < std::min<size_t>(block + kExactBlock, count); ++i) {
      const float g = arrays.gradient[i];
      const float u = optimizer.type == OptimizerType::kLars
                          ? kScalars.gradient_factor * g
                          : ReferenceLambDirection(optimizer, kScalars, g, arrays.master[i],
                                                   arrays.momentum[i], arrays.variance[i]);
      const double w = arrays.master[i];
      parameter[(i - block) % 32] = std::fma(w, w, parameter[(i - block) % 32]);
      direction[(i - block) % 32] = std::fma(double{u}, double{u}, direction[(i - block) % 32]);
    }
    for (size_t width = 16; width > 0; width /= 2) {
      for (size_t j = 0; j < width; ++j) {
        parameter[j] += parameter[j + width];
        direction[j] += direction[j + width];
      }
    }
    Add(parameter[0], sums.parameter);
    Add(direction[0], sums.direction);
  }
  return sums;
}

TEST(ParameterNorms, AreTheSameBitsHoweverAParameterIsCut) {
  for (const OptimizerConfig& optimizer : kOptimizers) {
    const UpdateRule rule = UpdateRuleOf(optimizer);
    const UpdateConstants constants = UpdateConstantsOf(optimizer, kScalars);
    for (const int64_t count : {1, 63, 64, 65, 1000, 70'000}) {
      SCOPED_TRACE(count);
      const Arrays before(count, 11);
      const NormSums expected = ReferenceNorms(optimizer, before);
      ForEveryTarget([&] {
        for (const int threads : {1, 3}) {
          ThreadTeam team(threads);
          for (const int64_t cut : {count, int64_t{64}, int64_t{192}, int64_t{2048}}) {
            if (cut == 64 && count > 1000) continue;
            Arrays arrays = before;
            NormSums sums = {};
            for (int64_t at = 0; at < count; at += cut)
              SumNorms(team, rule, arrays.From(at, std::min(cut, count - at)), constants, sums);
            EXPECT_EQ(Rounded(sums.parameter), Rounded(expected.parameter));
            EXPECT_EQ(Rounded(sums.direction), Rounded(expected.direction));
            EXPECT_EQ(arrays.master, before.master);
            EXPECT_EQ(arrays.momentum, before.momentum);
            EXPECT_EQ(arrays.variance, before.variance);
          }
        }
      });
    }
  }
}

TEST(ParameterNorms, ConstantsOfASkippedStepGiveNoNorms) {
  ThreadTeam team(1);
  Arrays arrays(64, 1);
  NormSums sums = {};
  SumNorms(team, UpdateRule::kLars, arrays.From(0, 64), UpdateConstants(), sums);
  EXPECT_EQ(Rounded(sums.parameter), 0);
}

TEST(TrustRatioTest, IsThePapersWithinDeepSpeedsBounds) {
  const OptimizerConfig lamb = {.type = OptimizerType::kLamb};
  EXPECT_DOUBLE_EQ(TrustRatio(lamb, 4, 0.25), 4);
  EXPECT_DOUBLE_EQ(TrustRatio(lamb, 1e6, 1), 10);
  EXPECT_DOUBLE_EQ(TrustRatio(lamb, 1, 1e6), 0.01);
  EXPECT_DOUBLE_EQ(TrustRatio({.type = OptimizerType::kLamb, .max_coefficient = 0.3}, 1, 1), 0.3);
  const OptimizerConfig lars = {
      .type = OptimizerType::kLars, .epsilon = 0.5, .weight_decay = 0.1, .trust_coefficient = 0.02};
  EXPECT_DOUBLE_EQ(TrustRatio(lars, 9, 16), 0.02 * 3 / (4 + 0.1 * 3 + 0.5));
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const OptimizerConfig& optimizer : {lamb, lars}) {
    for (const double bad : {0.0, kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
      EXPECT_EQ(TrustRatio(optimizer, bad, 1), 1);
      EXPECT_EQ(TrustRatio(optimizer, 1, bad), 1);
    }
  }
}

double Norm(const std::vector<double>& values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

// You et al. 2020, algorithm 2, and You et al. 2017, algorithm 1, for one parameter in fp64.
void PaperStep(const OptimizerConfig& o, int step, const std::vector<double>& g,
               std::vector<double>& w, std::vector<double>& m, std::vector<double>& v) {
  std::vector<double> u(w.size());
  if (o.type == OptimizerType::kLars) {
    const bool scales = Norm(w) > 0 && Norm(g) > 0;
    const double ratio =
        scales ? o.trust_coefficient * Norm(w) / (Norm(g) + o.weight_decay * Norm(w) + o.epsilon)
               : 1;
    for (size_t i = 0; i < w.size(); ++i) {
      m[i] = o.momentum * m[i] + ratio * (g[i] + o.weight_decay * w[i]);
      w[i] -= o.learning_rate * m[i];
    }
    return;
  }
  const double c1 = o.bias_correction ? 1 - std::pow(o.beta1, step) : 1;
  const double c2 = o.bias_correction ? 1 - std::pow(o.beta2, step) : 1;
  for (size_t i = 0; i < w.size(); ++i) {
    m[i] = o.beta1 * m[i] + (1 - o.beta1) * g[i];
    v[i] = o.beta2 * v[i] + (1 - o.beta2) * g[i] * g[i];
    const double denominator =
        o.epsilon_inside_root ? std::sqrt(v[i] / c2 + o.epsilon) : std::sqrt(v[i] / c2) + o.epsilon;
    u[i] = m[i] / c1 / denominator + o.weight_decay * w[i];
  }
  const bool scales = Norm(w) > 0 && Norm(u) > 0;
  const double ratio =
      scales ? std::clamp(Norm(w) / Norm(u), o.min_coefficient, o.max_coefficient) : 1;
  for (size_t i = 0; i < w.size(); ++i) w[i] -= o.learning_rate * ratio * u[i];
}

struct PaperCase {
  std::string name;
  OptimizerConfig optimizer;
  double weights = 1, gradients = 1;  // their magnitudes
  friend std::ostream& operator<<(std::ostream& out, const PaperCase& c) { return out << c.name; }
};
class Paper : public testing::TestWithParam<PaperCase> {};

TEST_P(Paper, AgreesAfterFiveUpdates) {
  const OptimizerConfig& optimizer = GetParam().optimizer;
  constexpr int64_t kCount = 200;
  Arrays arrays(kCount, 5);
  std::fill(arrays.momentum.begin(), arrays.momentum.end(), 0.0f);
  std::fill(arrays.variance.begin(), arrays.variance.end(), 0.0f);
  for (float& w : arrays.master) w *= static_cast<float>(GetParam().weights);
  std::vector<double> w(arrays.master.begin(), arrays.master.end()), m(kCount), v(kCount);
  ThreadTeam team(1);
  for (int step = 1; step <= 5; ++step) {
    arrays.gradient = Numbers<float>(kCount, static_cast<uint64_t>(20 + step), Range::kNearOne);
    for (float& g : arrays.gradient) g *= static_cast<float>(GetParam().gradients);
    UpdateScalars scalars = {.step = step, .learning_rate = optimizer.learning_rate};
    NormSums sums = {};
    SumNorms(team, UpdateRuleOf(optimizer), arrays.From(0, kCount),
             UpdateConstantsOf(optimizer, scalars), sums);
    scalars.trust_ratio = TrustRatio(optimizer, Rounded(sums.parameter), Rounded(sums.direction));
    Update(team, optimizer, arrays.From(0, kCount), scalars);
    PaperStep(optimizer, step, {arrays.gradient.begin(), arrays.gradient.end()}, w, m, v);
  }
  double largest = 0;
  for (const double value : w) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < kCount; ++i)
    EXPECT_NEAR(arrays.master[i], w[i], 5 * 8 * 0x1p-24 * largest) << i;
}

constexpr OptimizerConfig kLamb = {.type = OptimizerType::kLamb, .learning_rate = 0.05},
                          kLars = {.type = OptimizerType::kLars, .learning_rate = 0.5};
OptimizerConfig With(OptimizerConfig optimizer, void (*set)(OptimizerConfig&)) {
  set(optimizer);
  return optimizer;
}
using O = OptimizerConfig;
INSTANTIATE_TEST_SUITE_P(
    Cases, Paper,
    testing::Values(PaperCase{"Lamb", kLamb}, PaperCase{"LambOfZeros", kLamb, 0, 1},
                    PaperCase{"LambWithoutGradient", kLamb, 1, 0},
                    PaperCase{"LambWithWeightDecay",
                              With(kLamb, [](O& o) { o.weight_decay = 0.1; })},
                    PaperCase{"LambWithoutBiasCorrection",
                              With(kLamb, [](O& o) { o.bias_correction = false; })},
                    PaperCase{"LambWithEpsilonInsideTheRoot", With(kLamb,
                                                                   [](O& o) {
                                                                     o.epsilon = 1e-2;
                                                                     o.epsilon_inside_root = true;
                                                                   })},
                    PaperCase{"LambAtItsMost", With(kLamb, [](O& o) { o.max_coefficient = 0.02; })},
                    PaperCase{"LambAtItsLeast", With(kLamb, [](O& o) { o.min_coefficient = 3; })},
                    PaperCase{"LambWithOtherBetas", With(kLamb,
                                                         [](O& o) {
                                                           o.beta1 = 0.8;
                                                           o.beta2 = 0.99;
                                                         })},
                    PaperCase{"Lars", With(kLars, [](O& o) { o.trust_coefficient = 0.1; })},
                    PaperCase{"LarsOfZeros", kLars, 0, 1},
                    PaperCase{"LarsWithoutGradient", kLars, 1, 0},
                    PaperCase{"LarsWithAllOptions", With(kLars,
                                                         [](O& o) {
                                                           o.weight_decay = 0.1;
                                                           o.momentum = 0.9;
                                                           o.trust_coefficient = 0.05;
                                                           o.epsilon = 0.1;
                                                         })}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ebb::optim::parameter_norms_test
