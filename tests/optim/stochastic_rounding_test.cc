#include "ebb/optim/stochastic_rounding.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ebb/optim/update.h"
#include "every_target.h"

namespace ebb::optim::stochastic_rounding_test {
namespace {

constexpr int64_t kDraws = 65'536;  // of the 16 random bits that a rounding takes

float Number(uint32_t high, uint32_t low) {
  return std::bit_cast<float>(high << 16 | low);
}
float Rounded(float value, int64_t draw) {
  return RoundStochastically(value, static_cast<uint32_t>(draw) << 16);
}

// Every sign and exponent, including subnormals, with leading mantissas at the ends and within. A
// double holds each sum exactly: 24 bits for the values, 16 for their number.
TEST(StochasticRoundingTest, TheMeanOverAllRandomBitsIsTheNumber) {
  constexpr uint32_t kLows[] = {1, 0x1234, 0x8000, 0xffff};
  for (uint32_t high = 0; high < 65'536; ++high) {
    const uint32_t mantissa = high & 0x7f;
    if (mantissa != 0 && mantissa != 0x2a && mantissa != 0x7f) continue;
    if ((high & 0x7f80) == 0x7f80) continue;  // infinities and NaNs
    if ((high & 0x7fff) == 0x7f7f) continue;  // the next one is infinity
    const uint32_t low = kLows[high / 128 % 4];
    const double value = double{Number(high, low)}, below = double{Number(high, 0)},
                 above = double{Number(high + 1, 0)};
    double sum = 0;
    for (int64_t draw = 0; draw < kDraws; ++draw) {
      const double rounded = double{Rounded(Number(high, low), draw)};
      ASSERT_TRUE(rounded == below || rounded == above) << value << " became " << rounded;
      sum += rounded;
    }
    ASSERT_EQ(sum, value * kDraws) << value;
  }
}

TEST(StochasticRoundingTest, NumbersOfBFloat16Stay) {
  for (const BFloat16 number : EveryPattern<BFloat16>()) {
    const auto value = static_cast<float>(number);
    for (const int64_t draw : {0, 1, 0x7fff, 0x8000, 0xffff})
      ASSERT_EQ(Bits(Rounded(value, draw)), Bits(value)) << value << ", draw " << draw;
  }
}

// True also for a NaN with its only bits in the part that is cut, or with a carry into the sign.
TEST(StochasticRoundingTest, NaNsStayAndNumbersNearInfinityMayReachIt) {
  for (const uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff80ffffu, 0xffffffffu}) {
    for (const int64_t draw : {0, 1, 0xffff})
      EXPECT_TRUE(std::isnan(Rounded(std::bit_cast<float>(bits), draw))) << bits;
  }
  for (const uint32_t sign : {0u, 0x8000u}) {
    for (const uint32_t low : {1u, 0x4000u, 0xffffu}) {
      int64_t infinite = 0;
      for (int64_t draw = 0; draw < kDraws; ++draw) {
        const float rounded = Rounded(Number(sign | 0x7f7f, low), draw);
        ASSERT_EQ(std::signbit(rounded), sign != 0);
        infinite += std::isinf(rounded) ? 1 : 0;
        ASSERT_TRUE(std::isinf(rounded) || rounded == Number(sign | 0x7f7f, 0)) << rounded;
      }
      EXPECT_EQ(infinite, low);
    }
  }
}

// These tests draw from fixed generators, so they cannot fail by chance. The bounds are six
// standard deviations of random bits.
constexpr double kSigmas = 6;

std::vector<RoundingKey> SomeKeys() {
  std::vector<RoundingKey> keys;
  for (const uint64_t unit : {uint64_t{0}, uint64_t{1}, uint64_t{0xcbf29ce484222325}}) {
    for (const int64_t step : {1, 2, 3, 1000})
      keys.push_back(RoundingKeyOf({.unit = unit, .index = 0}, step));
  }
  return keys;
}

TEST(StochasticRoundingTest, RandomBitsAreUniform) {
  constexpr uint32_t kCount = 1 << 20, kBins = 1024;
  for (const RoundingKey& key : SomeKeys()) {
    for (const int shift : {22, 16}) {  // the upper ten of the sixteen bits, and the lower
      std::vector<int> bins(kBins);
      for (uint32_t i = 0; i < kCount; ++i) ++bins[(RandomBits(key, i) >> shift) % kBins];
      double chi2 = 0;
      constexpr double kExpected = double{kCount} / kBins;
      for (const int seen : bins) chi2 += (seen - kExpected) * (seen - kExpected) / kExpected;
      EXPECT_NEAR(chi2, kBins - 1, kSigmas * std::sqrt(2.0 * (kBins - 1))) << key.before;
    }
  }
}

// The upper 16 bits as a number in [0, 1), minus its mean, in units of its standard deviation.
double Centred(uint32_t random) {
  return (static_cast<double>(random >> 16) + 0.5 - 32'768) / 65'536 * std::sqrt(12.0);
}

TEST(StochasticRoundingTest, NeighboursStepsAndUnitsAreIndependent) {
  constexpr uint32_t kCount = 1 << 18;
  const auto expect_uncorrelated = [&](const RoundingKey& a, const RoundingKey& b, uint32_t apart) {
    double sum = 0;
    for (uint32_t i = 0; i < kCount; ++i)
      sum += Centred(RandomBits(a, i)) * Centred(RandomBits(b, i + apart));
    EXPECT_NEAR(sum / std::sqrt(double{kCount}), 0, kSigmas)
        << a.before << " and " << b.before << ", " << apart << " apart";
  };
  const std::vector<RoundingKey> keys = SomeKeys();
  for (size_t a = 0; a < keys.size(); ++a) {
    for (const uint32_t apart : {1u, 2u, 64u, 4096u, 1u << 18, 1u << 31})
      expect_uncorrelated(keys[a], keys[a], apart);
    for (size_t b = a + 1; b < keys.size(); ++b) expect_uncorrelated(keys[a], keys[b], 0);
  }
  // Elements of a unit beyond 2^32 have the same indices with another key.
  expect_uncorrelated(RoundingKeyOf({.unit = 7, .index = 0}, 1),
                      RoundingKeyOf({.unit = 7, .index = kRoundingKeyElements}, 1), 0);
}

TEST(StochasticRoundingTest, OneElementsStepsAreIndependent) {
  constexpr int kSteps = 1 << 16;
  for (const uint32_t index : {0u, 1u, 123'456u}) {
    double mean = 0, together = 0, before = 0;
    for (int step = 1; step <= kSteps; ++step) {
      const double now = Centred(RandomBits(RoundingKeyOf({.unit = 3, .index = 0}, step), index));
      mean += now;
      together += before * now;
      before = now;
    }
    EXPECT_NEAR(mean / std::sqrt(double{kSteps}), 0, kSigmas);
    EXPECT_NEAR(together / std::sqrt(double{kSteps}), 0, kSigmas);
  }
}

// One bit of the index changes each of the sixteen used bits in half of all cases.
TEST(StochasticRoundingTest, EveryBitOfTheIndexReachesEveryRandomBit) {
  constexpr uint32_t kCount = 1 << 14;
  const RoundingKey key = RoundingKeyOf({.unit = 5, .index = 0}, 1);
  for (int from = 0; from < 32; ++from) {
    int changed[16] = {};
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t index = i * 2'654'435'761u;
      const uint32_t difference =
          RandomBits(key, index) ^ RandomBits(key, index ^ (uint32_t{1} << from));
      for (int to = 0; to < 16; ++to) changed[to] += (difference >> (16 + to)) & 1;
    }
    for (int to = 0; to < 16; ++to)
      EXPECT_NEAR(changed[to], kCount / 2, kSigmas * std::sqrt(kCount / 4.0)) << from << " " << to;
  }
}

TEST(StochasticRoundingTest, TheMeanOverManyElementsIsTheNumber) {
  constexpr int64_t kCount = 1 << 18;
  ThreadTeam team(2);
  for (const double share : {0.01, 0.3, 0.5, 0.9}) {  // of the way from 1 to the next number
    const std::vector<float> values(kCount, static_cast<float>(1 + share / 128));
    std::vector<BFloat16> rounded(kCount);
    for (const int64_t step : {1, 2}) {
      RoundStochastically(team, values.data(), rounded.data(), kCount, {.unit = 9}, step);
      const auto up = std::count(rounded.begin(), rounded.end(), BFloat16(1.0078125f));
      EXPECT_EQ(std::count(rounded.begin(), rounded.end(), BFloat16(1.0f)), kCount - up);
      EXPECT_NEAR(static_cast<double>(up), share * kCount,
                  kSigmas * std::sqrt(share * (1 - share) * kCount))
          << share;
    }
  }
}

// Gradient descent on (w - target)^2 / 2 with steps of at most a fiftieth of the last bit. The
// descent is linear, so the mean of stochastically rounded numbers follows the exact descent. A
// step moves an element by `rate` of its distance, so it adds at most that times the last bit to
// the variance. With rounding to nearest nothing ever moves.
TEST(StochasticRoundingTest, StepsBelowTheLastBitAddUp) {
  constexpr int64_t kCount = 1 << 14, kSteps = 500;
  constexpr float kTarget = 1.125f, kRate = 1e-3f, kLastBit = 0x1p-7f;
  ThreadTeam team(1);
  const OptimizerConfig optimizer = {.type = OptimizerType::kSgd};
  std::vector<float> gradient(kCount), master(kCount);
  const auto descend = [&](std::vector<BFloat16>& parameter, bool stochastic) {
    for (int64_t step = 1; step <= kSteps; ++step) {
      for (size_t i = 0; i < kCount; ++i) {
        master[i] = static_cast<float>(parameter[i]);
        gradient[i] = master[i] - kTarget;
      }
      Update(team, optimizer,
             {.master = stochastic ? nullptr : master.data(),
              .gradient = gradient.data(),
              .parameter = parameter.data(),
              .parameter_dtype = DType::kBFloat16,
              .rounding = {.unit = 6},
              .count = kCount},
             {.step = step, .learning_rate = kRate});
    }
    double sum = 0;
    for (const BFloat16 value : parameter) sum += double{static_cast<float>(value)};
    return sum / kCount;
  };
  std::vector<BFloat16> nearest(kCount, BFloat16(1.0f)), stochastic = nearest;
  EXPECT_EQ(descend(nearest, false), 1);
  const double distance = kTarget - 1;
  const double bound = kSigmas * std::sqrt(kSteps * kRate * distance * kLastBit / kCount);
  EXPECT_NEAR(descend(stochastic, true), kTarget - distance * std::pow(1 - kRate, kSteps), bound);
  EXPECT_LT(bound, distance / 25);
}

BFloat16 Element(float value, const RoundingPlace& place, int64_t step) {
  return RoundHalfAway(RoundStochastically(
      value, RandomBits(RoundingKeyOf(place, step), static_cast<uint32_t>(place.index))));
}

// For every target, thread and cut, and across the end of a key's elements.
TEST(StochasticRoundingTest, AnArrayIsRoundedElementByElement) {
  constexpr int64_t kCount = 150'001, kStep = 12;
  std::vector<float> values = Numbers<float>(kCount, 1);
  values[3] = values[kCount - 1] = std::numeric_limits<float>::quiet_NaN();
  values[4] = -std::numeric_limits<float>::infinity();
  for (const int64_t first : {int64_t{0}, int64_t{5}, kRoundingKeyElements - 70'003}) {
    std::vector<BFloat16> expected(kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      expected[static_cast<size_t>(i)] =
          Element(values[static_cast<size_t>(i)], {.unit = 4, .index = first + i}, kStep);
    }
    ForEveryTarget([&] {
      for (const int threads : {1, 3}) {
        ThreadTeam team(threads);
        for (const int64_t cut : {int64_t{0}, int64_t{17}, int64_t{70'007}}) {
          std::vector<BFloat16> rounded(kCount);
          RoundStochastically(team, values.data(), rounded.data(), cut, {.unit = 4, .index = first},
                              kStep);
          RoundStochastically(team, values.data() + cut, rounded.data() + cut, kCount - cut,
                              {.unit = 4, .index = first + cut}, kStep);
          for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(Bits(rounded[i]), Bits(expected[i])) << i;
        }
      }
    });
  }
}

}  // namespace
}  // namespace ebb::optim::stochastic_rounding_test
