#include "ebb/optim/cast.h"

#include <cstring>
#include <tuple>
#include <vector>

#include "every_target.h"

namespace ebb::optim::cast_test {
namespace {

template <class To, class From>
std::vector<To> CastAll(ThreadTeam& team, const std::vector<From>& from, Rounding rounding) {
  std::vector<To> to(from.size());
  Cast(team, from.data(), kDTypeOf<From>, to.data(), kDTypeOf<To>,
       static_cast<int64_t>(from.size()), rounding);
  return to;
}

template <class T>
auto RawBits(T value) {
  if constexpr (sizeof(T) == 4) {
    return std::bit_cast<uint32_t>(value);
  } else {
    return value.bits;
  }
}

// Bit for bit, including NaNs and their payloads.
template <class From, class To, class Scalar>
void ExpectScalarBits(const std::vector<From>& from, const std::vector<To>& to, Scalar scalar) {
  for (size_t i = 0; i < from.size(); ++i) {
    ASSERT_EQ(RawBits(to[i]), RawBits(scalar(from[i])))
        << "source bits " << std::hex << RawBits(from[i]);
  }
}

TEST(CastTest, EverySixteenBitPatternWidensAsTheScalarConversion) {
  ThreadTeam team(1);
  ForEveryTarget([&] {
    const auto bf16 = EveryPattern<BFloat16>();
    ExpectScalarBits(bf16, CastAll<float>(team, bf16, Rounding::kNearest),
                     [](BFloat16 x) { return float(x); });
    const auto fp16 = EveryPattern<Float16>();
    ExpectScalarBits(fp16, CastAll<float>(team, fp16, Rounding::kNearest),
                     [](Float16 x) { return float(x); });
  });
}

TEST(CastTest, CastsToSixteenBitsRoundAsTheScalarConversionAtEveryHalfway) {
  ThreadTeam team(2);
  const std::vector<float> points = TurningPoints();
  ForEveryTarget([&] {
    ExpectScalarBits(points, CastAll<BFloat16>(team, points, Rounding::kNearest),
                     [](float x) { return BFloat16(x); });
    ExpectScalarBits(points, CastAll<BFloat16>(team, points, Rounding::kParameter), RoundHalfAway);
    ExpectScalarBits(points, CastAll<Float16>(team, points, Rounding::kNearest),
                     [](float x) { return Float16(x); });
    ExpectScalarBits(points, CastAll<Float16>(team, points, Rounding::kParameter),
                     [](float x) { return Float16(x); });
  });
}

TEST(CastTest, SixteenBitTypesConvertThroughFp32) {
  ThreadTeam team(1);
  ForEveryTarget([&] {
    const auto bf16 = EveryPattern<BFloat16>();
    ExpectScalarBits(bf16, CastAll<Float16>(team, bf16, Rounding::kNearest),
                     [](BFloat16 x) { return Float16(float(x)); });
    const auto fp16 = EveryPattern<Float16>();
    ExpectScalarBits(fp16, CastAll<BFloat16>(team, fp16, Rounding::kNearest),
                     [](Float16 x) { return BFloat16(float(x)); });
    ExpectScalarBits(fp16, CastAll<BFloat16>(team, fp16, Rounding::kParameter),
                     [](Float16 x) { return RoundHalfAway(float(x)); });
  });
}

TEST(CastTest, InPlaceBetweenTypesOfOneSize) {
  ThreadTeam team(2);
  ForEveryTarget([&] {
    const auto from = EveryPattern<BFloat16>();
    auto memory = from;
    Cast(team, memory.data(), DType::kBFloat16, memory.data(), DType::kFloat16, 65536,
         Rounding::kNearest);
    for (size_t i = 0; i < from.size(); ++i)
      ASSERT_EQ(memory[i].bits, Float16(float(from[i])).bits);
  });
}

TEST(CastTest, TheSameTypeIsCopiedWithItsNaNs) {
  ThreadTeam team(3);
  auto from = EveryPattern<Float16>();
  from.resize(3 * from.size(), Float16(1.5f));
  const auto to = CastAll<Float16>(team, from, Rounding::kParameter);
  EXPECT_EQ(std::memcmp(from.data(), to.data(), 2 * from.size()), 0);
}

TEST(CastTest, ThreadsAndTailsChangeNoBit) {
  const auto from = Numbers<float>(200'003, 1);
  ThreadTeam one(1);
  const auto expected = CastAll<BFloat16>(one, from, Rounding::kNearest);
  for (const int threads : {2, 3}) {
    ThreadTeam team(threads);
    ForEveryTarget(
        [&] { EXPECT_EQ(CastAll<BFloat16>(team, from, Rounding::kNearest), expected) << threads; });
  }
  for (int64_t count = 0; count < 40; ++count) {
    ForEveryTarget([&] {
      std::vector<BFloat16> to(64, BFloat16(7.0f));
      Cast(one, from.data() + 1, DType::kFloat32, to.data(), DType::kBFloat16, count,
           Rounding::kNearest);
      for (int64_t i = 0; i < 64; ++i)
        ASSERT_EQ(to[i], i < count ? BFloat16(from[i + 1]) : BFloat16(7.0f));
    });
  }
}

}  // namespace
}  // namespace ebb::optim::cast_test
