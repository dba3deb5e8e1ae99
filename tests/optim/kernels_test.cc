// One suite for the kernels of every device: they give the bits of the CPU's free functions. CUDA's
// run on a device, if there is one, and on the stand-in of ../cuda.
#include "ebb/optim/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "ebb/optim/split_master.h"
#include "ebb/optim/stochastic_rounding.h"
#include "kernels_fixture.h"
#include "state_encodings.h"

namespace ebb::optim {
namespace {

TEST_P(KernelsTest, CastsHaveTheBitsOfCast) {
  for (const int64_t count : {0, 1, 3, 1000, 100'003}) {
    for (const int64_t offset : {0, 1, 4}) {
      ExpectCasts<float, BFloat16>(Numbers<float>(count, 1), offset, offset);
      ExpectCasts<float, Float16>(Numbers<float>(count, 2), offset, 0);
      ExpectCasts<float, float>(Numbers<float>(count, 3), offset, 0);
      ExpectCasts<BFloat16, float>(Numbers<BFloat16>(count, 4), offset, offset);
      ExpectCasts<BFloat16, Float16>(Numbers<BFloat16>(count, 5), 0, offset);
      ExpectCasts<Float16, float>(Numbers<Float16>(count, 6), offset, 0);
      ExpectCasts<Float16, BFloat16>(Numbers<Float16>(count, 7), offset, offset);
    }
  }
}

TEST_P(KernelsTest, CastsOfEveryPatternAndHalfwayHaveTheBitsOfCast) {
  ExpectCasts<BFloat16, float>(EveryPattern<BFloat16>(), 0, 0);
  ExpectCasts<Float16, float>(EveryPattern<Float16>(), 0, 0);
  ExpectCasts<BFloat16, Float16>(EveryPattern<BFloat16>(), 0, 0);
  ExpectCasts<Float16, BFloat16>(EveryPattern<Float16>(), 0, 0);
  ExpectCasts<float, BFloat16>(TurningPoints(), 0, 0);
  ExpectCasts<float, Float16>(TurningPoints(), 0, 0);
}

TEST_P(KernelsTest, CastViaRoundsTwice) {
  for (const int64_t count : {0, 1, 1023, 50'003}) {
    for (const int64_t offset : {0, 3}) {
      ExpectCastsVia<float, BFloat16, float>(count, offset);
      ExpectCastsVia<float, Float16, float>(count, offset);
      ExpectCastsVia<BFloat16, Float16, float>(count, offset);
      ExpectCastsVia<Float16, BFloat16, float>(count, offset);
      ExpectCastsVia<float, BFloat16, Float16>(count, offset);
      ExpectCastsVia<BFloat16, BFloat16, float>(count, offset);
      ExpectCastsVia<float, BFloat16, BFloat16>(count, offset);
      ExpectCastsVia<BFloat16, float, BFloat16>(count, offset);
    }
  }
}

TEST_P(KernelsTest, ScalesInFp32) {
  constexpr float kFactor = 0.37f;
  const auto expect = [&]<class From>(const std::vector<From>& from, int64_t offset) {
    ThreadTeam team(1);
    const auto count = static_cast<int64_t>(from.size());
    std::vector<float> expected(from.size());
    optim::Cast(team, from.data(), kDTypeOf<From>, expected.data(), DType::kFloat32, count,
                Rounding::kNearest);
    for (float& value : expected) value *= kFactor;
    Array<From> source(*this, from, offset);
    Array<float> to(*this, std::vector<float>(from.size()));
    Enqueue([&](Kernels& kernels, Stream& stream) {
      kernels.Scale(stream, source.data(), kDTypeOf<From>, kFactor, to.data(), count);
    });
    ExpectBits(to.Read(), expected);
  };
  for (const int64_t offset : {0, 1}) {
    expect(Numbers<float>(1027, 31), offset);
    expect(Numbers<BFloat16>(1027, 32), offset);
    expect(Numbers<Float16>(1027, 33), offset);
  }
}

// Muon's iteration. A GPU's products have an order of sums of their own.
TEST_P(KernelsTest, OrthogonalisesAsTheCpu) {
  if (const absl::Status loaded = kernels().LoadProducts(); !loaded.ok()) GTEST_SKIP() << loaded;
  constexpr int64_t kRows = 40, kColumns = 72;
  const auto expect = [&]<class T>(T, double tolerance) {
    std::vector<T> matrix;
    for (int i = 0; i < kRows * kColumns; ++i)
      matrix.push_back(T(std::sin(0.37f * static_cast<float>(i * i % 1009))));
    const NewtonSchulz rule{.scale = 1.5f};
    const NewtonSchulzScratch scratch(kRows, kColumns, sizeof(T));
    std::vector<T> expected = matrix;
    const Buffer host = *Device::Cpu(1).Allocate(scratch.bytes, "test"),
                 memory = *device().Allocate(scratch.bytes, "test");
    ThreadTeam team(1);
    Orthogonalise(team, rule,
                  {.matrix = expected.data(),
                   .rows = kRows,
                   .columns = kColumns,
                   .dtype = kDTypeOf<T>,
                   .scratch = host.data()});
    Array<T> on_device(*this, matrix);
    Enqueue([&](Kernels& kernels, Stream& stream) {
      kernels.Orthogonalise(stream, rule,
                            {.matrix = on_device.data(),
                             .rows = kRows,
                             .columns = kColumns,
                             .dtype = kDTypeOf<T>,
                             .scratch = memory.data()});
    });
    const std::vector<T> result = on_device.Read();
    if (!kernels().enqueues()) return ExpectBits(result, expected);
    double difference = 0, squares = 0;
    for (size_t i = 0; i < result.size(); ++i) {
      const double of = static_cast<float>(expected[i]);
      difference += std::pow(static_cast<float>(result[i]) - of, 2);
      squares += of * of;
    }
    EXPECT_LT(std::sqrt(difference / squares), tolerance);
  };
  expect(0.0f, 1e-5);
  expect(BFloat16(), 2e-2);
}

// Both forms; random bits also across the end of a key.
TEST_P(KernelsTest, MastersComeAndGoWithTheBitsOfTheirForm) {
  constexpr int64_t kCount = 1027;
  constexpr RoundingPlace kPlaces[] = {{.unit = 7, .index = 12},
                                       {.unit = 7, .index = kRoundingKeyElements - 500}};
  ThreadTeam team(1);
  for (const bool split : {false, true}) {
    for (const RoundingPlace& place : kPlaces) {
      for (const int64_t offset : {0, 1}) {
        SCOPED_TRACE(testing::Message() << split << " " << place.index << " " << offset);
        const auto masters = Numbers<float>(kCount, 41);
        std::vector<BFloat16> halves(kCount);
        std::vector<uint16_t> lows(kCount);
        std::vector<float> loaded(kCount);
        if (split) {
          Split(team, masters.data(), halves.data(), lows.data(), kCount);
          loaded = masters;
        } else {
          RoundStochastically(team, masters.data(), halves.data(), kCount, place, /*step=*/3);
          for (size_t i = 0; i < loaded.size(); ++i) loaded[i] = static_cast<float>(halves[i]);
        }
        Array<float> master(*this, masters, offset);
        Array<BFloat16> parameter(*this, std::vector<BFloat16>(kCount), offset);
        Array<uint16_t> low(*this, std::vector<uint16_t>(kCount), offset);
        const MasterArrays arrays = {.master = master.data(),
                                     .parameter = parameter.data(),
                                     .low = split ? low.data() : nullptr,
                                     .count = kCount,
                                     .rounding = place,
                                     .step = 3};
        Enqueue([&](Kernels& kernels, Stream& stream) { kernels.StoreMaster(stream, arrays); });
        ExpectBits(parameter.Read(), halves);
        EXPECT_EQ(low.Read(), lows);
        master.Set(std::vector<float>(kCount));
        Enqueue([&](Kernels& kernels, Stream& stream) { kernels.LoadMaster(stream, arrays); });
        ExpectBits(master.Read(), loaded);
      }
    }
  }
}

TEST_P(KernelsTest, AccumulatesAndSumsSquaresWithTheBitsOfTheNorm) {
  for (const int64_t count : {0, 1, 15, 1024, 1025, 40'007, 300'001}) {
    for (const int64_t offset : {0, 1}) {
      for (const bool add : {false, true}) {
        ExpectAccumulates<float, float>(count, offset, add);
        ExpectAccumulates<BFloat16, float>(count, offset, add);
        ExpectAccumulates<BFloat16, BFloat16>(count, offset, add);
        ExpectAccumulates<Float16, float>(count, offset, add);
        ExpectAccumulates<float, Float16>(count, offset, add);
      }
    }
  }
}

// Exactly the sums of arrays with an overflow are infinite or NaN.
TEST_P(KernelsTest, TheSumShowsInfinitiesAndNaNs) {
  for (const size_t at : {size_t{0}, size_t{1023}, size_t{1024}, size_t{2999}}) {
    std::vector<float> values(3000, std::numeric_limits<float>::max());
    values[at] = std::numeric_limits<float>::quiet_NaN();
    Array<float> gradient(*this, values);
    Array<double> blocks(*this, {0, 0, 0}), sum(*this, {0});
    Enqueue([&](Kernels& kernels, Stream& stream) {
      kernels.SumOfSquares(stream, gradient.data(), DType::kFloat32, 3000, {blocks.data(), 3},
                           sum.data());
    });
    EXPECT_TRUE(std::isnan(sum.Read()[0]));
  }
}

TEST_P(KernelsTest, AddsToASumInTheOrderOfTheStream) {
  Array<float> values(*this, {1.5f, 0x1p-30f});
  Array<double> sum(*this, {0x1p20});
  Enqueue([&](Kernels& kernels, Stream& stream) {
    for (int i = 0; i < 3; ++i) kernels.AddTo(stream, values.data() + i % 2, sum.data());
  });
  EXPECT_EQ(sum.Read()[0], 0x1p20 + 3 + 0x1p-30);
}

TEST_P(KernelsTest, UpdatesHaveTheBitsOfUpdateAndWriteNothingUnlessApplied) {
  for (const Rule& rule : kRules) {
    SCOPED_TRACE(rule.name);
    for (const int64_t count : {0, 1, 1003, 30'001}) {
      for (const int64_t offset : {0, 3}) {
        ExpectUpdates<float, float>(rule, count, offset, false);
        ExpectUpdates<float, float>(rule, count, offset, true);
        ExpectUpdates<float, BFloat16>(rule, count, offset, true);
        ExpectUpdates<BFloat16, BFloat16>(rule, count, offset, true);
        ExpectUpdates<Float16, Float16>(rule, count, offset, true);
        ExpectUpdates<float, BFloat16>(rule, count, offset, true, MasterForm::kSplit);
        ExpectUpdates<float, BFloat16>(rule, count, offset, true, MasterForm::kParameter);
        ExpectUpdates<BFloat16, BFloat16>(rule, count, offset, true, MasterForm::kSplit);
        ExpectUpdates<BFloat16, BFloat16>(rule, count, offset, true, MasterForm::kParameter);
      }
    }
  }
}

// One call over runs with constants of their own, from the middle of a run.
TEST_P(KernelsTest, UpdatesOfSeveralRunsHaveTheBitsOfEachRunAlone) {
  constexpr int64_t kCount = 3000, kBegin = 320;
  const std::vector<UpdateRun> runs = {{.end = 256, .set = 1},
                                       {.end = 1024, .set = 0},
                                       {.end = 1088, .set = 2},
                                       {.end = 1152, .set = 1},
                                       {.end = 4096, .set = 0}};
  for (const Rule& rule : kRules) {
    SCOPED_TRACE(rule.name);
    std::vector<UpdateConstants> constants;
    for (const double decay : {0.1, 0.0, 0.3}) {
      OptimizerConfig optimizer = rule.optimizer;
      optimizer.weight_decay = decay;
      constants.push_back(UpdateConstantsOf(optimizer, rule.scalars));
    }
    auto expected = MemoryBeforeUpdate<float, BFloat16>(kCount, rule);
    auto memory = OnDevice(expected, /*offset=*/0);
    Array<UpdateConstants> read(*this, constants);
    Array<UpdateRun> table(*this, runs);
    Enqueue([&](Kernels& kernels, Stream& stream) {
      kernels.Update(stream, UpdateRuleOf(rule.optimizer), memory.Part(0, kCount, true),
                     {.constants = {read.data(), constants.size()},
                      .runs = {table.data(), runs.size()},
                      .begin = kBegin});
    });
    ThreadTeam team(1);
    const UpdateArrays whole = expected.Part(0, kCount, true);
    int64_t begin = 0;
    for (const UpdateRun& run : runs) {
      const int64_t end = std::min(run.end - kBegin, kCount);
      if (end <= begin) continue;
      optim::Update(team, UpdateRuleOf(rule.optimizer), PartOf(whole, begin, end - begin),
                    constants[static_cast<size_t>(run.set)]);
      begin = end;
    }
    EXPECT_EQ(begin, kCount);
    ExpectBits(OnHost(memory), expected);
  }
}

// Added to the old sums; nothing is added if the constants do not apply.
TEST_P(KernelsTest, NormsOfSeveralRunsHaveTheBitsOfSumNorms) {
  constexpr int64_t kCount = 3000, kBegin = 320;
  const std::vector<UpdateRun> runs = {{.end = 256, .set = 1},
                                       {.end = 1024, .set = 0},
                                       {.end = 1088, .set = 2},
                                       {.end = 4096, .set = 1}};
  for (const Rule& rule : kRules) {
    const UpdateRule update_rule = UpdateRuleOf(rule.optimizer);
    if (!TakesNorms(update_rule)) continue;
    SCOPED_TRACE(rule.name);
    std::vector<UpdateConstants> constants(3, UpdateConstantsOf(rule.optimizer, rule.scalars));
    const auto before = MemoryBeforeUpdate<float, BFloat16>(kCount, rule);
    auto expected = before;
    auto memory = OnDevice(before, /*offset=*/0);
    std::vector<UpdateConstants> not_applied = constants;
    for (UpdateConstants& set : not_applied) set.apply = false;
    Array<UpdateConstants> read(*this, constants), unread(*this, not_applied);
    Array<UpdateRun> table(*this, runs);
    Array<NormSums> sums(*this,
                         std::vector<NormSums>(3, NormSums{.parameter = {{7}}, .direction = {}}));
    Enqueue([&](Kernels& kernels, Stream& stream) {
      const UpdateArrays arrays = memory.Part(0, kCount, true);
      const std::span<NormSums> all(sums.data(), 3);
      kernels.ClearNorms(stream, all);
      for (int times = 0; times < 2; ++times) {
        for (Array<UpdateConstants>* of : {&read, &unread}) {
          kernels.SumNorms(stream, update_rule, arrays,
                           {.constants = {of->data(), constants.size()},
                            .runs = {table.data(), runs.size()},
                            .begin = kBegin},
                           all);
        }
      }
    });
    ThreadTeam team(1);
    const UpdateArrays whole = expected.Part(0, kCount, true);
    std::vector<NormSums> expected_sums(3);
    for (int times = 0; times < 2; ++times) {
      int64_t begin = 0;
      for (const UpdateRun& run : runs) {
        const int64_t end = std::min(run.end - kBegin, kCount);
        if (end <= begin) continue;
        optim::SumNorms(team, update_rule, PartOf(whole, begin, end - begin), constants[0],
                        expected_sums[static_cast<size_t>(run.set)]);
        begin = end;
      }
    }
    const std::vector<NormSums> actual = sums.Read();
    for (size_t set = 0; set < 3; ++set) {
      EXPECT_GT(Rounded(expected_sums[set].parameter), 0);
      EXPECT_EQ(Rounded(actual[set].parameter), Rounded(expected_sums[set].parameter));
      EXPECT_EQ(Rounded(actual[set].direction), Rounded(expected_sums[set].direction));
    }
    ExpectBits(OnHost(memory), before);
  }
}

TEST_P(KernelsTest, StatesOfOtherEncodingsHaveTheBitsOfTheCpu) {
  constexpr int64_t kCount = 3000;
  constexpr MasterForm kForm = MasterForm::kSplit;
  for (const Rule& rule : RulesWithEncodedStates()) {
    for (const StateKind& kind : kStateKinds) {
      SCOPED_TRACE(testing::Message() << rule << ", " << kind);
      const auto before = EncodedMemoryBeforeUpdate<BFloat16, BFloat16>(kCount, rule, kind, kForm);
      auto expected = before;
      ThreadTeam team(1);
      optim::Update(team, rule.optimizer, expected.Arrays(kForm), rule.scalars);

      auto memory = OnDevice(before.memory, 0);
      UpdateArrays arrays = memory.Part(0, kCount, true, kForm);
      arrays.round_states_stochastically = kind.stochastically;
      std::vector<Array<std::byte>> codes;
      std::vector<Array<float>> scales;
      codes.reserve(kStatesMax);
      scales.reserve(kStatesMax);
      for (int s = 0; s < kStatesMax; ++s) {
        const HostState& state = before.states[s];
        arrays.states[s] = {.codes = codes.emplace_back(*this, state.codes).data(),
                            .scales = scales.emplace_back(*this, state.scales).data(),
                            .encoding = state.encoding};
      }
      UpdateConstants constants = UpdateConstantsOf(rule.optimizer, rule.scalars);
      constants.apply = false;
      Array<UpdateConstants> read(*this, {constants});
      const auto update_and_expect = [&](const EncodedMemory<BFloat16, BFloat16>& contents) {
        Enqueue([&](Kernels& kernels, Stream& stream) {
          kernels.Update(stream, rule.optimizer, arrays, read.data());
        });
        ExpectBits(OnHost(memory), contents.memory);
        for (int s = 0; s < kStatesMax; ++s) {
          HostState seen = before.states[s];
          seen.codes = codes[static_cast<size_t>(s)].Read();
          seen.scales = scales[static_cast<size_t>(s)].Read();
          EXPECT_TRUE(seen == contents.states[s]) << "state " << s;
        }
      };
      update_and_expect(before);
      constants.apply = true;
      read.Set({constants});
      update_and_expect(expected);
    }
  }
}

// Like in an engine: work enqueued in between writes the verdict.
TEST_P(KernelsTest, UpdatesReadTheirConstantsWhenTheyRun) {
  const Rule& rule = kRules[0];
  UpdateConstants constants = UpdateConstantsOf(rule.optimizer, rule.scalars);
  Array<UpdateConstants> decided(*this, {constants});
  constants.apply = false;
  Array<UpdateConstants> read(*this, {constants});
  const std::vector<float> ones(100, 1.0f);
  Array<float> master(*this, ones), gradient(*this, ones), first(*this, ones), second(*this, ones);
  const UpdateArrays arrays = {.master = master.data(),
                               .gradient = gradient.data(),
                               .states = {{first.data()}, {second.data()}},
                               .count = 100};
  const auto update = [&](Kernels& kernels, Stream& stream) {
    kernels.Update(stream, rule.optimizer, arrays, read.data());
  };
  Enqueue(update);
  stream().Copy(read.data(), decided.data(), sizeof(UpdateConstants));
  Enqueue(update);
  std::vector<float> expected = ones, expected_first = ones, expected_second = ones;
  ThreadTeam team(1);
  optim::Update(team, rule.optimizer,
                {.master = expected.data(),
                 .gradient = ones.data(),
                 .states = {{expected_first.data()}, {expected_second.data()}},
                 .count = 100},
                rule.scalars);
  EXPECT_EQ(master.Read(), expected);
  EXPECT_EQ(first.Read(), expected_first);
  EXPECT_EQ(second.Read(), expected_second);
}

INSTANTIATE_TEST_SUITE_P(Backends, KernelsTest, ::testing::ValuesIn(Backends()),
                         [](const ::testing::TestParamInfo<Backend>& backend) {
                           return backend.param.name;
                         });

}  // namespace
}  // namespace ebb::optim
