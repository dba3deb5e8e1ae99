// The work of the reduction kernel's threads, run on the host: the bits of Reduce.
#include "ebb/runtime/kernels/reduce_work.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../comm/numbers.h"
#include "../print_dtype.h"
#include "ebb/runtime/kernels/reduce.h"

namespace ebb {
namespace {

using ebb::testing::Mix;
using ebb::testing::Numbers;
using Combine = ReduceArrays::Combine;

// Runs the kernel's work with so many threads.
void RunThreads(const ReduceArrays& arrays, int64_t threads) {
  reduce_work::WithTypes(arrays, [&](auto number, auto combine) {
    using T = decltype(number);
    const int64_t head = reduce_work::HeadOf(arrays, sizeof(T));
    for (int64_t thread = 0; thread < threads; ++thread)
      reduce_work::ReduceAsThread<T, decltype(combine)::value>(arrays, head, thread, threads);
  });
}

class ReduceWorkTest : public ::testing::TestWithParam<std::tuple<DType, Combine>> {
 protected:
  DType dtype() const { return std::get<0>(GetParam()); }
  Combine combine() const { return std::get<1>(GetParam()); }
  ReduceOp op() const {
    return combine() == Combine::kSum   ? ReduceOp::kSum
           : combine() == Combine::kMax ? ReduceOp::kMax
                                        : ReduceOp::kMin;
  }

