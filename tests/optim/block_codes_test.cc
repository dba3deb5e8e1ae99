#include "ebb/optim/block_codes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "every_target.h"
#include "state_reference.h"

namespace ebb::optim::block_codes_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kSmallest = std::numeric_limits<float>::min();  // normal
const float kNaN = std::numeric_limits<float>::quiet_NaN();

class MapTest : public testing::TestWithParam<bool> {
 protected:
  bool has_signs() const { return GetParam(); }
  const DynamicMap& map() const { return has_signs() ? kSignedMap : kUnsignedMap; }
  Encoding encoding() const { return has_signs() ? kDynamic8 : kDynamicUnsigned8; }
  HostState Encoded(const std::vector<float>& values) const {
    ThreadTeam team(1);
    HostState state(encoding(), static_cast<int64_t>(values.size()));
    Encode(team, values.data(), state.array(), static_cast<int64_t>(values.size()));
    return state;
  }
  std::vector<float> Decoded(HostState& state) const {
    ThreadTeam team(1);
    std::vector<float> values(state.codes.size(), 5);
    Decode(team, state.array(), values.data(), static_cast<int64_t>(values.size()));
    return values;
  }
};

TEST_P(MapTest, HasThePublishedNumbers) {
  const std::vector<float> published = NumbersOfMap(has_signs());
  ASSERT_EQ(published.size(), 256u);
  EXPECT_EQ(map().negative, has_signs() ? 127 : 0);
  EXPECT_EQ(map().numbers[0], 0);
  for (size_t number = 0; number < 256; ++number)
    EXPECT_FLOAT_EQ(map().numbers[StoredCode(published, number)], published[number]) << number;
}

// Around every border, and at every upper half of an fp32 number up to 1.
TEST_P(MapTest, ACodeIsThatOfTheNearestNumber) {
  std::vector<float> numbers(map().numbers.begin(), map().numbers.end());
  std::sort(numbers.begin(), numbers.end());
  const auto expect = [&](float number) {
    ASSERT_EQ(CodeOf(map().steps.data(), map().negative, number), NearestCode(numbers, number))
        << number;
  };
  for (size_t code = 0; code < 256; ++code) {
    expect(numbers[code]);
    if (code == 0) continue;
    const float middle = (numbers[code - 1] + numbers[code]) / 2;
    float below = middle, above = middle;
    for (int ulp = 0; ulp < 4; ++ulp) {
      expect(below);
      expect(above);
      below = std::nextafter(below, -2.0f);
      above = std::nextafter(above, 2.0f);
    }
  }
  for (uint32_t upper = 0; upper <= 0x3f80; ++upper) {
    for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) {
      const float number = std::bit_cast<float>(upper << 16 | lower);
      if (number > 1) continue;
      expect(number);
      expect(-number);
    }
  }
}

TEST_P(MapTest, EncodesAndDecodesLikeTheReferenceOnEveryTarget) {
  for (const int64_t count : {0, 1, 7, 16, 17, 255, 256, 257, 512, 5000}) {
    for (const Range range : {Range::kAll, Range::kNearOne}) {
      SCOPED_TRACE(testing::Message() << count << " elements");
      const auto values = Numbers<float>(count, static_cast<uint64_t>(count), range);
      HostState expected(encoding(), count);
      expected.Set(values);
      ForEveryTarget([&] {
        HostState state = Encoded(values);
        ASSERT_EQ(state.scales, expected.scales);
        ASSERT_EQ(state.codes, expected.codes);
        EXPECT_EQ(Decoded(state), expected.Values());
      });
    }
  }
}

// Every code stands beside the largest magnitude, with scales of every size and sign.
TEST_P(MapTest, DecodedNumbersGetTheSameCodesAndScalesAgain) {
  std::mt19937_64 random(7);
  std::vector<float> scales = {kSmallest, std::nextafter(kSmallest, 1.0f), kLargest, 1, 0};
  for (int i = 0; i < 300; ++i) {
    const auto exponent = static_cast<uint32_t>(1 + random() % 254);
    scales.push_back(std::bit_cast<float>(exponent << 23 | static_cast<uint32_t>(random() >> 41)));
  }
  HostState state(encoding(), static_cast<int64_t>(256 * 2 * scales.size()));
  for (size_t block = 0; block < state.scales.size(); ++block) {
    const float scale = scales[block / 2];
    state.scales[block] = has_signs() && scale != 0 && block % 2 == 1 ? -scale : scale;
    for (size_t i = 0; i < 256; ++i) {
      const auto code = static_cast<uint8_t>(scale == 0 ? 0 : (i + block) % 256);
      state.codes[256 * block + i] = static_cast<std::byte>(code);
    }
  }
  ForEveryTarget([&] {
    const std::vector<float> values = Decoded(state);
    EXPECT_TRUE(Encoded(values) == state);
  });
}

