#include "ebb/optim/update.h"

#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "ebb/optim/split_master.h"
#include "ebb/optim/stochastic_rounding.h"
#include "every_target.h"
#include "reference.h"
#include "rules.h"
#include "update_memory.h"

namespace ebb::optim {
namespace {

template <class Gradient, class Parameter>
void UpdateByReference(const Rule& rule, UpdateMemory<Gradient, Parameter>& shard) {
  for (size_t i = 0; i < shard.master.size(); ++i) {
    Reference(rule.optimizer, rule.scalars, static_cast<float>(shard.gradient[i]), shard.master[i],
              {&shard.first[i], &shard.second[i], &shard.third[i]});
    if constexpr (std::is_same_v<Parameter, BFloat16>) {
      shard.parameter[i] = RoundHalfAway(shard.master[i]);
    } else {
      shard.parameter[i] = Parameter(shard.master[i]);
    }
  }
}

template <class Gradient, class Parameter>
void ExpectReferenceBits(const Rule& rule, bool with_parameter) {
  ThreadTeam team(1);
  for (const int64_t count : {0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 1024, 1030}) {
    const auto before = MemoryBeforeUpdate<Gradient, Parameter>(count, rule);
    auto expected = before;
    UpdateByReference(rule, expected);
    ForEveryTarget([&] {
      auto shard = before;
      Update(team, rule.optimizer, shard.Part(0, count, with_parameter), rule.scalars);
      ExpectBits(shard, expected, with_parameter);
    });
  }
}

class UpdateBitsTest : public testing::TestWithParam<Rule> {};

TEST_P(UpdateBitsTest, EveryTargetGivesTheReferenceBits) {
  ExpectReferenceBits<float, float>(GetParam(), false);
  ExpectReferenceBits<float, float>(GetParam(), true);
  ExpectReferenceBits<float, BFloat16>(GetParam(), true);
  ExpectReferenceBits<BFloat16, BFloat16>(GetParam(), true);
  ExpectReferenceBits<Float16, Float16>(GetParam(), true);
}

TEST_P(UpdateBitsTest, ThreadsAndCutsChangeNoBit) {
  constexpr int64_t kCount = 70'003;
  const auto before = MemoryBeforeUpdate<BFloat16, BFloat16>(kCount, GetParam());
  auto expected = before;
  UpdateByReference(GetParam(), expected);
  constexpr uint64_t kSeed = 5;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  for (const int threads : {1, 2, 3}) {
    ThreadTeam team(threads);
    auto shard = before;
    Update(team, GetParam().optimizer, shard.Part(0, kCount, true), GetParam().scalars);
    ExpectBits(shard, expected);

    auto cut = before;
    for (int64_t begin = 0; begin < kCount;) {
      const int64_t end = std::min(kCount, begin + 1 + static_cast<int64_t>(random() % 20'000));
      Update(team, GetParam().optimizer, cut.Part(begin, end, true), GetParam().scalars);
      begin = end;
    }
    ExpectBits(cut, expected);
  }
}

// With the parameter in place, or read in one place and written to another.
TEST_P(UpdateBitsTest, ASplitMasterHasTheBitsOfAWholeOne) {
  ThreadTeam team(2);
  const auto update = [&](auto gradient, int64_t count, bool in_place) {
    auto before = MemoryBeforeUpdate<decltype(gradient), BFloat16>(count, GetParam());
    auto expected = before;
    UpdateByReference(GetParam(), expected);
    SplitEach(expected.master, expected.parameter, expected.low);
    expected.master = before.master;  // which is not given to the update
    SplitEach(before.master, before.parameter, before.low);
    ForEveryTarget([&] {
      auto shard = before;
      auto read = before.parameter;
      UpdateArrays arrays = shard.Part(0, count, true, MasterForm::kSplit);
      if (in_place) {
        arrays.parameter_in = count % 2 == 0 ? nullptr : arrays.parameter;
      } else {
        shard.parameter.assign(shard.parameter.size(), BFloat16());
        arrays.parameter_in = read.data();
      }
      Update(team, GetParam().optimizer, arrays, GetParam().scalars);
      ExpectBits(shard, expected);
      ExpectBits(read, before.parameter, "was to be read only:");
    });
  };
  for (const int64_t count : {0, 1, 2, 15, 16, 17, 31, 33, 70'003}) {
    for (const bool in_place : {false, true}) {
      update(float(), count, in_place);
      update(BFloat16(), count, in_place);
    }
  }
  update(Float16(), 1030, true);
}

constexpr RoundingPlace kPlace = {.unit = 3, .index = 1'000};

// The result of an update of bf16 parameters without masters, from the whole master with the same
// value.
template <class Gradient>
void ReferenceOwnMaster(const Rule& rule, UpdateMemory<Gradient, BFloat16>& shard) {
  for (size_t i = 0; i < shard.master.size(); ++i)
    shard.master[i] = static_cast<float>(shard.parameter[i]);
  UpdateByReference(rule, shard);
  const RoundingKey key = RoundingKeyOf(kPlace, rule.scalars.step);
  for (size_t i = 0; i < shard.master.size(); ++i) {
    shard.parameter[i] = RoundHalfAway(RoundStochastically(
        shard.master[i], RandomBits(key, static_cast<uint32_t>(kPlace.index + i))));
    shard.master[i] = 0;  // no other form has one
  }
}

template <class Gradient>
UpdateMemory<Gradient, BFloat16> OwnMasters(int64_t count, const Rule& rule = kRules[0]) {
  auto shard = MemoryBeforeUpdate<Gradient, BFloat16>(count, rule);
  for (size_t i = 0; i < shard.master.size(); ++i) {
    shard.parameter[i] = RoundHalfAway(shard.master[i]);
    shard.master[i] = 0;
  }
  return shard;
}

UpdateArrays WithoutMaster(UpdateArrays arrays, int64_t begin) {
  arrays.master = nullptr;
  arrays.rounding = {.unit = kPlace.unit, .index = kPlace.index + begin};
  return arrays;
}

// In place, or read in one place and written to another; whole, and in parts with odd cuts.
TEST_P(UpdateBitsTest, AParameterThatIsItsMasterIsRoundedStochastically) {
  const auto update = [&](auto gradient, int64_t count, int threads, bool in_place) {
    ThreadTeam team(threads);
    const auto before = OwnMasters<decltype(gradient)>(count, GetParam());
    auto expected = before;
    ReferenceOwnMaster(GetParam(), expected);
    ForEveryTarget([&] {
      auto shard = before;
      if (!in_place) shard.parameter.assign(shard.parameter.size(), BFloat16());
      for (int64_t begin = 0, end = 0; begin < count; begin = end) {
        end = threads == 1 ? std::min(count, begin + 1 + count / 3) : count;
        UpdateArrays arrays = WithoutMaster(shard.Part(begin, end, true), begin);
        if (!in_place) arrays.parameter_in = before.parameter.data() + begin;
        Update(team, GetParam().optimizer, arrays, GetParam().scalars);
      }
      ExpectBits(shard, expected);
    });
  };
  for (const int64_t count : {0, 1, 2, 15, 16, 17, 31, 33, 70'003}) {
    for (const bool in_place : {false, true}) {
      update(float(), count, 1, in_place);
      update(BFloat16(), count, 3, in_place);
    }
  }
  update(Float16(), 1030, 1, true);
}

// So many elements that an aligned parameter is written past the caches.
TEST(UpdateTest, ManyElementsHaveTheBitsOfFew) {
  constexpr int64_t kCount = (int64_t{1} << 20) + 37;
  ThreadTeam team(2);
  const auto update = [&](auto parameter_type, bool split) {
    using Parameter = decltype(parameter_type);
    const auto before = MemoryBeforeUpdate<BFloat16, Parameter>(kCount + 64);
    auto expected = before;
    UpdateByReference(kRules[0], expected);
    ForEveryTarget([&] {
      auto shard = before;
      const auto address = reinterpret_cast<uintptr_t>(shard.parameter.data());
      const int64_t aligned = static_cast<int64_t>((64 - address % 64) % 64 / sizeof(Parameter));
      for (const int64_t begin : {aligned, aligned + 3}) {
        shard = before;
        UpdateArrays arrays = shard.Part(begin, begin + kCount, true);
        std::vector<BFloat16> parameter_in(kCount);
        std::vector<uint16_t> low(kCount);
        if (split) {
          for (size_t i = 0; i < kCount; ++i) {
            parameter_in[i] = RoundHalfAway(arrays.master[i]);
            low[i] = LowHalf(arrays.master[i]);
          }
          arrays.parameter_in = parameter_in.data();
          arrays.master_low = low.data();
        }
        Update(team, kRules[0].optimizer, arrays, kRules[0].scalars);
        for (size_t i = 0, at = static_cast<size_t>(begin); i < kCount; ++i, ++at) {
          ASSERT_EQ(Bits(shard.parameter[at]), Bits(expected.parameter[at])) << i;
          ASSERT_EQ(Bits(shard.second[at]), Bits(expected.second[at])) << i;
          const uint16_t expected_low = split ? LowHalf(expected.master[at]) : 0;
          ASSERT_EQ(low[i], expected_low) << i;
        }
        ASSERT_EQ(shard.parameter[static_cast<size_t>(begin + kCount)], Parameter());
      }
    });
  };
  update(BFloat16(), false);
  update(BFloat16(), true);
  update(Float16(), false);
}

template <class T>
uint64_t ChecksumOf(const T* array, int64_t count) {
  return Checksum(std::as_bytes(std::span(array, static_cast<size_t>(count))));
}

// Expects the bits of Update, and the sums of the old and of the new contents. A parameter that is
// its master is in no sum.
template <class Gradient, class Parameter>
void ExpectSums(const Rule& rule, int64_t count, bool with_parameter,
                MasterForm form = MasterForm::kWhole, bool in_place = true) {
  SCOPED_TRACE(testing::Message() << count << " elements, form " << static_cast<int>(form));
  auto before = MemoryBeforeUpdate<Gradient, Parameter>(count, rule);
  if constexpr (std::is_same_v<Parameter, BFloat16>) {
    if (form != MasterForm::kWhole) SplitEach(before.master, before.parameter, before.low);
  }
  const auto arrays_of = [&](auto& shard) {
    UpdateArrays arrays = shard.Part(0, count, with_parameter, form);
    if (!in_place) arrays.parameter_in = before.parameter.data();
    return arrays;
  };
  auto expected = before;
  ThreadTeam alone(1);
  Update(alone, rule.optimizer, arrays_of(expected), rule.scalars);
  ForEveryTarget([&] {
    for (const int threads : {1, 3}) {
      ThreadTeam team(threads);
      auto shard = before;
      std::vector<uint64_t> scratch(static_cast<size_t>(UpdateChecksumScratch(count)) + 1, 5);
      const UpdateChecksums sums =
          UpdateAndSum(team, rule.optimizer, arrays_of(shard), rule.scalars, scratch);
      ExpectBits(shard, expected);
      const int states = static_cast<int>(StateNames(rule.optimizer).size());
      const auto expect = [&](const uint64_t(&of)[1 + kStatesMax], const auto& now) {
        EXPECT_EQ(of[0], form == MasterForm::kWhole   ? ChecksumOf(now.master.data(), count)
                         : form == MasterForm::kSplit ? ChecksumOf(now.low.data(), count)
                                                      : 0);
        EXPECT_EQ(of[1], states > 0 ? ChecksumOf(now.first.data(), count) : 0);
        EXPECT_EQ(of[2], states > 1 ? ChecksumOf(now.second.data(), count) : 0);
        EXPECT_EQ(of[3], states > 2 ? ChecksumOf(now.third.data(), count) : 0);
      };
      expect(sums.read, before);
      expect(sums.written, shard);
      EXPECT_EQ(scratch.back(), 5u);
    }
  });
}

TEST_P(UpdateBitsTest, SumsReadAndWrittenArrays) {
  for (const int64_t count : {0, 1, 31, 512, 2048, 4096, 16'384, 32'768 + 16'384, 70'003})
    ExpectSums<float, BFloat16>(GetParam(), count, true);
  for (const int64_t count : {1, 2048, 16'384, 32'768 + 16'384 + 2048, 3 * 32'768, 70'003})
    ExpectSums<BFloat16, BFloat16>(GetParam(), count, true, MasterForm::kSplit);
  for (const int64_t count : {1, 512, 2048, 32'768 + 16'384 + 512, 70'003})
    ExpectSums<BFloat16, BFloat16>(GetParam(), count, true, MasterForm::kParameter);
  ExpectSums<Float16, float>(GetParam(), 70'000, true);
  ExpectSums<float, float>(GetParam(), 40'000, false);
}

// Past the caches.
TEST(UpdateTest, SumsOfManyElements) {
  constexpr int64_t kCount = (int64_t{1} << 20) + 2048 + 37;
  ExpectSums<BFloat16, BFloat16>(kRules[0], kCount, true);
  ExpectSums<BFloat16, BFloat16>(kRules[0], kCount, true, MasterForm::kParameter, false);
}

TEST(UpdateTest, ManyElementsWithoutMastersHaveTheBitsOfFew) {
  constexpr int64_t kCount = (int64_t{1} << 20) + 37;
  ThreadTeam team(2);
  const auto before = OwnMasters<BFloat16>(kCount + 64);
  ForEveryTarget([&] {
    auto shard = before;
    const auto address = reinterpret_cast<uintptr_t>(shard.parameter.data());
    const auto aligned = static_cast<int64_t>((64 - address % 64) % 64 / sizeof(BFloat16));
    for (const int64_t begin : {aligned, aligned + 3}) {
      shard = before;
      auto few = before;
      UpdateArrays arrays = WithoutMaster(shard.Part(begin, begin + kCount, true), begin);
      arrays.parameter_in = before.parameter.data() + begin;
      Update(team, kRules[0].optimizer, arrays, kRules[0].scalars);
      for (int64_t at = begin; at < begin + kCount; at += 65'536) {
        const int64_t end = std::min(begin + kCount, at + 65'536);
        Update(team, kRules[0].optimizer, WithoutMaster(few.Part(at, end, true), at),
               kRules[0].scalars);
      }
      ExpectBits(shard, few);
    }
  });
}

TEST(UpdateTest, SumsShowEveryBitThatHasChanged) {
  constexpr int64_t kCount = 1024 + 5;
  ThreadTeam team(1);
  std::vector<uint64_t> scratch(static_cast<size_t>(UpdateChecksumScratch(kCount)));
  const auto sums = [&](UpdateMemory<float, BFloat16>& shard) {
    return UpdateAndSum(team, kRules[0].optimizer, shard.Part(0, kCount, true), kRules[0].scalars,
                        scratch);
  };
  const auto before = MemoryBeforeUpdate<float, BFloat16>(kCount);
  auto untouched = before;
  const UpdateChecksums expected = sums(untouched);
  for (int array = 0; array < 3; ++array) {
    for (const int64_t at : {0, 15, 16, 511, 512, 1023, 1024, 1028}) {
      for (int bit = 0; bit < 32; ++bit) {
        auto shard = before;
        std::vector<float>& of = array == 0   ? shard.master
                                 : array == 1 ? shard.first
                                              : shard.second;
        float& number = of[static_cast<size_t>(at)];
        number = std::bit_cast<float>(std::bit_cast<uint32_t>(number) ^ (1u << bit));
        const UpdateChecksums changed = sums(shard);
        for (int a = 0; a < 3; ++a)
          ASSERT_EQ(changed.read[a] != expected.read[a], a == array) << at << ", bit " << bit;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, UpdateBitsTest, testing::ValuesIn(kRules),
                         [](const testing::TestParamInfo<Rule>& test) { return test.param.name; });

TEST(UpdateTest, ANonFiniteGradientReachesItsElementAndNoOther) {
  ThreadTeam team(1);
  constexpr int64_t kCount = 40;
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    ForEveryTarget([&] {
      auto shard = MemoryBeforeUpdate<float, BFloat16>(kCount);
      shard.gradient[3] = shard.gradient[39] = bad;
      auto expected = shard;
      UpdateByReference(kRules[0], expected);
      Update(team, kRules[0].optimizer, shard.Part(0, kCount, true), kRules[0].scalars);
      ExpectBits(shard, expected);
      for (size_t i = 0; i < kCount; ++i) {
        EXPECT_EQ(std::isnan(static_cast<float>(shard.parameter[i])), i == 3 || i == 39) << i;
      }
    });
  }
}

TEST(UpdateTest, ASplitMasterSurvivesNumbersBesideInfinityAndKeepsANaN) {
  ThreadTeam team(1);
  const float values[] = {0x1.fffffep127f,
                          -0x1.ffp127f,
                          std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN(),
                          -0.0f,
                          0x1p-149f};
  ForEveryTarget([&] {
    std::vector<float> gradient(40, 0.0f);
    std::vector<BFloat16> parameter(40);
    std::vector<uint16_t> low(40);
    for (size_t i = 0; i < 40; ++i) {
      parameter[i] = RoundHalfAway(values[i % 6]);
      low[i] = LowHalf(values[i % 6]);
    }
    Update(team, {.type = OptimizerType::kSgd},
           {.gradient = gradient.data(),
            .parameter = parameter.data(),
            .parameter_dtype = DType::kBFloat16,
            .master_low = low.data(),
            .count = 40},
           {.step = 2, .learning_rate = 1});
    for (size_t i = 0; i < 40; ++i) {
      // -1 * 0 + -0 is -0, because the factor makes the zero negative.
      ASSERT_EQ(Bits(JoinMaster(parameter[i], low[i])), Bits(values[i % 6])) << i;
    }
  });
}

}  // namespace
}  // namespace ebb::optim