  // `inputs` from element `shift` on.
  ReduceArrays ArraysOf(const std::vector<Numbers>& inputs, int64_t shift, int64_t count, int group,
                        float scale) const {
    ReduceArrays arrays = {.count = count,
                           .inputs_count = static_cast<int>(inputs.size()),
                           .group = group,
                           .scale = scale,
                           .dtype = dtype(),
                           .combine = combine()};
    for (size_t i = 0; i < inputs.size(); ++i) arrays.inputs[i] = inputs[i].at(shift);
    return arrays;
  }
  void Expect(ReduceArrays arrays, Numbers& result, int64_t shift, int64_t threads) {
    Numbers expected = result;
    ThreadTeam team(1);
    Reduce(team, {.dtype = dtype(), .op = op(), .scale = arrays.scale, .group = arrays.group},
           {arrays.inputs, static_cast<size_t>(arrays.inputs_count)}, expected.at(shift),
           arrays.count);
    arrays.destination = result.at(shift);
    RunThreads(arrays, threads);
    EXPECT_TRUE(result == expected)
        << arrays.inputs_count << " inputs in groups of " << arrays.group << ", " << arrays.count
        << " elements from " << shift << ", scale " << arrays.scale;
  }
};

TEST_P(ReduceWorkTest, GivesTheBitsOfReduceWhereverTheArraysAre) {
  for (const auto& [ranks, group] :
       {std::pair{1, 1}, {2, 2}, {3, 3}, {4, 2}, {8, 4}, {6, 1}, {64, 64}}) {
    for (const int64_t count : {0, 1, 7, 129, 1000}) {
      for (const int64_t shift : {0, 1, 3, 9}) {
        std::vector<Numbers> inputs;
        for (int rank = 0; rank < ranks; ++rank)
          inputs.emplace_back(dtype(), count + 16).Fill(static_cast<uint64_t>(rank + 100 * count));
        Numbers result(dtype(), count + 16);
        for (const float scale : {1.0f, 1.0f / 3})
          Expect(ArraysOf(inputs, shift, count, group, scale), result, shift, 3);
        // Aligned differently from the inputs.
        Expect(ArraysOf(inputs, shift, count, group, 1), result, shift + 1, 2);
      }
    }
  }
}

TEST_P(ReduceWorkTest, TakesInputsInARowOfAnyNumber) {
  constexpr int64_t kCount = 131, kStride = 640;  // bytes
  for (const auto& [ranks, group] : {std::pair{3, 3}, {100, 10}}) {
    Numbers row(dtype(), ranks * kStride / SizeOf(dtype()));
    row.Fill(1);
    std::vector<const void*> inputs;
    for (int rank = 0; rank < ranks; ++rank)
      inputs.push_back(row.at(rank * kStride / SizeOf(dtype())));
    Numbers result(dtype(), kCount), expected(dtype(), kCount);
    ThreadTeam team(1);
    Reduce(team, {.dtype = dtype(), .op = op(), .scale = 0.3f, .group = group}, inputs,
           expected.at(0), kCount);
    RunThreads({.inputs = {inputs[0]},
                .destination = result.at(0),
                .stride = kStride,
                .count = kCount,
                .inputs_count = ranks,
                .group = group,
                .scale = 0.3f,
                .dtype = dtype(),
                .combine = combine()},
               3);
    EXPECT_TRUE(result == expected) << ranks << " inputs";
  }
}

TEST_P(ReduceWorkTest, ScalesInPlaceWhereverTheArrayIs) {
  for (const int64_t count : {0, 1, 7, 129, 1000}) {
    for (const int64_t shift : {0, 1, 3, 9}) {
      Numbers scaled(dtype(), count + 16);
      scaled.Fill(static_cast<uint64_t>(count));
      Numbers expected = scaled;
      ThreadTeam team(1);
      const void* const input = scaled.at(shift);
      Reduce(team, {.dtype = dtype(), .scale = 1.0f / 3}, {&input, 1}, expected.at(shift), count);
      reduce_work::WithType(dtype(), [&](auto number) {
        const ScaleArrays::Span span = {.data = scaled.at(shift), .count = count};
        for (int64_t thread = 0; thread < 3; ++thread)
          reduce_work::ScaleAsThread<decltype(number)>(span, 1.0f / 3, thread, 3);
      });
      EXPECT_TRUE(scaled == expected) << count << " elements from " << shift;
    }
  }
}

TEST_P(ReduceWorkTest, DestinationMayBeAnInput) {
  constexpr int64_t kCount = 1003;
  std::vector<Numbers> inputs;
  for (int rank = 0; rank < 3; ++rank)
    inputs.emplace_back(dtype(), kCount).Fill(static_cast<uint64_t>(rank));
  Numbers apart(dtype(), kCount);
  ReduceArrays arrays = ArraysOf(inputs, 0, kCount, 3, 0.3f);
  arrays.destination = apart.at(0);
  RunThreads(arrays, 1);
  arrays.destination = inputs[1].at(0);
  RunThreads(arrays, 4);
  EXPECT_TRUE(inputs[1] == apart);
}

TEST_P(ReduceWorkTest, AnyTwoPatternsGiveTheBitsOfReduce) {
  constexpr int64_t kCount = 200'000;
  std::vector<Numbers> inputs(2, Numbers(dtype(), kCount));
  for (int64_t i = 0; i < kCount; ++i) {
    const uint64_t bits = Mix(static_cast<uint64_t>(i));
    // Similar exponents, so that sums keep bits beyond the type's. Every other pair is of any two
    // numbers.
    const uint64_t near = i % 2 == 0 ? bits ^ ((bits >> 32) & 0x80ff83ff) : Mix(bits);
    std::memcpy(inputs[0].at(i), &bits, static_cast<size_t>(SizeOf(dtype())));
    std::memcpy(inputs[1].at(i), &near, static_cast<size_t>(SizeOf(dtype())));
  }
  Numbers result(dtype(), kCount);
  for (const float scale : {1.0f, 1.0f / 3, 0x1p-7f, 3.0f})
    Expect(ArraysOf(inputs, 0, kCount, 2, scale), result, 0, 2);
}

std::string TestName(const ::testing::TestParamInfo<ReduceWorkTest::ParamType>& test) {
  constexpr const char* kNames[] = {"_sum", "_max", "_min"};
  const auto& [dtype, combine] = test.param;
  return std::string(Name(dtype)) + kNames[static_cast<size_t>(combine)];
}
INSTANTIATE_TEST_SUITE_P(Types, ReduceWorkTest,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16,
                                                              DType::kFloat16, DType::kInt8),
                                            ::testing::Values(Combine::kSum, Combine::kMax,
                                                              Combine::kMin)),
                         TestName);

}  // namespace
}  // namespace ebb
