#include "ebb/optim/norm.h"

#include <limits>
#include <tuple>
#include <vector>

#include "every_target.h"

namespace ebb::optim::norm_test {
namespace {

// norm.h's definition, written naively: the sums of 1,024 numbers each, every number added to its
// lane.
template <class T, class Add>
std::vector<double> DefinedBlocks(const std::vector<T>& values, Add add) {
  std::vector<double> sums;
  for (size_t begin = 0; begin < values.size(); begin += 1024) {
    double lane[16] = {};
    for (size_t i = begin; i < std::min(begin + 1024, values.size()); ++i)
      lane[(i - begin) % 16] = add(lane[(i - begin) % 16], values[i]);
    double eight[8], four[4], two[2];
    for (int j = 0; j < 8; ++j) eight[j] = lane[j] + lane[j + 8];
    for (int j = 0; j < 4; ++j) four[j] = eight[j] + eight[j + 4];
    for (int j = 0; j < 2; ++j) two[j] = four[j] + four[j + 2];
    sums.push_back(two[0] + two[1]);
  }
  return sums;
}

double DefinedSum(std::vector<double> sums) {
  while (sums.size() > 1)
    sums = DefinedBlocks(sums, [](double lane, double x) { return lane + x; });
  return sums.empty() ? 0 : sums[0];
}

template <class T>
double DefinedSumOfSquares(const std::vector<T>& values) {
  return DefinedSum(DefinedBlocks(values, [](double lane, T value) {
    const double x = static_cast<float>(value);
    return std::fma(x, x, lane);
  }));
}

std::vector<double> Scratch(size_t count) {
  return std::vector<double>(static_cast<size_t>(NormBlocks(static_cast<int64_t>(count))));
}

template <class T>
double Sum(ThreadTeam& team, const std::vector<T>& values) {
  auto blocks = Scratch(values.size());
  return SumOfSquares(team, values.data(), kDTypeOf<T>, static_cast<int64_t>(values.size()),
                      blocks);
}

template <class T>
void ExpectDefinedSums() {
  for (const int threads : {1, 2, 3}) {
    ThreadTeam team(threads);
    for (const int64_t count : {0, 1, 2, 15, 16, 17, 31, 1023, 1024, 1025, 5000, 70'001, 131'072}) {
      SCOPED_TRACE(count);
      const auto values = Numbers<T>(count, static_cast<uint64_t>(count), Range::kNearOne);
      const double expected = DefinedSumOfSquares(values);
      ForEveryTarget([&] { EXPECT_EQ(Sum(team, values), expected) << threads << " threads"; });
    }
  }
}

TEST(NormTest, SumOfSquaresHasTheDefinedBitsInFp32) {
  ExpectDefinedSums<float>();
}
TEST(NormTest, SumOfSquaresHasTheDefinedBitsInBf16) {
  ExpectDefinedSums<BFloat16>();
}

TEST(NormTest, SumOfSquaresHasTheDefinedBitsInFp16) {
  ExpectDefinedSums<Float16>();
}

// More blocks than one sum of the level above takes.
TEST(NormTest, SumsOfManyBlocksHaveTheDefinedBits) {
  constexpr int64_t kCount = (1 << 20) + 1024 * 40 + 7;
  const auto values = Numbers<BFloat16>(kCount, 3, Range::kNearOne);
  const double expected = DefinedSumOfSquares(values);
  for (const int threads : {1, 3}) {
    ThreadTeam team(threads);
    ForEveryTarget([&] { EXPECT_EQ(Sum(team, values), expected) << threads << " threads"; });
  }
}

TEST(NormTest, LevelsHaveTheDefinedBits) {
  for (const int64_t count : {0, 1, 3, 17, 1024, 1025, 5000, (1 << 20) - 1, (1 << 20) + 1025}) {
    SCOPED_TRACE(count);
    const auto numbers = Numbers<float>(count, 5, Range::kPositive);
    const std::vector<double> sums(numbers.begin(), numbers.end());
    const double expected = DefinedSum(sums);
    ForEveryTarget([&] {
      auto blocks = sums;
      EXPECT_EQ(AddBlocks(blocks), expected);
    });
  }
}

TEST(NormTest, SumOfSquaresOfFp16CountsItsSubnormals) {
  ThreadTeam team(1);
  const std::vector<Float16> values(1000, Float16(0x1p-24f));
  ForEveryTarget([&] { EXPECT_EQ(Sum(team, values), 1000 * 0x1p-48); });
}

// The largest fp32 squares stay finite, so an infinite sum means that an element is infinite or
// NaN.
TEST(NormTest, TheSumIsFiniteExactlyWhereAllElementsAre) {
  ThreadTeam team(2);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const size_t at : {0, 5, 15, 16, 1023, 1024, 2900, 2999}) {
    std::vector<float> values(3000, std::numeric_limits<float>::max());
    ForEveryTarget([&] {
      values[at] = -std::numeric_limits<float>::max();
      EXPECT_TRUE(std::isfinite(Sum(team, values)));
      values[at] = -kInfinity;
      EXPECT_EQ(Sum(team, values), kInfinity);
      values[at] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_TRUE(std::isnan(Sum(team, values)));
    });
  }
}

template <class Source, class Destination>
void ExpectAccumulates(int64_t count, int threads, bool add, Range range) {
  ThreadTeam team(threads);
  const auto source = Numbers<Source>(count, 11, range);
  const auto before = Numbers<Destination>(count, 12, range);
  std::vector<Destination> expected = before;
  for (int64_t i = 0; i < count; ++i) {
    expected[i] =
        Destination((add ? static_cast<float>(before[i]) : 0.0f) + static_cast<float>(source[i]));
  }
  ForEveryTarget([&] {
    auto destination = before;
    AccumulateArrays arrays = {.source = source.data(),
                               .source_dtype = kDTypeOf<Source>,
                               .destination = destination.data(),
                               .destination_dtype = kDTypeOf<Destination>,
                               .count = count,
                               .add = add};
    Accumulate(team, arrays);
    for (int64_t i = 0; i < count; ++i) ASSERT_EQ(Bits(destination[i]), Bits(expected[i])) << i;

    destination = before;
    arrays.destination = destination.data();
    auto blocks = Scratch(source.size());
    const double sum = AccumulateAndSumSquares(team, arrays, blocks);
    for (int64_t i = 0; i < count; ++i) ASSERT_EQ(Bits(destination[i]), Bits(expected[i])) << i;
    EXPECT_EQ(sum, DefinedSumOfSquares(expected));
  });
}

class AccumulateTest : public testing::TestWithParam<std::tuple<int64_t, int, bool>> {};

TEST_P(AccumulateTest, AddsInFp32AndRoundsOnce) {
  const auto [count, threads, add] = GetParam();
  for (const Range range : {Range::kAll, Range::kNearOne}) {
    ExpectAccumulates<float, float>(count, threads, add, range);
    ExpectAccumulates<BFloat16, float>(count, threads, add, range);
    ExpectAccumulates<BFloat16, BFloat16>(count, threads, add, range);
    ExpectAccumulates<float, BFloat16>(count, threads, add, range);
    ExpectAccumulates<Float16, float>(count, threads, add, range);
    ExpectAccumulates<Float16, Float16>(count, threads, add, range);
  }
}

INSTANTIATE_TEST_SUITE_P(All, AccumulateTest,
                         testing::Combine(testing::Values(0, 1, 15, 17, 1024, 1039, 70'001),
                                          testing::Values(1, 3), testing::Bool()));

// Sums beyond fp16's range become infinite, and the sum of squares of the written numbers shows it.
TEST(NormTest, AnOverflowOfTheAccumulatorShowsInItsSum) {
  ThreadTeam team(1);
  std::vector<Float16> source(100, Float16(1.0f)), destination(100, Float16(2.0f));
  source[70] = destination[70] = Float16(60'000.0f);
  auto blocks = Scratch(100);
  const AccumulateArrays arrays = {.source = source.data(),
                                   .source_dtype = DType::kFloat16,
                                   .destination = destination.data(),
                                   .destination_dtype = DType::kFloat16,
                                   .count = 100};
  EXPECT_TRUE(std::isinf(AccumulateAndSumSquares(team, arrays, blocks)));
  EXPECT_EQ(destination[70].bits, 0x7c00);
  EXPECT_EQ(static_cast<float>(destination[69]), 3.0f);
}

// A first contribution has the bits of one added to zeros: -0 becomes 0.
TEST(NormTest, TheFirstContributionEqualsOneAddedToZeros) {
  ThreadTeam team(1);
  const std::vector<float> source(40, -0.0f);
  ForEveryTarget([&] {
    std::vector<float> destination(40, 5.0f);
    Accumulate(
        team,
        {.source = source.data(), .destination = destination.data(), .count = 40, .add = false});
    for (const float value : destination) EXPECT_EQ(std::bit_cast<uint32_t>(value), 0u);
  });
}

}  // namespace
}  // namespace ebb::optim::norm_test
