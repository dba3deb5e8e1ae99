#include "ebb/optim/split_master.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ebb/optim/cast.h"
#include "every_target.h"

namespace ebb::optim::split_master_test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(NDEBUG)
constexpr uint64_t kStride = 257;  // odd, so that every lower half occurs
#else
constexpr uint64_t kStride = 1;
#endif

// A chunk of patterns through Split and Join: the master is unchanged, and the parameter is the
// cast of it.
class Patterns {
 public:
  static constexpr int64_t kCount = 1 << 16;

  void Expect(ThreadTeam& team, uint64_t first, uint64_t stride) {
    for (size_t i = 0; i < kCount; ++i) patterns_[i] = static_cast<uint32_t>(first + i * stride);
    std::memcpy(masters_.data(), patterns_.data(), 4 * kCount);
    Split(team, masters_.data(), parameters_.data(), lows_.data(), kCount);
    Join(team, parameters_.data(), lows_.data(), rebuilt_.data(), kCount);
    Cast(team, masters_.data(), DType::kFloat32, cast_.data(), DType::kBFloat16, kCount,
         Rounding::kParameter);
    ASSERT_EQ(std::memcmp(parameters_.data(), cast_.data(), 2 * kCount), 0) << first;
    if (std::memcmp(masters_.data(), rebuilt_.data(), 4 * kCount) == 0) return;
    for (size_t i = 0; i < kCount; ++i)
      ASSERT_EQ(Bits(rebuilt_[i]), Bits(masters_[i])) << first + i;
  }

 private:
  std::vector<uint32_t> patterns_ = std::vector<uint32_t>(kCount);
  std::vector<float> masters_ = std::vector<float>(kCount), rebuilt_ = masters_;
  std::vector<BFloat16> parameters_ = std::vector<BFloat16>(kCount), cast_ = parameters_;
  std::vector<uint16_t> lows_ = std::vector<uint16_t>(kCount);
};

// Every fp32 pattern if the build is fast enough: finite ones and infinities exactly, a NaN as a
// NaN.
TEST(SplitMasterTest, EveryPatternIsRebuilt) {
  ThreadTeam team(1);
  Patterns patterns;
  for (uint64_t first = 0; first < uint64_t{1} << 32; first += Patterns::kCount * kStride) {
    ASSERT_NO_FATAL_FAILURE(patterns.Expect(team, first, kStride));
  }
}

TEST(SplitMasterTest, EveryTargetRebuilds) {
  ThreadTeam team(1);
  Patterns patterns;
  ForEveryTarget([&] {
    for (uint64_t first = 0; first < uint64_t{1} << 32; first += Patterns::kCount * 1021) {
      ASSERT_NO_FATAL_FAILURE(patterns.Expect(team, first, 1021));
    }
  });
}

TEST(SplitMasterTest, OneElementHasTheBitsOfTheArray) {
  ThreadTeam team(3);
  const std::vector<float> masters = Numbers<float>(200'003, 1);
  std::vector<BFloat16> parameters(masters.size());
  std::vector<uint16_t> lows(masters.size());
  std::vector<float> rebuilt(masters.size());
  ForEveryTarget([&] {
    Split(team, masters.data(), parameters.data(), lows.data(),
          static_cast<int64_t>(masters.size()));
    Join(team, parameters.data(), lows.data(), rebuilt.data(),
         static_cast<int64_t>(masters.size()));
    for (size_t i = 0; i < masters.size(); ++i) {
      ASSERT_EQ(parameters[i], RoundHalfAway(masters[i])) << i;
      ASSERT_EQ(lows[i], LowHalf(masters[i])) << i;
      ASSERT_EQ(Bits(JoinMaster(RoundHalfAway(masters[i]), lows[i])), Bits(masters[i])) << i;
      ASSERT_EQ(Bits(rebuilt[i]), Bits(masters[i])) << i;
    }
  });
}

TEST(SplitMasterTest, TailsEndWhereTheyShould) {
  ThreadTeam team(1);
  const std::vector<float> masters = Numbers<float>(64, 2);
  for (int64_t count = 0; count < 40; ++count) {
    ForEveryTarget([&] {
      std::vector<BFloat16> parameters(64, BFloat16(7.0f));
      std::vector<uint16_t> lows(64, 7);
      std::vector<float> rebuilt(64, 7.0f);
      Split(team, masters.data(), parameters.data(), lows.data(), count);
      Join(team, parameters.data(), lows.data(), rebuilt.data(), count);
      for (int64_t i = 0; i < 64; ++i) {
        const auto at = static_cast<size_t>(i);
        ASSERT_EQ(rebuilt[at], i < count ? masters[at] : 7.0f);
        if (i < count) continue;
        ASSERT_EQ(parameters[at], BFloat16(7.0f));
        ASSERT_EQ(lows[at], 7);
      }
    });
  }
}

}  // namespace
}  // namespace ebb::optim::split_master_test