TEST_P(MapTest, TheLargestMagnitudeIsExact) {
  std::vector<float> values(256, 0.25f);
  values[100] = 3.3f;
  HostState state = Encoded(values);
  EXPECT_EQ(state.scales[0], 3.3f);
  EXPECT_EQ(Decoded(state)[100], 3.3f);
  values[101] = -7.7f;
  state = Encoded(values);
  EXPECT_EQ(state.scales[0], has_signs() ? -7.7f : 3.3f);
  EXPECT_EQ(Decoded(state)[101], has_signs() ? -7.7f : 0.0f);
  values[102] = 7.7f;  // as large: the positive one gives the scale
  state = Encoded(values);
  EXPECT_EQ(state.scales[0], 7.7f);
  EXPECT_EQ(Decoded(state)[102], 7.7f);
  EXPECT_NEAR(Decoded(state)[101], has_signs() ? -7.7f : 0.0f, 0.06);
}

TEST_P(MapTest, ABlockOfZerosOrOfSubnormalsIsZero) {
  ForEveryTarget([&] {
    for (const float number : {0.0f, -0.0f, std::nextafter(kSmallest, 0.0f),
                               -std::numeric_limits<float>::denorm_min()}) {
      std::vector<float> values(300, 1);
      std::fill_n(values.begin(), 256, number);
      HostState state = Encoded(values);
      EXPECT_EQ(Bits(state.scales[0]), 0u);
      EXPECT_EQ(state.scales[1], 1);
      const std::vector<float> decoded = Decoded(state);
      for (size_t i = 0; i < 300; ++i) ASSERT_EQ(decoded[i], i < 256 ? 0.0f : 1.0f) << i;
    }
  });
}

// At every place, so that no vector and no rest of one misses it.
TEST_P(MapTest, ANumberThatIsNotFiniteMakesItsBlockNaNAndNoOther) {
  ForEveryTarget([&] {
    for (const float wrong : {kInfinity, -kInfinity, kNaN, -kNaN}) {
      for (size_t at = 256; at < 256 + 77; ++at) {
        std::vector<float> values(256 + 77, kLargest);
        values[at] = wrong;
        HostState state = Encoded(values);
        const std::vector<float> decoded = Decoded(state);
        for (size_t i = 0; i < values.size(); ++i)
          ASSERT_EQ(std::isnan(decoded[i]), i >= 256) << i << " beside " << wrong << " at " << at;
        EXPECT_TRUE(Encoded(decoded) == state);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Maps, MapTest, testing::Bool(),
                         [](const auto& test) { return test.param ? "Signed" : "Unsigned"; });

TEST(BlockCodesTest, ThreadsChangeNoBit) {
  constexpr int64_t kCount = 300'001;
  const auto values = Numbers<float>(kCount, 3);
  for (const Encoding& encoding :
       {kDynamic8, kDynamicUnsigned8, Encoding(DType::kBFloat16), Encoding(DType::kFloat32)}) {
    ThreadTeam alone(1);
    HostState expected(encoding, kCount);
    Encode(alone, values.data(), expected.array(), kCount);
    for (const int threads : {2, 3}) {
      ThreadTeam team(threads);
      HostState state(encoding, kCount);
      Encode(team, values.data(), state.array(), kCount);
      EXPECT_TRUE(state == expected);
      std::vector<float> decoded(values.size());
      Decode(team, state.array(), decoded.data(), kCount);
      EXPECT_EQ(decoded, expected.Values());
    }
  }
}

TEST(BlockCodesTest, NumbersOf16BitsAreRoundedToNearest) {
  const std::vector<float> values = TurningPoints();
  const auto count = static_cast<int64_t>(values.size());
  ThreadTeam team(2);
  HostState expected(DType::kBFloat16, count);
  expected.Set(values);
  HostState state(DType::kBFloat16, count);
  Encode(team, values.data(), state.array(), count);
  EXPECT_TRUE(state == expected);
}

}  // namespace
}  // namespace ebb::optim::block_codes_test
