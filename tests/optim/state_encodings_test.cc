// Updates of states in 8 and 16 bits.
#include "state_encodings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "ebb/optim/block_codes.h"
#include "ebb/optim/update.h"
#include "ebb/optim/update_loops.h"
#include "ebb/optim/update_runs.h"
#include "every_target.h"

namespace ebb::optim::state_encodings_test {
namespace {

class StateEncodingsTest : public testing::TestWithParam<std::tuple<Rule, StateKind>> {
 protected:
  const Rule& rule() const { return std::get<0>(GetParam()); }
  const StateKind& kind() const { return std::get<1>(GetParam()); }

  template <class Gradient, class Parameter>
  void ExpectReferenceBits(int64_t count, MasterForm form = MasterForm::kWhole) const {
    SCOPED_TRACE(testing::Message() << count << " elements, form " << static_cast<int>(form));
    const auto before = EncodedMemoryBeforeUpdate<Gradient, Parameter>(count, rule(), kind(), form);
    auto expected = before;
    expected.UpdateByReference(rule(), form);
    ForEveryTarget([&] {
      auto memory = before;
      ThreadTeam team(1);
      Update(team, rule().optimizer, memory.Arrays(form), rule().scalars);
      ExpectBits(memory, expected);
    });
  }
};

// Decode, update in fp32 and encode: with every master form, and states of which the last block has
// any number of elements.
TEST_P(StateEncodingsTest, EveryTargetGivesTheReferenceBits) {
  for (const int64_t count : {0, 1, 31, 255, 256, 257, 1024, 1280, 2500}) {
    ExpectReferenceBits<float, float>(count);
    ExpectReferenceBits<BFloat16, BFloat16>(count);
    ExpectReferenceBits<float, BFloat16>(count, MasterForm::kSplit);
    ExpectReferenceBits<BFloat16, BFloat16>(count, MasterForm::kParameter);
  }
}

TEST_P(StateEncodingsTest, ThreadsAndPartsChangeNoBit) {
  constexpr int64_t kCount = 70'003;
  for (const MasterForm form : {MasterForm::kWhole, MasterForm::kSplit, MasterForm::kParameter}) {
    const auto before = EncodedMemoryBeforeUpdate<BFloat16, BFloat16>(kCount, rule(), kind(), form);
    auto expected = before;
    ThreadTeam alone(1);
    Update(alone, rule().optimizer, expected.Arrays(form), rule().scalars);
    constexpr uint64_t kSeed = 5;
    SCOPED_TRACE(testing::Message() << "seed " << kSeed);
    std::mt19937_64 random(kSeed);
    for (const int threads : {1, 2, 3}) {
      ThreadTeam team(threads);
      auto whole = before;
      Update(team, rule().optimizer, whole.Arrays(form), rule().scalars);
      ExpectBits(whole, expected);

      auto parts = before;
      for (int64_t begin = 0; begin < kCount;) {
        const int64_t blocks = 1 + static_cast<int64_t>(random() % 80);
        const int64_t count = std::min(kCount - begin, blocks * kScaleBlock);
        Update(team, rule().optimizer, PartOf(parts.Arrays(form), begin, count), rule().scalars);
        begin += count;
      }
      ExpectBits(parts, expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, StateEncodingsTest,
                         testing::Combine(testing::ValuesIn(RulesWithEncodedStates()),
                                          testing::ValuesIn(kStateKinds)),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + std::get<1>(test.param).name;
                         });

// The parameter sees the new moments before they are rounded.
TEST(StateEncodingTest, TheParameterSeesTheExactState) {
  std::vector<float> master(256, 0.0f), gradient(256, 1.0f);
  gradient[7] = 0.7131f;  // far from a number of the map
  HostState momentum(kDynamic8, 256);
  const OptimizerConfig sgd = {.type = OptimizerType::kSgd, .momentum = 0.9};
  UpdateArrays arrays = {.master = master.data(),
                         .gradient = gradient.data(),
                         .states = {momentum.array()},
                         .count = 256};
  ThreadTeam team(1);
  Update(team, sgd, arrays, {.step = 1, .learning_rate = 1});
  EXPECT_EQ(master[7], -0.7131f);
  EXPECT_NE(momentum.Values()[7], 0.7131f);
  EXPECT_NEAR(momentum.Values()[7], 0.7131f, 0.0071);
}

// Large arrays' parameters are written past the caches, and those of their halves are not.
TEST(StateEncodingTest, LargeArraysHaveTheBitsOfTheirHalves) {
  constexpr int64_t kHalf = kStreamedCount / 2, kCount = 2 * kHalf + kScaleBlock + 5;
  std::vector<float> gradient(kCount);
  for (int64_t i = 0; i < kCount; ++i) gradient[i] = std::sin(static_cast<float>(i));
  const OptimizerConfig sgd = {.type = OptimizerType::kSgd, .momentum = 0.9};
  for (const Encoding& encoding : {kDynamic8, Encoding(DType::kBFloat16)}) {
    std::vector<BFloat16> written[2];
    for (const int64_t most : {kCount, kHalf}) {
      std::vector<float> master(kCount, 1.0f);
      std::vector<BFloat16>& memory = written[most == kHalf ? 1 : 0];
      memory.resize(kCount + 32);
      BFloat16* parameter = memory.data();
      while (reinterpret_cast<uintptr_t>(parameter) % 64 != 0) ++parameter;
      HostState momentum(encoding, kCount);
      const UpdateArrays arrays = {.master = master.data(),
                                   .gradient = gradient.data(),
                                   .states = {momentum.array()},
                                   .parameter = parameter,
                                   .parameter_dtype = DType::kBFloat16,
                                   .count = kCount};
      ThreadTeam team(1);
      for (const int64_t step : {1, 2}) {
        for (int64_t begin = 0; begin < kCount; begin += most) {
          Update(team, sgd, PartOf(arrays, begin, std::min(most, kCount - begin)),
                 {.step = step, .learning_rate = 0.1});
        }
      }
      memory.erase(memory.begin(), memory.begin() + (parameter - memory.data()));
      memory.resize(kCount);
    }
    EXPECT_EQ(std::memcmp(written[0].data(), written[1].data(), kCount * sizeof(BFloat16)), 0);
  }
}

// A state of bf16 has random bits of its own: others than another state's, the parameter's and
// another step's. So the mean of many roundings is the number.
TEST(StateEncodingTest, StatesAreRoundedStochasticallyEachByItsOwnBits) {
  constexpr int64_t kCount = 1 << 16;
  constexpr float kNumber = 1 + 0.3f / 128;  // 0.3 of the way from one bf16 number to the next
  const std::vector<float> gradient(kCount, kNumber);
  std::vector<std::vector<float>> seen;
  const OptimizerConfig rmsprop = {
      .type = OptimizerType::kRmsprop, .epsilon = 0.5, .momentum = 0.9, .alpha = 0};
  for (const int64_t step : {1, 2}) {
    HostState square(DType::kBFloat16, kCount), buffer(DType::kBFloat16, kCount);
    std::vector<BFloat16> parameter(kCount);
    UpdateArrays arrays = {.gradient = gradient.data(),
                           .states = {square.array(), buffer.array()},
                           .round_states_stochastically = true,
                           .parameter = parameter.data(),
                           .parameter_dtype = DType::kBFloat16,
                           .rounding = {.unit = 3, .index = 1000},
                           .count = kCount};
    ThreadTeam team(1);
    Update(team, rmsprop, arrays, {.step = step, .learning_rate = kNumber});
    for (const HostState& state : {square, buffer}) seen.push_back(state.Values());
    seen.emplace_back(parameter.begin(), parameter.end());
    double sum = 0;
    for (const float value : square.Values()) sum += double{value};
    // Within five standard deviations of the mean of so many.
    EXPECT_NEAR(sum / kCount, double{kNumber} * double{kNumber}, 5 * 0.5 / 128 / 256);
  }
  for (size_t a = 0; a < seen.size(); ++a) {
    int64_t ups = 0;
    const auto [low, high] = std::minmax_element(seen[a].begin(), seen[a].end());
    for (const float value : seen[a]) ups += value == *high ? 1 : 0;
    EXPECT_LT(*low, *high);
    EXPECT_GT(ups, 0);
    for (size_t b = a + 1; b < seen.size(); ++b) {
      const float high_of_b = *std::max_element(seen[b].begin(), seen[b].end());
      int64_t both = 0, of_b = 0;
      for (size_t i = 0; i < seen[a].size(); ++i) {
        const bool b_up = seen[b][i] == high_of_b;
        of_b += b_up ? 1 : 0;
        both += b_up && seen[a][i] == *high ? 1 : 0;
      }
      const double independent = static_cast<double>(ups) * static_cast<double>(of_b) / kCount;
      EXPECT_NEAR(static_cast<double>(both), independent, 5 * std::sqrt(independent))
          << a << " and " << b;
    }
  }
}

}  // namespace
}  // namespace ebb::optim::state_encodings_test
