// The arithmetic of CUDA's kernels without a device: all threads of a grid, one after the other,
// give the bits of the CPU's functions.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <vector>

#include "ebb/optim/cast.h"
#include "ebb/optim/cuda/thread_work.h"
#include "ebb/optim/cuda/update_work.h"
#include "ebb/optim/norm.h"
#include "ebb/optim/parameter_norms.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/device/thread_team.h"
#include "numbers.h"
#include "rules.h"
#include "state_encodings.h"
#include "update_memory.h"

namespace ebb::optim::cuda_thread_work_test {
namespace {

constexpr int64_t kGrids[] = {1, 5, 32};

// Every thread has its own body.
template <class Work>
void RunGrid(const Work& work, const cuda::Cut& cut, int64_t threads) {
  for (int64_t thread = 0; thread < threads; ++thread)
    cuda::Walk<Work::kMany>(cut, thread, threads, Work(work));
}

// Which elements a body has seen, and how often.
struct SeenWork {
  std::vector<int>& seen;
  int64_t& most;
  template <int kWidth, int kTimes>
  void At(int64_t first, int64_t stride) const {
    for (int m = 0; m < kTimes; ++m) {
      for (int i = 0; i < kWidth; ++i) ++seen[static_cast<size_t>(first + m * stride + i)];
    }
    most = std::max<int64_t>(most, kWidth * kTimes);
  }
};

TEST(CudaWalk, ShowsEveryElementOnceWhateverTheArraysAlignment) {
  alignas(64) float floats[256] = {};
  alignas(64) uint16_t halves[256] = {};
  for (const int64_t count : {0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 200}) {
    for (const int64_t offset : {0, 1, 2, 3, 4, 5}) {
      for (const int64_t other : {offset, int64_t{0}, int64_t{2}}) {
        const cuda::Cut cut =
            cuda::CutFor(count, {{floats + offset, 4}, {halves + other, 2}, {nullptr, 4}});
        if (offset % 4 == other % 4 && count >= 8) {
          EXPECT_LE(cut.singles(), 6);
        } else if (offset % 4 != other % 4) {
          EXPECT_EQ(cut.groups, 0);
        }
        for (const int64_t threads : kGrids) {
          std::vector<int> seen(static_cast<size_t>(count));
          int64_t most = 0;
          for (int64_t thread = 0; thread < threads; ++thread)
            cuda::Walk<4>(cut, thread, threads, SeenWork{seen, most});
          EXPECT_EQ(seen, std::vector<int>(static_cast<size_t>(count), 1));
          EXPECT_TRUE(most == 16 || threads > 1 || cut.groups < 4) << most;
        }
      }
    }
  }
}

template <class From, class To>
void ExpectCasts(const std::vector<From>& from) {
  ThreadTeam team(1);
  const auto count = static_cast<int64_t>(from.size());
  for (const Rounding rounding : {Rounding::kNearest, Rounding::kParameter}) {
    std::vector<To> expected(from.size()), to(from.size());
    Cast(team, from.data(), kDTypeOf<From>, expected.data(), kDTypeOf<To>, count, rounding);
    const CastArrays arrays = {.source = from.data(),
                               .source_dtype = kDTypeOf<From>,
                               .destination = to.data(),
                               .destination_dtype = kDTypeOf<To>,
                               .count = count,
                               .rounding = rounding};
    RunGrid(cuda::CastWork{arrays}, cuda::CastWork::CutOf(arrays), 5);
    for (size_t i = 0; i < from.size(); ++i)
      ASSERT_EQ(Bits(to[i]), Bits(expected[i])) << "source bits " << std::hex << Bits(from[i]);
  }
}

TEST(CudaCast, EverySixteenBitPatternAndEveryHalfway) {
  ExpectCasts<BFloat16, float>(EveryPattern<BFloat16>());
  ExpectCasts<Float16, float>(EveryPattern<Float16>());
  ExpectCasts<BFloat16, Float16>(EveryPattern<BFloat16>());
  ExpectCasts<Float16, BFloat16>(EveryPattern<Float16>());
  ExpectCasts<float, BFloat16>(TurningPoints());
  ExpectCasts<float, Float16>(TurningPoints());
}

TEST(CudaCast, ViaAnotherTypeRoundsTwice) {
  ThreadTeam team(1);
  const auto from = TurningPoints();
  const auto count = static_cast<int64_t>(from.size());
  std::vector<BFloat16> rounded(from.size());
  std::vector<Float16> expected(from.size()), to(from.size());
  Cast(team, from.data(), DType::kFloat32, rounded.data(), DType::kBFloat16, count,
       Rounding::kNearest);
  Cast(team, rounded.data(), DType::kBFloat16, expected.data(), DType::kFloat16, count,
       Rounding::kNearest);
  const CastArrays arrays = {.source = from.data(),
                             .via = DType::kBFloat16,
                             .destination = to.data(),
                             .destination_dtype = DType::kFloat16,
                             .count = count};
  RunGrid(cuda::CastWork{arrays}, cuda::CastWork::CutOf(arrays), 32);
  ExpectBits(to, expected);
}

TEST(CudaCast, TimesAFactorInFp32) {
  const auto from = EveryPattern<BFloat16>();
  std::vector<float> to(from.size());
  const CastArrays arrays = {.source = from.data(),
                             .source_dtype = DType::kBFloat16,
                             .destination = to.data(),
                             .count = static_cast<int64_t>(from.size()),
                             .factor = 0.37f};
  RunGrid(cuda::CastWork{arrays}, cuda::CastWork::CutOf(arrays), 5);
  for (size_t i = 0; i < from.size(); ++i)
    ASSERT_EQ(Bits(to[i]), Bits(static_cast<float>(from[i]) * 0.37f)) << i;
}

template <bool kSplit>
void ExpectMasters(int64_t offset) {
  ThreadTeam team(1);
  const std::vector<float> points = TurningPoints();
  const auto count = static_cast<int64_t>(points.size()) - offset;
  const auto size = static_cast<size_t>(count);
  std::vector<float> master = points, expected_master(size);
  std::vector<BFloat16> parameter(size), expected(size);
  std::vector<uint16_t> low(size), expected_low(size);
  MasterArrays arrays = {.master = master.data() + offset,
                         .parameter = expected.data(),
                         .low = kSplit ? expected_low.data() : nullptr,
                         .count = count,
                         .rounding = {.unit = 5, .index = 77},
                         .step = 4};
  StoreMaster(team, arrays);
  arrays.parameter = parameter.data();
  arrays.low = kSplit ? low.data() : nullptr;
  RunGrid(cuda::StoreMasterWork<kSplit>(arrays), cuda::CutForMaster(arrays), 5);
  ExpectBits(parameter, expected);
  EXPECT_EQ(low, expected_low);

  MasterArrays loads = arrays;
  loads.master = expected_master.data();
  LoadMaster(team, loads);
  RunGrid(cuda::LoadMasterWork<kSplit>{arrays}, cuda::CutForMaster(arrays), 5);
  for (size_t i = 0; i < size; ++i)
    ASSERT_EQ(Bits(arrays.master[i]), Bits(expected_master[i])) << i;
}

TEST(CudaMasters, ComeAndGoWithTheBitsOfTheCpu) {
  for (const int64_t offset : {0, 1}) {
    ExpectMasters<true>(offset);
    ExpectMasters<false>(offset);
  }
}

// Adds the parts as SumBlocksKernel does.
template <int kLanes>
double BlockSum(const cuda::SquaresWork<kLanes>& work, int64_t block) {
  constexpr int kParts = cuda::SquaresWork<kLanes>::kParts;
  double lanes[kParts][kLanes] = {};
  for (int part = 0; part < kParts; ++part)
    work.Part(block, part, cuda::SquaresWork<kLanes>::Aligned(work.arrays), lanes[part]);
  for (int distance = kParts / 2; distance > 0; distance /= 2) {
    for (int part = 0; part < distance; ++part) cuda::AddPart(lanes[part], lanes[part + distance]);
  }
  return cuda::AddLanes(lanes[0]);
}

// `numbers`: the numbers to be squared.
template <int kLanes, class T>
void ExpectBlocks(const AccumulateArrays& arrays, const T* numbers) {
  ThreadTeam team(1);
  for (int64_t block = 0; block < NormBlocks(arrays.count); ++block) {
    const int64_t begin = block * kNormBlock;
    double scratch = 0;
    const double expected = SumOfSquares(team, numbers + begin, kDTypeOf<T>,
                                         std::min(kNormBlock, arrays.count - begin), {&scratch, 1});
    ASSERT_EQ(BlockSum(cuda::SquaresWork<kLanes>{arrays}, block), expected) << block;
  }
}

template <class Source, class Destination>
void ExpectAccumulates(int64_t count, int64_t offset, bool add) {
  SCOPED_TRACE(testing::Message() << count << " elements from " << offset);
  ThreadTeam team(1);
  const auto source = Numbers<Source>(count + offset, 11);
  const auto before = Numbers<Destination>(count + offset, 12);
  auto expected = before;
  AccumulateArrays arrays = {.source = source.data() + offset,
                             .source_dtype = kDTypeOf<Source>,
                             .destination = expected.data() + offset,
                             .destination_dtype = kDTypeOf<Destination>,
                             .count = count,
                             .add = add};
  Accumulate(team, arrays);

  auto added = before;
  arrays.destination = added.data() + offset;
  const auto expect_added = [&] { ExpectBits(added, expected); };
  ExpectBlocks<4>(arrays, expected.data() + offset);
  expect_added();
  added = before;
  ExpectBlocks<2>(arrays, expected.data() + offset);
  expect_added();
  added = before;
  ExpectBlocks<1>(arrays, expected.data() + offset);
  expect_added();
  for (const int64_t threads : kGrids) {
    added = before;
    RunGrid(cuda::AccumulateWork{arrays}, cuda::AccumulateWork::CutOf(arrays), threads);
    expect_added();
  }

  const AccumulateArrays alone = {
      .source = source.data() + offset, .source_dtype = kDTypeOf<Source>, .count = count};
  ExpectBlocks<4>(alone, source.data() + offset);
  ExpectBlocks<2>(alone, source.data() + offset);
  ExpectBlocks<1>(alone, source.data() + offset);
}

TEST(CudaNorm, AccumulationsAndBlocksHaveTheBitsOfTheCpu) {
  for (const int64_t count : {0, 1, 15, 17, 1023, 1024, 1025, 5001}) {
    for (const int64_t offset : {0, 1, 4}) {
      for (const bool add : {false, true}) {
        ExpectAccumulates<float, float>(count, offset, add);
        ExpectAccumulates<BFloat16, float>(count, offset, add);
        ExpectAccumulates<BFloat16, BFloat16>(count, offset, add);
        ExpectAccumulates<float, Float16>(count, offset, add);
        ExpectAccumulates<Float16, float>(count, offset, add);
        ExpectAccumulates<Float16, BFloat16>(count, offset, add);
      }
    }
  }
}

// Adds a level as AddLevel does, for each of its blocks with the threads of all lanes.
void RunLevel(const cuda::LevelWork& level) {
  for (int64_t block = 0; block < level.blocks(); ++block) {
    double lanes[cuda::kNormLanes];
    for (int lane = 0; lane < cuda::kNormLanes; ++lane) lanes[lane] = level.Lane(block, lane);
    for (int distance = cuda::kNormLanes / 2; distance > 0; distance /= 2) {
      for (int lane = 0; lane < distance; ++lane) lanes[lane] += lanes[lane + distance];
    }
    level.Put(block, lanes[0]);
  }
}

TEST(CudaNorm, LevelsHaveTheBitsOfTheCpu) {
  for (const int64_t count : {1, 2, 17, 255, 256, 1023, 1024, 1025, 5001, (1 << 20) + 3000}) {
    SCOPED_TRACE(count);
    const auto numbers = Numbers<float>(count, 5, Range::kPositive);
    std::vector<double> expected(numbers.begin(), numbers.end()), sums = expected;
    cuda::LevelWork level = {.sums = sums.data(), .count = count};
    for (; level.count > 1; level = level.Above()) RunLevel(level);
    EXPECT_EQ(sums[0], AddBlocks(expected));
  }
}

class CudaUpdate : public testing::TestWithParam<Rule> {};

template <UpdateRule kRule, MasterForm kForm>
void RunUpdate(const UpdateArrays& arrays, const UpdateRuns& runs, int64_t threads) {
  using Work = cuda::UpdateWork<kRule, kForm>;
  RunGrid(Work(arrays, runs), Work::CutOf(arrays, runs), threads);
}

template <MasterForm kForm>
void RunUpdate(UpdateRule rule, const UpdateArrays& arrays, const UpdateRuns& runs,
               int64_t threads) {
  WithRule(rule, [&]<UpdateRule kRule>() { RunUpdate<kRule, kForm>(arrays, runs, threads); });
}

// `runs`: ends of runs that alternate between two sets of constants; none: one set for all
// elements. `begin`: the arrays' begin, counted as in `runs`.
struct Runs {
  std::vector<int64_t> ends;
  int64_t begin = 0;
};

template <class Gradient, class Parameter, MasterForm kForm = MasterForm::kWhole>
void ExpectUpdates(const Rule& rule, int64_t count, int64_t offset, bool with_parameter = true,
                   const Runs& runs = {}) {
  SCOPED_TRACE(testing::Message() << count << " elements from " << offset);
  const int64_t size = count + offset;
  auto before = MemoryBeforeUpdate<Gradient, Parameter>(size, rule);
  if constexpr (kForm != MasterForm::kWhole) {
    SplitEach(before.master, before.parameter, before.low);
  }
  const auto arrays_of = [&](auto& memory) {
    return memory.Part(offset, size, with_parameter, kForm);
  };
  ThreadTeam team(1);
  auto expected = before;
  const UpdateRule update_rule = UpdateRuleOf(rule.optimizer);
  OptimizerConfig without_decay = rule.optimizer;
  without_decay.weight_decay = 0;
  const UpdateConstants constants[] = {UpdateConstantsOf(rule.optimizer, rule.scalars),
                                       UpdateConstantsOf(without_decay, rule.scalars)};
  std::vector<UpdateRun> table;
  int64_t done = 0;
  for (const int64_t run_end : runs.ends) {
    const auto set = static_cast<int64_t>(table.size() % 2);
    table.push_back({.end = run_end, .set = set});
    const int64_t end = std::min(run_end - runs.begin, count);
    if (end <= done) continue;
    Update(team, update_rule, PartOf(arrays_of(expected), done, end - done), constants[set]);
    done = end;
  }
  if (runs.ends.empty()) Update(team, update_rule, arrays_of(expected), constants[0]);
  for (const int64_t threads : kGrids) {
    auto memory = before;
    RunUpdate<kForm>(update_rule, arrays_of(memory),
                     {.constants = constants, .runs = table, .begin = runs.begin}, threads);
    ExpectBits(memory, expected);
  }
}

TEST_P(CudaUpdate, HasTheBitsOfTheCpu) {
  for (const int64_t count : {1, 3, 4, 37, 1000}) {
    for (const int64_t offset : {0, 1, 3}) {
      ExpectUpdates<float, float>(GetParam(), count, offset, false);
      ExpectUpdates<float, float>(GetParam(), count, offset);
      ExpectUpdates<float, BFloat16>(GetParam(), count, offset);
      ExpectUpdates<BFloat16, BFloat16>(GetParam(), count, offset);
      ExpectUpdates<Float16, Float16>(GetParam(), count, offset);
      ExpectUpdates<float, BFloat16, MasterForm::kSplit>(GetParam(), count, offset);
      ExpectUpdates<BFloat16, BFloat16, MasterForm::kSplit>(GetParam(), count, offset);
      ExpectUpdates<float, BFloat16, MasterForm::kParameter>(GetParam(), count, offset);
      ExpectUpdates<BFloat16, BFloat16, MasterForm::kParameter>(GetParam(), count, offset);
    }
  }
}

// True also from the middle of a run, and if the arrays' alignment leaves no groups.
TEST_P(CudaUpdate, SeveralRunsHaveTheBitsOfTheCpu) {
  for (const Runs& runs : {Runs{{8, 16, 64, 128, 1024}}, Runs{{64, 704, 768, 1088}, 640},
                           Runs{{1000}}, Runs{{8, 2048}, 8}}) {
    for (const int64_t count : {1, 9, 300}) {
      for (const int64_t offset : {0, 3}) {
        ExpectUpdates<float, float>(GetParam(), count, offset, false, runs);
        ExpectUpdates<BFloat16, BFloat16>(GetParam(), count, offset, true, runs);
        ExpectUpdates<float, BFloat16, MasterForm::kSplit>(GetParam(), count, offset, true, runs);
        ExpectUpdates<BFloat16, BFloat16, MasterForm::kParameter>(GetParam(), count, offset, true,
                                                                  runs);
      }
    }
  }
}

// All warps of the kernel, one after the other: lanes, then the shuffles.
template <UpdateRule kRule, MasterForm kForm>
void UpdateByWarps(const UpdateArrays& arrays, const UpdateRuns& runs, int64_t warps) {
  if constexpr (StatesOf(kRule) > 0) {
    using Work = cuda::EncodedUpdateWork<kRule, kForm>;
    const auto tables_of = [](const DynamicMap& map) {
      return cuda::MapTables{map.numbers.data(), map.steps.data(), map.negative};
    };
    const cuda::MapTables tables[] = {tables_of(kSignedMap), tables_of(kUnsignedMap)};
    const int64_t blocks = (arrays.count + kScaleBlock - 1) / kScaleBlock;
    for (int64_t warp = 0; warp < warps; ++warp) {
      std::vector<Work> lanes(Work::kLanes,
                              Work(arrays, runs, tables, Work::Aligned(arrays, runs)));
      for (int64_t block = warp; block < blocks; block += warps) {
        Extremes of_block[kStatesMax];
        for (int lane = 0; lane < Work::kLanes; ++lane) {
          Extremes extremes[kStatesMax];
          lanes[static_cast<size_t>(lane)].Update(block, lane, extremes);
          for (int s = 0; s < kStatesMax; ++s) {
            of_block[s].positive = std::max(of_block[s].positive, extremes[s].positive);
            of_block[s].negative = std::max(of_block[s].negative, extremes[s].negative);
          }
        }
        for (int lane = 0; lane < Work::kLanes; ++lane)
          lanes[static_cast<size_t>(lane)].Encode(block, lane, of_block);
      }
    }
  }
}

class CudaEncodedUpdate : public testing::TestWithParam<std::tuple<Rule, StateKind>> {
 protected:
  template <class Gradient, class Parameter, MasterForm kForm = MasterForm::kWhole>
  void ExpectUpdates(int64_t count, const Runs& runs = {}, int64_t offset = 0) const {
    const auto& [rule, kind] = GetParam();
    SCOPED_TRACE(testing::Message() << count << " elements, offset " << offset);
    const auto before =
        EncodedMemoryBeforeUpdate<Gradient, Parameter>(count + offset, rule, kind, kForm);
    OptimizerConfig without_decay = rule.optimizer;
    without_decay.weight_decay = 0;
    const UpdateConstants constants[] = {UpdateConstantsOf(rule.optimizer, rule.scalars),
                                         UpdateConstantsOf(without_decay, rule.scalars)};
    std::vector<UpdateRun> table;
    for (const int64_t end : runs.ends)
      table.push_back({.end = end, .set = static_cast<int64_t>(table.size() % 2)});
    const UpdateRuns update_runs{.constants = constants, .runs = table, .begin = runs.begin};
    const UpdateRule update_rule = UpdateRuleOf(rule.optimizer);
    const auto arrays_of = [&](auto& memory) {
      return PartOf(memory.Arrays(kForm), offset, count);
    };
    auto expected = before;
    ThreadTeam team(1);
    ForEachRun(arrays_of(expected), update_runs,
               [&](const UpdateArrays& part, const UpdateConstants& set) {
                 Update(team, update_rule, part, set);
               });
    for (const int64_t warps : {1, 3}) {
      auto memory = before;
      WithRule(update_rule, [&]<UpdateRule kRule>() {
        UpdateByWarps<kRule, kForm>(arrays_of(memory), update_runs, warps);
      });
      ExpectBits(memory, expected);
    }
  }
};

TEST_P(CudaEncodedUpdate, HasTheBitsOfTheCpu) {
  for (const int64_t count : {1, 3, 129, 256, 300, 1024, 1500}) {
    ExpectUpdates<float, float>(count);
    ExpectUpdates<BFloat16, BFloat16>(count);
    ExpectUpdates<Float16, Float16>(count);
    ExpectUpdates<float, BFloat16, MasterForm::kSplit>(count);
    ExpectUpdates<BFloat16, BFloat16, MasterForm::kParameter>(count);
  }
}

TEST_P(CudaEncodedUpdate, SeveralRunsHaveTheBitsOfTheCpu) {
  for (const Runs& runs : {Runs{{256, 512, 1024, 4096}}, Runs{{1024, 1536, 4096}, 768}}) {
    ExpectUpdates<BFloat16, BFloat16>(1300, runs);
    ExpectUpdates<float, BFloat16, MasterForm::kSplit>(1300, runs);
    ExpectUpdates<BFloat16, BFloat16, MasterForm::kParameter>(1300, runs);
  }
}

// States without blocks begin anywhere, and their runs end at multiples of 8.
TEST_P(CudaEncodedUpdate, StatesWithoutBlocksNeedNoAlignment) {
  for (const Encoding& encoding : std::get<1>(GetParam()).encodings) {
    if (encoding.block != 0) return;
  }
  for (const int64_t offset : {1, 4}) {
    ExpectUpdates<BFloat16, BFloat16>(700, {}, offset);
    ExpectUpdates<float, BFloat16, MasterForm::kParameter>(700, {}, offset);
    ExpectUpdates<BFloat16, BFloat16>(700, {{8, 16, 264, 1024}}, offset);
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, CudaEncodedUpdate,
                         testing::Combine(testing::ValuesIn(RulesWithEncodedStates()),
                                          testing::ValuesIn(kStateKinds)),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + std::get<1>(test.param).name;
                         });

// All warps of the kernel, one after the other: lanes, then the tree of the shuffles.
template <UpdateRule kRule, MasterForm kForm>
void SumNormsByWarps(const UpdateArrays& arrays, const UpdateRuns& runs, int64_t warps,
                     std::vector<NormSums>& sums) {
  using Work = cuda::NormWork<kRule, kForm>;
  for (int64_t warp = 0; warp < warps; ++warp) {
    const int64_t blocks = (arrays.count + kExactBlock - 1) / kExactBlock;
    const int64_t each = (blocks + warps - 1) / warps, first = warp * each;
    if (first >= blocks) break;
    Work work(arrays, runs, first);
    for (int64_t block = first; block < std::min(first + each, blocks); ++block) {
      if (!work.Has(block)) work.Enter(block);
      double parameter[Work::kLanes], direction[Work::kLanes];
      for (int lane = 0; lane < Work::kLanes; ++lane)
        work.Lane(block, lane, parameter[lane], direction[lane]);
      for (int distance = Work::kLanes / 2; distance > 0; distance /= 2) {
        for (int lane = 0; lane < distance; ++lane) {
          parameter[lane] += parameter[lane + distance];
          direction[lane] += direction[lane + distance];
        }
      }
      Add(parameter[0], sums[static_cast<size_t>(work.set)].parameter);
      Add(direction[0], sums[static_cast<size_t>(work.set)].direction);
    }
  }
}

template <class Gradient, MasterForm kForm>
void ExpectNorms(const OptimizerConfig& optimizer, int64_t count) {
  auto memory = MemoryBeforeUpdate<Gradient, BFloat16>(count);
  SplitEach(memory.master, memory.parameter, memory.low);
  const UpdateArrays arrays = memory.Part(0, count, true, kForm);
  OptimizerConfig other = optimizer;
  other.weight_decay = 0.3;
  const UpdateScalars scalars = {.step = 3, .learning_rate = 0.1, .gradient_factor = 0.3f};
  const UpdateConstants constants[] = {UpdateConstantsOf(optimizer, scalars),
                                       UpdateConstantsOf(other, scalars)};
  const UpdateRun table[] = {
      {.end = 640, .set = 1}, {.end = 704, .set = 0}, {.end = 4096, .set = 1}};
  const UpdateRuns runs = {.constants = constants, .runs = table, .begin = 512};
  const UpdateRule rule = UpdateRuleOf(optimizer);
  ThreadTeam team(1);
  std::vector<NormSums> expected(2);
  ForEachRun(arrays, runs, [&](const UpdateArrays& part, const UpdateConstants& of) {
    SumNorms(team, rule, part, of, expected[static_cast<size_t>(&of - constants)]);
  });
  for (const int64_t warps : {1, 3, 100}) {
    std::vector<NormSums> sums(2);
    if (rule == UpdateRule::kLamb) {
      SumNormsByWarps<UpdateRule::kLamb, kForm>(arrays, runs, warps, sums);
    } else {
      SumNormsByWarps<UpdateRule::kLars, kForm>(arrays, runs, warps, sums);
    }
    for (size_t set = 0; set < 2; ++set) {
      ASSERT_GT(Rounded(sums[set].parameter), 0);
      ASSERT_EQ(Rounded(sums[set].parameter), Rounded(expected[set].parameter));
      ASSERT_EQ(Rounded(sums[set].direction), Rounded(expected[set].direction));
    }
  }
}

TEST(CudaNorms, HaveTheBitsOfTheCpu) {
  for (const OptimizerType type : {OptimizerType::kLamb, OptimizerType::kLars}) {
    for (const int64_t count : {256, 1000, 1024}) {
      SCOPED_TRACE(count);
      const OptimizerConfig optimizer = {.type = type, .weight_decay = 0.1};
      ExpectNorms<float, MasterForm::kWhole>(optimizer, count);
      ExpectNorms<Float16, MasterForm::kWhole>(optimizer, count);
      ExpectNorms<BFloat16, MasterForm::kSplit>(optimizer, count);
      ExpectNorms<float, MasterForm::kParameter>(optimizer, count);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, CudaUpdate, testing::ValuesIn(kRules),
                         [](const testing::TestParamInfo<Rule>& test) { return test.param.name; });

}  // namespace
}  // namespace ebb::optim::cuda_thread_work_test
