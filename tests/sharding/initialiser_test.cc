// Initial values: the generator against its published answers, the transform against libm, the
// distribution against its moments, and independence of how a parameter is cut.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "ebb/sharding/model.h"
#include "ebb/sharding/philox.h"
#include "tests/status.h"

namespace ebb::initialiser_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

// Values [begin, end) of a parameter.
std::vector<float> Values(const Initialiser& init, std::string_view name, int64_t begin,
                          int64_t end) {
  const std::vector<int64_t> shape = {end};
  std::vector<float> values(static_cast<size_t>(end - begin));
  const absl::Status status =
      init({.parameter = {}, .name = name, .shape = shape, .begin = begin, .end = end}, values);
  EXPECT_OK(status);
  return values;
}

double MeanOfPower(const std::vector<float>& values, int power) {
  double sum = 0;
  for (const float v : values) sum += std::pow(double{v}, power);
  return sum / static_cast<double>(values.size());
}

double Correlation(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * b[i];
  return sum / static_cast<double>(a.size());
}

// Random123's known answers (tests/kat_vectors of DEShawResearch/random123, lines "philox4x32 10").
TEST(Philox, GivesTheKnownAnswers) {
  EXPECT_THAT(Philox4x32({0, 0, 0, 0}, {0, 0}),
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(
      Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
      ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(
      Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

TEST(Constant, FillsTheSlice) {
  EXPECT_THAT(Values(Constant(1.5f), "w", 3, 10), Each(1.5f));
}

// Numbers by libm, which the initialiser does not use. The last bit of fp32 may differ, if the two
// fp64 values are on either side of a rounding boundary.
TEST(Normal, IsBoxAndMullersTransformOfPhilox) {
  const uint64_t seed = 0x0123456789abcdef;
  const std::string name = "block0.attention.weight";
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  const std::vector<float> values = Values(Normal(0.02f, seed), name, 0, 20000);
  for (uint32_t pair = 0; pair < values.size() / 2; ++pair) {
    const auto bits =
        Philox4x32({pair, 0, static_cast<uint32_t>(hash), static_cast<uint32_t>(hash >> 32)},
                   {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    const uint64_t first = ((uint64_t{bits[0]} << 32) | bits[1]) >> 11;
    const uint64_t second = ((uint64_t{bits[2]} << 32) | bits[3]) >> 11;
    const double radius = std::sqrt(-2 * std::log(static_cast<double>(first + 1) * 0x1p-53));
    const double angle = 2 * std::numbers::pi * (static_cast<double>(second) * 0x1p-53);
    ASSERT_FLOAT_EQ(values[2 * pair], static_cast<float>(0.02f * radius * std::cos(angle)));
    ASSERT_FLOAT_EQ(values[2 * pair + 1], static_cast<float>(0.02f * radius * std::sin(angle)));
  }
}

// Every machine, compiler and build type gives these bits. Made by this code; the test above says
// that they are right.
TEST(Normal, GivesTheSameBitsEverywhere) {
  EXPECT_THAT(Values(Normal(1, 1), "w", 0, 6),
              ElementsAre(0x1.3c557ep-1f, 0x1.2f6afcp+0f, -0x1.24d072p+0f, 0x1.4d569ap-3f,
                          -0x1.12318ap+0f, 0x1.a4b3bp-2f));
}

// Bounds: five standard deviations of each mean over n independent values. Var(x) = 1, Var(x^2) =
// 2, Var(x^3) = 15, Var(x^4) = 96.
TEST(Normal, HasTheMomentsOfTheNormalDistribution) {
  const std::vector<float> values = Values(Normal(1, 7), "moments", 0, 1 << 18);
  const double n = static_cast<double>(values.size());
  EXPECT_NEAR(MeanOfPower(values, 1), 0, 5 * std::sqrt(1 / n));
  EXPECT_NEAR(MeanOfPower(values, 2), 1, 5 * std::sqrt(2 / n));
  EXPECT_NEAR(MeanOfPower(values, 3), 0, 5 * std::sqrt(15 / n));
  EXPECT_NEAR(MeanOfPower(values, 4), 3, 5 * std::sqrt(96 / n));
}

// Kolmogorov and Smirnov: the largest distance between the two distribution functions exceeds
// 1.95 / sqrt(n) by chance once in a thousand seeds; this is one seed.
TEST(Normal, FollowsTheNormalDistribution) {
  std::vector<float> values = Values(Normal(1, 8), "distribution", 0, 1 << 16);
  std::sort(values.begin(), values.end());
  const double n = static_cast<double>(values.size());
  double distance = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double expected = 0.5 * std::erfc(-double{values[i]} / std::numbers::sqrt2);
    distance = std::max({distance, std::abs(expected - static_cast<double>(i) / n),
                         std::abs(expected - static_cast<double>(i + 1) / n)});
  }
  EXPECT_LT(distance, 1.95 / std::sqrt(n));
}

TEST(Normal, DoesNotDependOnHowAParameterIsCut) {
  const uint32_t test_seed = 20240611;
  SCOPED_TRACE(::testing::Message() << "seed " << test_seed);
  std::mt19937 random(test_seed);
  const Initialiser init = Normal(0.5f, 3);
  // Also where the pair's number needs more than 32 bits.
  for (const int64_t base : {int64_t{0}, int64_t{1} << 20, (int64_t{1} << 33) - 50}) {
    const int64_t size = 101;
    const std::vector<float> whole = Values(init, "cut", base, base + size);
    for (int trial = 0; trial < 200; ++trial) {
      std::vector<float> pieces;
      for (int64_t begin = 0; begin < size;) {
        const int64_t end = std::min<int64_t>(size, begin + random() % 12);  // empty ones too
        const std::vector<float> piece = Values(init, "cut", base + begin, base + end);
        pieces.insert(pieces.end(), piece.begin(), piece.end());
        begin = end;
      }
      ASSERT_EQ(pieces, whole) << "trial " << trial;
    }
  }
}

// The mean product of independent values has the standard deviation 1 / sqrt(n).
TEST(Normal, IsUncorrelatedOverNamesSeedsAndPlaces) {
  const int64_t n = 1 << 16;
  const double bound = 5 / std::sqrt(static_cast<double>(n));
  const std::vector<float> values = Values(Normal(1, 1), "block0.weight", 0, n);
  EXPECT_LT(std::abs(Correlation(values, Values(Normal(1, 1), "block1.weight", 0, n))), bound);
  EXPECT_LT(std::abs(Correlation(values, Values(Normal(1, 2), "block0.weight", 0, n))), bound);
  EXPECT_LT(
      std::abs(Correlation(values, Values(Normal(1, uint64_t{1} << 32), "block0.weight", 0, n))),
      bound);
  EXPECT_LT(std::abs(Correlation(values, Values(Normal(1, 1), "block0.weight", 1, n + 1))), bound);
  EXPECT_LT(std::abs(Correlation(values, Values(Normal(1, 1), "block0.weight", 2, n + 2))), bound);
}

TEST(Normal, ScalesWithTheStandardDeviation) {
  const std::vector<float> unit = Values(Normal(1, 5), "w", 0, 1000);
  std::vector<float> eighth = Values(Normal(0.125f, 5), "w", 0, 1000);
  for (float& v : eighth) v *= 8;
  EXPECT_EQ(eighth, unit);  // a power of two does not touch the rounding
  EXPECT_THAT(Values(Normal(0, 5), "w", 0, 1000), Each(0.0f));
}

TEST(Normal, RefusesANegativeOrNonFiniteStandardDeviation) {
  const std::vector<int64_t> shape = {2};
  std::vector<float> values(2);
  const Slice slice = {.parameter = {}, .name = "w", .shape = shape, .begin = 0, .end = 2};
  for (const float stddev :
       {-1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const absl::Status status = Normal(stddev, 1)(slice, values);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << stddev;
    EXPECT_THAT(status, testing::Says("parameter \"w\""));
  }
}

TEST(Initialisers, RefuseASpanOfAnotherSizeThanTheSlice) {
  const std::vector<int64_t> shape = {8};
  std::vector<float> values(3);
  const Slice slice = {.parameter = {}, .name = "w", .shape = shape, .begin = 2, .end = 6};
  EXPECT_EQ(Constant(1)(slice, values).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Normal(1, 1)(slice, values).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ebb::initialiser_test
