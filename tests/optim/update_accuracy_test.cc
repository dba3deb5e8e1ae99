// The updates against torch's and against plain arithmetic in fp64.
#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "ebb/optim/update.h"
#include "ebb/optim/update_constants.h"
#include "gtest/gtest.h"

namespace ebb::optim::update_accuracy_test {
namespace {

constexpr int kElements = 6, kSteps = 4;
using Values = std::array<double, kElements>;

struct Case {
  std::string name;
  OptimizerConfig optimizer;
  Values master;  // after kSteps updates
  std::vector<Values> states;
  friend std::ostream& operator<<(std::ostream& out, const Case& test) { return out << test.name; }
};

constexpr Values kStart = {1.0, -0.5, 0.25, 2.0, -3.0, 0.0};
constexpr Values kGradients[kSteps] = {{0.5, -0.25, 1.0, -2.0, 0.125, 0.75},
                                       {-0.25, 0.5, 0.75, -1.5, 0.25, -0.5},
                                       {1.0, 0.125, -0.5, -1.0, 0.0, 0.25},
                                       {0.375, -1.0, 2.0, -0.75, -0.5, 0.0}};

class TorchTableTest : public testing::TestWithParam<Case> {};

TEST_P(TorchTableTest, FourUpdatesGiveTorchsNumbers) {
  const Case& expected = GetParam();
  ThreadTeam team(1);
  std::array<float, kElements> master = {}, gradient = {}, states[kStatesMax] = {};
  std::copy(kStart.begin(), kStart.end(), master.begin());
  if (expected.optimizer.type == OptimizerType::kAdagrad)
    states[0].fill(static_cast<float>(expected.optimizer.initial_accumulator_value));
  for (int step = 1; step <= kSteps; ++step) {
    std::copy(kGradients[step - 1].begin(), kGradients[step - 1].end(), gradient.begin());
    Update(team, expected.optimizer,
           {.master = master.data(),
            .gradient = gradient.data(),
            .states = {{states[0].data()}, {states[1].data()}, {states[2].data()}},
            .count = kElements},
           {.step = step, .learning_rate = expected.optimizer.learning_rate});
  }
  // The table is in fp64. Four updates have at most seven roundings each, on terms no larger than
  // the array's largest element.
  const auto expect_near = [](const std::array<float, kElements>& actual, const Values& values) {
    double largest = 0;
    for (const double value : values) largest = std::max(largest, std::abs(value));
    for (int i = 0; i < kElements; ++i) {
      EXPECT_NEAR(actual[i], values[i], kSteps * 7 * 0x1p-24 * largest) << i;
    }
  };
  expect_near(master, expected.master);
  for (size_t s = 0; s < expected.states.size(); ++s) expect_near(states[s], expected.states[s]);
}

// Source of the numbers: torch 2.15.0 on the CPU, torch.optim.AdamW, Adam, SGD, Adagrad and RMSprop
// with the arguments of each case (foreach and fused false), float64 parameters kStart, gradients
// kGradients, one step() for each. torch has no Lion: algorithm 2 of Chen et al. 2023 in float64.
INSTANTIATE_TEST_SUITE_P(
    All, TorchTableTest,
    testing::Values(Case{"AdamW",
                         {.learning_rate = 0.01, .weight_decay = 0.1},
                         {0.9698714004808792, -0.492486099985153, 0.21759265676403167,
                          2.0302022290803268, -3.0129797424161624, -0.016476025669845587},
                         {{0.14369999999999997, -0.06647499999999999, 0.2886499999999999,
                           -0.4322999999999999, -0.020637499999999996, 0.036675},
                          {0.0014512508122500013, 0.0013274223124375012, 0.005808128561500005,
                           0.007795014246000008, 0.0003279532343593753, 0.0008727519369375007}}},
                    Case{"AdamWithL2",
                         {.type = OptimizerType::kAdam,
                          .learning_rate = 0.01,
                          .weight_decay = 0.1,
                          .decoupled_weight_decay = false},
                         {0.9703053407935228, -0.4911763255401734, 0.21820780842768028,
                          2.037792230951945, -2.9644507210569864, -0.016467041879102737},
                         {{0.17765664834274195, -0.08347414407418147, 0.2967407066949,
                           -0.3629701912885458, -0.12328719707688753, 0.0363490104158206},
                          {0.0018107798247467659, 0.0013999654081080924, 0.005963255439309129,
                           0.005849829130948251, 0.000757373144695911, 0.0008731830294092139}}},
                    Case{"AdamWithOtherBetasAndEpsilon",
                         {.type = OptimizerType::kAdam,
                          .learning_rate = 0.05,
                          .beta1 = 0.8,
                          .beta2 = 0.99,
                          .epsilon = 1e-3},
                         {0.8694017558583079, -0.4730859992536056, 0.09558137735470201,
                          2.1875917628274335, -3.117659307851041, -0.07641486145736426},
                         {{0.2541999999999999, -0.14159999999999995, 0.5184, -0.7067999999999999,
                           -0.05519999999999998, 0.05280000000000001},
                          {0.014344560000000011, 0.013211374375000012, 0.05769105250000005,
                           0.07638921000000007, 0.003264171718750003, 0.008526931875000006}}},
                    Case{"SgdWithWeightDecay",
                         {.type = OptimizerType::kSgd, .learning_rate = 0.1, .weight_decay = 0.01},
                         {0.833705871051, -0.43546547302550004, -0.07559887589975003,
                          2.5160127418019997, -2.9754305504904996, -0.04985017492500001},
                         {}},
                    Case{"SgdWithMomentum",
                         {.type = OptimizerType::kSgd, .learning_rate = 0.1, .momentum = 0.9},
                         {0.6682999999999999, -0.47327499999999995, -0.40215, 3.3593, -3.0607375,
                          -0.16992500000000005},
                         {{1.437, -0.66475, 2.8865, -4.323, -0.20637500000000003,
                           0.3667500000000001}}},
                    Case{"SgdWithDampeningAndWeightDecay",
                         {.type = OptimizerType::kSgd,
                          .learning_rate = 0.1,
                          .weight_decay = 0.01,
                          .momentum = 0.9,
                          .dampening = 0.5},
                         {0.7421636453313749, -0.4405930773531875, -0.24907447349996878,
                          3.01000323062525, -3.033067473786313, -0.213627725615625},
                         {{0.92017241918625, -0.43362991271812495, 1.8099373593746875,
                           -2.8423638112525, -0.12053978588687497, 0.45507706865625003}}},
                    Case{"SgdWithNesterovMomentumAndWeightDecay",
                         {.type = OptimizerType::kSgd,
                          .learning_rate = 0.1,
                          .weight_decay = 0.01,
                          .momentum = 0.9,
                          .nesterov = true},
                         {0.527983053766337, -0.40734248409566853, -0.662332822025607,
                          3.718169104313044, -3.005322236742545, -0.20182808477009254},
                         {{1.46675516907191, -0.6824712307859551, 2.8852974480163525,
                           -4.23116289227918, -0.3111629344866049, 0.36293060010575}}},
                    Case{"Adagrad",
                         {.type = OptimizerType::kAdagrad, .learning_rate = 0.1, .epsilon = 1e-10},
                         {0.8263256526358858, -0.42449232502384826, 0.04418293207245859,
                          2.2239718833556688, -3.1021555629088327, -0.07125610455868292},
                         {{1.453125, 1.328125, 5.8125, 7.8125, 0.328125, 0.875}}},
                    Case{"AdagradWithAllOptions",
                         {.type = OptimizerType::kAdagrad,
                          .learning_rate = 0.1,
                          .epsilon = 1e-3,
                          .weight_decay = 0.1,
                          .lr_decay = 0.25,
                          .initial_accumulator_value = 0.5},
                         {0.8806242104081634, -0.4637514023210633, 0.10153621202881355,
                          2.1709123423243257, -2.9051678532265863, -0.0511083983725986},
                         {{2.299264420543806, 1.9056414882832122, 6.435120452188715,
                           6.309388996286083, 1.2524891231110473, 1.380492375781797}}},
                    Case{"Rmsprop",
                         {.type = OptimizerType::kRmsprop, .learning_rate = 0.01},
                         {0.8261170504967438, -0.42447832478711334, 0.043942915967773125,
                          2.2247322535305107, -3.1020169962624395, -0.07127469921852089},
                         {{0.014344560000000011, 0.013211374375000012, 0.05769105250000005,
                           0.07638921000000007, 0.003264171718750003, 0.008526931875000006}}},
                    Case{"RmspropWithMomentum",
                         {.type = OptimizerType::kRmsprop,
                          .learning_rate = 0.01,
                          .epsilon = 1e-3,
                          .weight_decay = 0.1,
                          .momentum = 0.5,
                          .alpha = 0.9},
                         {0.9014387132847195, -0.4663831121287241, 0.14738288858974416,
                          2.1177911815368025, -2.8567026023776565, -0.04059966470805781},
                         {{0.15816673503920167, 0.13376415517032844, 0.5528541454263929,
                           0.45827922648947955, 0.07271468736632825, 0.0670085461583452},
                          {2.7673209819936386, -2.3501821734841544, 2.997313568747609,
                           -2.242887893470828, -4.88939870613981, 0.37577755087176856}}},
                    Case{"CenteredRmsprop",
                         {.type = OptimizerType::kRmsprop,
                          .learning_rate = 0.01,
                          .epsilon = 1e-3,
                          .alpha = 0.9,
                          .centered = true},
                         {0.940404271095901, -0.47475805460479487, 0.17859103506363772,
                          2.0809455483178607, -3.0351304776566708, -0.02427400915851817},
                         {{0.12734999999999996, 0.12621249999999998, 0.5409624999999999,
                           0.6200999999999999, 0.031201562499999995, 0.06688124999999998},
                          {0.14369999999999997, -0.06647499999999999, 0.2886499999999999,
                           -0.4322999999999999, -0.020637499999999996, 0.036675}}},
                    Case{"CenteredRmspropWithMomentum",
                         {.type = OptimizerType::kRmsprop,
                          .learning_rate = 0.01,
                          .epsilon = 1e-3,
                          .weight_decay = 0.1,
                          .momentum = 0.5,
                          .alpha = 0.8,
                          .centered = true},
                         {0.9180290286362273, -0.47116157499794165, 0.16310882536776364,
                          2.1038687509183234, -2.877043634778925, -0.03386392992695434},
                         {{0.27638618412195987, 0.2564247033994035, 1.0361166113332325,
                           0.7069862832553871, 0.14287863791371205, 0.09973063150595912},
                          {2.434442818133581, -1.8339549954490095, 2.601547469370612,
                           -2.232407660131588, -4.371064399737716, 0.3226886058576655},
                          {0.3112722108166596, -0.17030915601713972, 0.5307388022823653,
                           -0.5858921779339664, -0.22970885211123004, 0.05148452636206051}}},
                    Case{"Lion",
                         {.type = OptimizerType::kLion, .learning_rate = 0.01, .beta2 = 0.99},
                         {0.98, -0.5, 0.23, 2.04, -3.02, -0.02},
                         {{0.016051245000000013, -0.0062877475000000065, 0.032103740000000026,
                           -0.05150748000000004, -0.001336876250000001, 0.004851742500000004}}},
                    Case{"LionWithOtherBetasAndWeightDecay",
                         {.type = OptimizerType::kLion,
                          .learning_rate = 0.05,
                          .beta1 = 0.6,
                          .beta2 = 0.8,
                          .weight_decay = 0.1},
                         {0.8806470068749999, -0.4900722565625, 0.14603238140625, 2.158803995,
                          -3.0389534956250004, -0.09950249375},
                         {{0.2542, -0.1416, 0.5184, -0.7068, -0.0552, 0.0528}}}),
    [](const testing::TestParamInfo<Case>& test) { return test.param.name; });

// Algorithm 1 of Kingma & Ba, with its bias corrections as in the paper and decoupled decay before
// them, all in fp64.
struct Fp64Adam {
  double p = 0, m = 0, v = 0;
  void Step(const OptimizerConfig& o, double g, int step) {
    p -= o.learning_rate * o.weight_decay * p;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = o.bias_correction ? m / (1 - std::pow(o.beta1, step)) : m;
    const double v_hat = o.bias_correction ? v / (1 - std::pow(o.beta2, step)) : v;
    p -= o.learning_rate * m_hat / (std::sqrt(v_hat) + o.epsilon);
  }
};

class Fp64ReferenceTest : public testing::TestWithParam<bool> {};

TEST_P(Fp64ReferenceTest, TwentyUpdatesStayWithinRounding) {
  constexpr int kCount = 500, kUpdates = 20;
  constexpr uint64_t kSeed = 9;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  const OptimizerConfig optimizer = {
      .learning_rate = 0.01, .weight_decay = 0.1, .bias_correction = GetParam()};
  ThreadTeam team(2);
  std::mt19937_64 random(kSeed);
  std::vector<float> master(kCount), gradient(kCount), first(kCount), second(kCount);
  std::vector<Fp64Adam> reference(kCount);
  std::uniform_real_distribution<float> magnitude(0.5f, 2.0f);
  const auto signed_magnitude = [&] {
    return random() % 2 == 0 ? magnitude(random) : -magnitude(random);
  };
  for (int i = 0; i < kCount; ++i) reference[i].p = master[i] = signed_magnitude();
  for (int step = 1; step <= kUpdates; ++step) {
    for (int i = 0; i < kCount; ++i) {
      gradient[i] = signed_magnitude();
      reference[i].Step(optimizer, 0.25 * gradient[i], step);
    }
    Update(team, optimizer,
           {.master = master.data(),
            .gradient = gradient.data(),
            .states = {{first.data()}, {second.data()}},
            .count = kCount},
           {.step = step, .learning_rate = optimizer.learning_rate, .gradient_factor = 0.25f});
  }
  // A rounding is 2^-24. Each update rounds the master three times, all below 4. Gradients are
  // within a factor of 4, so momentum / sqrt(variance) is at most 4. With three roundings a step in
  // each of the two it carries at most 6 * 4 * steps roundings at step `steps`. Without bias
  // correction the ratio is up to 1 / sqrt(1 - 0.999) of that.
  const double ratio = GetParam() ? 4 : 4 * 32;
  const double rounding = 0x1p-24, rate = optimizer.learning_rate;
  const double tolerance =
      rounding * (3 * 4 * kUpdates + rate * 6 * ratio * kUpdates * kUpdates / 2);
  for (int i = 0; i < kCount; ++i) {
    ASSERT_NEAR(master[i], reference[i].p, tolerance) << i;
  }
}

// The rules with an average of gradients as their first state, and the beta of that average.
class FirstMomentTest : public testing::TestWithParam<OptimizerType> {
 protected:
  // The first states after one update of kElements elements.
  std::array<float, kElements> After(double beta, std::array<float, kElements> momentum,
                                     const std::array<float, kElements>& gradient) {
    OptimizerConfig optimizer = {.type = GetParam(), .beta1 = beta};
    if (GetParam() == OptimizerType::kLion) optimizer.beta2 = beta;
    ThreadTeam team(1);
    std::array<float, kElements> master = {}, variance = {};
    Update(team, optimizer,
           {.master = master.data(),
            .gradient = gradient.data(),
            .states = {{momentum.data()}, {variance.data()}, {}},
            .count = kElements},
           {.step = 1, .learning_rate = 0.01});
    return momentum;
  }
};

constexpr double kBetas[] = {0, 0.1, 0.45, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 1 - 1e-6};

// Weights of float(0.99) and 1 - float(0.99) are 1e-6 off.
TEST_P(FirstMomentTest, AFirstGradientHasItsWeightWithinTwoRoundings) {
  constexpr std::array<float, kElements> kGradient = {1.0f, -0.3f, 7.7f, 1e-20f, -1e20f, 0.111f};
  for (const double beta : kBetas) {
    const auto momentum = After(beta, {}, kGradient);
    for (int i = 0; i < kElements; ++i) {
      const double expected = (1 - beta) * double{kGradient[i]};
      EXPECT_NEAR(momentum[i] / expected, 1, 0x1p-23) << beta << ", " << kGradient[i];
    }
  }
}

TEST_P(FirstMomentTest, TheAverageOfASteadyGradientIsTheGradient) {
  constexpr std::array<float, kElements> kGradient = {1.0f, -0.3f, 7.7f, 1e-20f, -1e20f, 0.111f};
  for (const double beta : kBetas) EXPECT_EQ(After(beta, kGradient, kGradient), kGradient) << beta;
}

TEST_P(FirstMomentTest, ABetaOfZeroKeepsNothingOfALargeAverage) {
  constexpr std::array<float, kElements> kGradient = {1.0f, -0.3f, 7.7f, 1e-20f, -1e-9f, 0.0f};
  EXPECT_EQ(After(0, {1e9f, 1e9f, -1e9f, 1e9f, 1e20f, -3.0f}, kGradient), kGradient);
}

INSTANTIATE_TEST_SUITE_P(Rules, FirstMomentTest,
                         testing::Values(OptimizerType::kAdam, OptimizerType::kAdamW,
                                         OptimizerType::kLamb, OptimizerType::kLion));

INSTANTIATE_TEST_SUITE_P(BiasCorrection, Fp64ReferenceTest, testing::Bool());

}  // namespace
}  // namespace ebb::optim::update_accuracy_test
