#include "ebb/runtime/kernels/reduce.h"

#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>
#include <string_view>
#include <tuple>

#include "../print_dtype.h"
#include "hwy/targets.h"
#include "numbers.h"

namespace ebb {

void PrintTo(ReduceOp op, std::ostream* out) {
  constexpr const char* kNames[] = {"sum", "max", "min"};
  *out << kNames[static_cast<size_t>(op)];
}

namespace reduce_test {
namespace {

using ebb::testing::Numbers;
using ebb::testing::ReduceReference;

constexpr int64_t kPastCaches = int64_t{1} << 30;

// Runs `check` once for every SIMD target that this machine has.
template <class Check>
void OnEveryTarget(Check check) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    check();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

Numbers Expected(const std::vector<Numbers>& inputs, const Reduction& reduction) {
  Numbers expected(reduction.dtype, inputs[0].size());
  std::vector<float> values(inputs.size());
  for (int64_t i = 0; i < expected.size(); ++i) {
    for (size_t r = 0; r < inputs.size(); ++r) values[r] = inputs[r].Get(i);
    expected.Set(i, ReduceReference(values, reduction.op, reduction.group, reduction.scale));
  }
  return expected;
}

int64_t FirstDifference(const Numbers& a, const Numbers& b) {
  for (int64_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(a.at(i), b.at(i), static_cast<size_t>(SizeOf(a.dtype()))) != 0) return i;
  }
  return -1;
}

class ReduceTest : public ::testing::TestWithParam<std::tuple<DType, ReduceOp>> {
 protected:
  DType dtype() const { return std::get<0>(GetParam()); }
  ReduceOp op() const { return std::get<1>(GetParam()); }
};

TEST_P(ReduceTest, EqualsTheScalarReferenceBitForBitAtEveryWidthCutAndPlace) {
  ThreadTeam team(3);
  for (const auto& [ranks, group] : {std::pair{1, 0}, {2, 0}, {3, 0}, {4, 2}, {8, 4}, {6, 1}}) {
    for (const int64_t count : {1, 7, 129, 1000}) {
      for (const float scale : {1.0f, 1.0f / 3}) {
        const Reduction reduction = {.dtype = dtype(), .op = op(), .scale = scale, .group = group};
        std::vector<Numbers> inputs;
        std::vector<const void*> pointers;
        for (int r = 0; r < ranks; ++r) {
          inputs.emplace_back(dtype(), count).Fill(static_cast<uint64_t>(r + 100 * count));
        }
        for (const Numbers& input : inputs) pointers.push_back(input.at(0));
        const Numbers expected = Expected(inputs, reduction);
        OnEveryTarget([&] {
          Numbers result(dtype(), count + 1);  // from its second element on, so not aligned
          Reduce(team, reduction, pointers, result.at(1), count);
          Numbers aligned(dtype(), count);
          aligned.CopyFrom(result, 1, 0, count);
          EXPECT_EQ(FirstDifference(aligned, expected), -1)
              << ranks << " " << group << " " << count << " " << scale;

          Numbers past_caches(dtype(), count);
          Reduce(team, reduction, pointers, past_caches.at(0), count, kPastCaches);
          EXPECT_EQ(FirstDifference(past_caches, expected), -1)
              << ranks << " " << group << " " << count << " " << scale;

          Numbers in_place = inputs.back();
          std::vector<const void*> in_place_pointers = pointers;
          in_place_pointers.back() = in_place.at(0);
          Reduce(team, reduction, in_place_pointers, in_place.at(0), count);
          EXPECT_EQ(FirstDifference(in_place, expected), -1)
              << ranks << " " << group << " " << count << " " << scale;
        });
      }
    }
  }
}

TEST_P(ReduceTest, TheNumberOfThreadsChangesNoBit) {
  constexpr int64_t kCount = 200'003;
  std::vector<Numbers> inputs;
  std::vector<const void*> pointers;
  for (int r = 0; r < 3; ++r) inputs.emplace_back(dtype(), kCount).Fill(static_cast<uint64_t>(r));
  for (const Numbers& input : inputs) pointers.push_back(input.at(0));
  const Reduction reduction = {.dtype = dtype(), .op = op(), .scale = 0.3f};
  const Numbers expected = Expected(inputs, reduction);
  for (const int threads : {1, 2, 5}) {
    ThreadTeam team(threads);
    Numbers result(dtype(), kCount);
    Reduce(team, reduction, pointers, result.at(0), kCount);
    EXPECT_EQ(FirstDifference(result, expected), -1) << threads;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ReduceTest,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16,
                                                              DType::kFloat16, DType::kInt8),
                                            ::testing::Values(ReduceOp::kSum, ReduceOp::kMax,
                                                              ReduceOp::kMin)),
                         [](const auto& test) {
                           return std::string(Name(std::get<0>(test.param))) + "_" +
                                  ::testing::PrintToString(std::get<1>(test.param));
                         });

class ConversionTest : public ::testing::TestWithParam<DType> {};

TEST_P(ConversionTest, AllValuesConvertAsTheScalarTypesDo) {
  constexpr int64_t kPatterns = 65'536;
  ThreadTeam team(1);
  Numbers input(GetParam(), kPatterns);
  for (int64_t i = 0; i < kPatterns; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    std::memcpy(input.at(i), &bits, sizeof(bits));
  }
  const void* pointers[] = {input.at(0)};
  // 1: there and back. The other scales reach roundings to even, subnormals, and infinity.
  for (const float scale : {1.0f, 1.0f / 3, 0x1p-7f, 1.0009765f, 3.0f}) {
    const Reduction reduction = {.dtype = GetParam(), .scale = scale};
    const Numbers expected = Expected({input}, reduction);
    OnEveryTarget([&] {
      Numbers result(GetParam(), kPatterns);
      Reduce(team, reduction, pointers, result.at(0), kPatterns);
      EXPECT_EQ(FirstDifference(result, expected), -1) << scale;
    });
  }
}

TEST_P(ConversionTest, SumsOfAnyTwoPatternsRoundAsTheScalarTypesDo) {
  constexpr int64_t kCount = 300'000;
  ThreadTeam team(1);
  std::vector<Numbers> inputs(2, Numbers(GetParam(), kCount));
  for (int64_t i = 0; i < kCount; ++i) {
    const uint64_t bits = ebb::testing::Mix(static_cast<uint64_t>(i));
    std::memcpy(inputs[0].at(i), &bits, 2);
    // Similar exponents, so that sums keep bits beyond 16.
    const auto near = static_cast<uint16_t>((bits & 0x7fff) ^ ((bits >> 32) & 0x83ff));
    std::memcpy(inputs[1].at(i), &near, 2);
  }
  const void* pointers[] = {inputs[0].at(0), inputs[1].at(0)};
  const Reduction reduction = {.dtype = GetParam()};
  const Numbers expected = Expected(inputs, reduction);
  OnEveryTarget([&] {
    Numbers result(GetParam(), kCount);
    Reduce(team, reduction, pointers, result.at(0), kCount);
    EXPECT_EQ(FirstDifference(result, expected), -1);
  });
}

INSTANTIATE_TEST_SUITE_P(Types, ConversionTest,
                         ::testing::Values(DType::kBFloat16, DType::kFloat16),
                         [](const auto& test) { return std::string(Name(test.param)); });

}  // namespace
}  // namespace reduce_test
}  // namespace ebb
