// AdamW against a streaming kernel, in turns. The kernel has the same reads and writes, with one
// vector operation an array, on the same memory and threads. `of_stream` is the fraction of that
// kernel's bandwidth that AdamW reaches. Checksums of master and states: `checksum_cost` is the
// cost of summing all reads and writes in the update's own pass, as a part of its time;
// `checksum_of_adamw` is the time of summing only the writes, in a pass of its own.
//
// States of 8 and 16 bits: `speed_of_fp32` is the speed of AdamW's update, in elements per second,
// over that with fp32 states, in turns and on the same other arrays.
//
// Muon: `operations` are the multiplications and additions a second of Newton-Schulz's iteration.
//
// LAMB and LARS: `norms_of_update` is the time of the norms over that of the update.
//
//   build/release/bin/optimizer_bench --benchmark_counters_tabular=true
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "ebb/optim/block_codes.h"
#include "ebb/optim/cast.h"
#include "ebb/optim/checksum.h"
#include "ebb/optim/newton_schulz.h"
#include "ebb/optim/parameter_norms.h"
#include "ebb/optim/simd_targets.h"
#include "ebb/optim/update.h"
#include "huge_pages.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer_bench.cc"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Elements [begin, end), without the last ones that fill no vector. Max changes no value from the
// second pass on.
void Stream(const UpdateArrays& shared, int64_t begin, int64_t end) {
  const UpdateArrays arrays = shared;
  const hn::ScalableTag<float> d;
  const hn::Rebind<uint16_t, decltype(d)> halves;
  const hn::Rebind<uint32_t, decltype(d)> bits;
  const hn::Rebind<int32_t, decltype(d)> integers;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = begin; i + lanes <= end; i += lanes) {
    auto gradient = hn::Zero(d);
    if (arrays.gradient_dtype == DType::kBFloat16) {
      const auto half = hn::LoadU(halves, static_cast<const uint16_t*>(arrays.gradient) + i);
      gradient = hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(bits, half)));
    } else {
      gradient = hn::LoadU(d, static_cast<const float*>(arrays.gradient) + i);
    }
    for (float* const state :
         {arrays.states[0].numbers(), arrays.states[1].numbers()}) {  // AdamW's two
      hn::StoreU(hn::Max(hn::LoadU(d, state + i), gradient), d, state + i);
    }
    if (arrays.master_low != nullptr) {
      uint16_t* const parameter = static_cast<uint16_t*>(arrays.parameter) + i;
      uint16_t* const low = arrays.master_low + i;
      hn::StoreU(hn::Max(hn::LoadU(halves, parameter), hn::Zero(halves)), halves, parameter);
      hn::StoreU(hn::Max(hn::LoadU(halves, low), hn::Zero(halves)), halves, low);
      continue;
    }
    if (arrays.master == nullptr) {
      uint16_t* const parameter = static_cast<uint16_t*>(arrays.parameter) + i;
      hn::StoreU(hn::Max(hn::LoadU(halves, parameter), hn::Zero(halves)), halves, parameter);
      continue;
    }
    const auto master = hn::Max(hn::LoadU(d, arrays.master + i), gradient);
    hn::StoreU(master, d, arrays.master + i);
    if (arrays.parameter != nullptr) {
      const auto half = hn::BitCast(integers, hn::ShiftRight<16>(hn::BitCast(bits, master)));
      hn::StoreU(hn::DemoteTo(halves, half), halves, static_cast<uint16_t*>(arrays.parameter) + i);
    }
  }
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {
namespace {

HWY_EXPORT(Stream);

template <class Body>
double Seconds(Body body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Bytes moved per element: fp32 gradients and no copy, bf16 gradients and a bf16 copy of the
// parameters, the same with a split master, and without masters.
enum class Kind { kSingle = 28, kHalf = 30, kSplit = 26, kRounded = 22 };

template <class T>
std::span<const std::byte> Bytes(const T* array, int64_t count) {
  return std::as_bytes(std::span(array, static_cast<size_t>(count)));
}

void AdamW(benchmark::State& state, Kind kind) {
  const int64_t count = state.range(0);
  ThreadTeam team(static_cast<int>(state.range(1)));
  HugePages memory(HugePages::BytesFor(6, count));
  if (!memory.ok()) return state.SkipWithError("no memory");
  UpdateArrays arrays = {.count = count};
  if (kind == Kind::kSplit) {
    arrays.master_low = memory.Take(count, uint16_t{0});
  } else if (kind != Kind::kRounded) {
    arrays.master = memory.Take(count, 1.0f);
  }
  for (const int s : {0, 1}) arrays.states[s].codes = memory.Take(count, 0.5f);
  if (kind != Kind::kSingle) {
    arrays.gradient = memory.Take(count, BFloat16(0.25f));
    arrays.gradient_dtype = DType::kBFloat16;
    arrays.parameter = memory.Take(count, BFloat16(1.0f));
    arrays.parameter_dtype = DType::kBFloat16;
  } else {
    arrays.gradient = memory.Take(count, 0.25f);
  }
  const OptimizerConfig optimizer = {.weight_decay = 0.1};
  UpdateScalars scalars = {.learning_rate = 1e-5, .gradient_factor = 0.5f};

  std::vector<uint64_t> blocks(static_cast<size_t>(ChecksumBlocks(4 * count)));
  std::vector<uint64_t> scratch(static_cast<size_t>(UpdateChecksumScratch(count)));
  std::vector<double> adamw_seconds, stream_seconds, ratios, checksum_seconds, checksum_ratios,
      summed_ratios;
  bool summed_first = false;
  for (auto _ : state) {
    stream_seconds.push_back(Seconds([&] {
      team.Run(count, 16 * 1024, [&](int64_t begin, int64_t end) {
        HWY_DYNAMIC_DISPATCH(Stream)(arrays, begin, end);
      });
    }));
    // In turns; each of the two is first equally often.
    double summed = 0;
    const auto sum = [&] {
      summed = Seconds([&] {
        benchmark::DoNotOptimize(UpdateAndSum(team, optimizer, arrays, scalars, scratch));
      });
    };
    if (summed_first) sum();
    adamw_seconds.push_back(Seconds([&] { Update(team, optimizer, arrays, scalars); }));
    if (!summed_first) sum();
    summed_first = !summed_first;
    summed_ratios.push_back(summed / adamw_seconds.back());
    ratios.push_back(stream_seconds.back() / adamw_seconds.back());
    checksum_seconds.push_back(Seconds([&] {
      for (float* const array : {arrays.states[0].numbers(), arrays.states[1].numbers()}) {
        benchmark::DoNotOptimize(Checksum(team, Bytes(array, count), blocks));
      }
      if (kind == Kind::kSplit) {
        benchmark::DoNotOptimize(Checksum(team, Bytes(arrays.master_low, count), blocks));
      } else if (kind != Kind::kRounded) {
        benchmark::DoNotOptimize(Checksum(team, Bytes(arrays.master, count), blocks));
      }
    }));
    checksum_ratios.push_back(checksum_seconds.back() / adamw_seconds.back());
    state.SetIterationTime(adamw_seconds.back());
    ++scalars.step;
  }
  const double billions = static_cast<double>(count) * 1e-9;
  const double gigabytes = billions * static_cast<double>(kind);
  state.counters["adamw_GB/s"] = gigabytes / Median(adamw_seconds);
  state.counters["stream_GB/s"] = gigabytes / Median(stream_seconds);
  state.counters["of_stream"] =
      Median(ratios);  // of neighbours in time, because other load comes and goes
  state.counters["checksum_GB/s"] = billions *
                                    (kind == Kind::kSplit     ? 10
                                     : kind == Kind::kRounded ? 8
                                                              : 12) /
                                    Median(checksum_seconds);
  state.counters["checksum_cost"] = Median(summed_ratios) - 1;
  state.counters["checksum_of_adamw"] = Median(checksum_ratios);
}

// bf16 gradient and copy, of one parameter.
void Norms(benchmark::State& state, OptimizerType type) {
  const int64_t count = state.range(0);
  ThreadTeam team(static_cast<int>(state.range(1)));
  HugePages memory(HugePages::BytesFor(6, count));
  if (!memory.ok()) return state.SkipWithError("no memory");
  UpdateArrays arrays = {
      .gradient_dtype = DType::kBFloat16, .parameter_dtype = DType::kBFloat16, .count = count};
  arrays.master = memory.Take(count, 1.0f);
  for (const int s : {0, 1}) arrays.states[s].codes = memory.Take(count, 0.5f);
  arrays.gradient = memory.Take(count, BFloat16(0.25f));
  arrays.parameter = memory.Take(count, BFloat16(1.0f));
  const OptimizerConfig optimizer = {.type = type, .weight_decay = 0.1, .momentum = 0.9};
  UpdateScalars scalars = {.learning_rate = 1e-5, .gradient_factor = 0.5f};
  std::vector<double> norm_seconds, update_seconds, ratios;
  for (auto _ : state) {
    const UpdateConstants constants = UpdateConstantsOf(optimizer, scalars);
    NormSums sums = {};
    norm_seconds.push_back(
        Seconds([&] { SumNorms(team, UpdateRuleOf(optimizer), arrays, constants, sums); }));
    scalars.trust_ratio = TrustRatio(optimizer, Rounded(sums.parameter), Rounded(sums.direction));
    update_seconds.push_back(Seconds([&] { Update(team, optimizer, arrays, scalars); }));
    ratios.push_back(norm_seconds.back() / update_seconds.back());
    state.SetIterationTime(norm_seconds.back());
    ++scalars.step;
  }
  const int64_t bytes = 4 + 2 + 4 * StatesOfNorms(UpdateRuleOf(optimizer));
  state.counters["norms_GB/s"] = static_cast<double>(count * bytes) * 1e-9 / Median(norm_seconds);
  state.counters["norms_of_update"] = Median(ratios);
}

// bf16 gradient and copy.
void States(benchmark::State& state, Encoding first, Encoding second, bool stochastically) {
  const int64_t count = state.range(0);
  ThreadTeam team(static_cast<int>(state.range(1)));
  HugePages memory(HugePages::BytesFor(8, count));
  if (!memory.ok()) return state.SkipWithError("no memory");
  // Normal gradients, and variances that differ by some factors among neighbours, as in training.
  float* const master = memory.Take(count, 1.0f);
  BFloat16* const gradient = memory.Take(count, BFloat16());
  float* const variance = memory.Take(count, 0.0f);
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> drawn(1 << 20);
  std::generate(drawn.begin(), drawn.end(), [&] { return normal(random); });
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i) % drawn.size();
    gradient[i] = BFloat16(drawn[at]);
    variance[i] = std::exp(drawn[(at + 77) % drawn.size()]);
  }
  UpdateArrays plain = {.master = master,
                        .gradient = gradient,
                        .gradient_dtype = DType::kBFloat16,
                        .states = {{memory.Take(count, 0.0f)}, {variance}},
                        .parameter = memory.Take(count, BFloat16(1.0f)),
                        .parameter_dtype = DType::kBFloat16,
                        .count = count};
  UpdateArrays encoded = plain;
  for (const auto& [s, encoding] : {std::pair(0, first), std::pair(1, second)}) {
    encoded.states[s] = {.codes = memory.Take(count, uint16_t{0}), .encoding = encoding};
    if (encoding.block != 0)
      encoded.states[s].scales = memory.Take((count + kScaleBlock - 1) / kScaleBlock, 0.0f);
    Encode(team, plain.states[s].numbers(), encoded.states[s], count);
  }
  encoded.round_states_stochastically = stochastically;
  const OptimizerConfig optimizer = {.weight_decay = 0.1};
  UpdateScalars scalars = {.learning_rate = 1e-5, .gradient_factor = 0.5f};
  std::vector<double> plain_seconds, encoded_seconds, ratios;
  for (auto _ : state) {
    plain_seconds.push_back(Seconds([&] { Update(team, optimizer, plain, scalars); }));
    encoded_seconds.push_back(Seconds([&] { Update(team, optimizer, encoded, scalars); }));
    ratios.push_back(plain_seconds.back() / encoded_seconds.back());
    state.SetIterationTime(encoded_seconds.back());
    ++scalars.step;
  }
  state.counters["fp32_ns"] = Median(plain_seconds) / static_cast<double>(count) * 1e9;
  state.counters["encoded_ns"] = Median(encoded_seconds) / static_cast<double>(count) * 1e9;
  state.counters["speed_of_fp32"] = Median(ratios);
}

// Newton-Schulz's iteration of Muon.
void Matrices(benchmark::State& state, DType dtype) {
  const int64_t rows = state.range(0), columns = state.range(1);
  ThreadTeam team(static_cast<int>(state.range(2)));
  std::vector<float> matrix(static_cast<size_t>(rows * columns), 0);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = std::sin(static_cast<float>(i % 10007));
  std::vector<std::byte> numbers(static_cast<size_t>(rows * columns * SizeOf(dtype)));
  Cast(team, matrix.data(), DType::kFloat32, numbers.data(), dtype, rows * columns,
       Rounding::kNearest);
  const NewtonSchulzScratch scratch(rows, columns, SizeOf(dtype));
  std::vector<std::byte> memory(static_cast<size_t>(scratch.bytes));
  const NewtonSchulz rule;
  for (auto _ : state) {
    Orthogonalise(team, rule,
                  {.matrix = numbers.data(),
                   .rows = rows,
                   .columns = columns,
                   .dtype = dtype,
                   .scratch = memory.data()});
  }
  state.counters["operations"] =
      benchmark::Counter(NewtonSchulzOperations(rows, columns, rule.steps, /*halves=*/true),
                         benchmark::Counter::kIsIterationInvariantRate);
}

void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"rows", "columns", "threads"})
      ->ArgsProduct({{384, 768, 1024}, {384, 768, 1024, 3072}, {1, 2}})
      ->MeasureProcessCPUTime()
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
}

void Sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"elements", "threads"})
      ->ArgsProduct({{10'000'000, 100'000'000}, {1, 2}})
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->MinTime(2);
}

BENCHMARK_CAPTURE(AdamW, bf16_gradient_bf16_copy, Kind::kHalf)->Apply(Sizes);
BENCHMARK_CAPTURE(AdamW, bf16_gradient_split_master, Kind::kSplit)->Apply(Sizes);
BENCHMARK_CAPTURE(AdamW, bf16_gradient_stochastic_rounding, Kind::kRounded)->Apply(Sizes);
BENCHMARK_CAPTURE(AdamW, fp32_gradient, Kind::kSingle)->Apply(Sizes);
BENCHMARK_CAPTURE(States, in_8_bits, kDynamic8, kDynamicUnsigned8, false)->Apply(Sizes);
BENCHMARK_CAPTURE(States, bf16, DType::kBFloat16, DType::kBFloat16, false)->Apply(Sizes);
BENCHMARK_CAPTURE(States, bf16_stochastic, DType::kBFloat16, DType::kBFloat16, true)->Apply(Sizes);
BENCHMARK_CAPTURE(Matrices, bf16, DType::kBFloat16)->Apply(Shapes);
BENCHMARK_CAPTURE(Matrices, fp32, DType::kFloat32)->Apply(Shapes);
BENCHMARK_CAPTURE(Norms, lamb, OptimizerType::kLamb)->Apply(Sizes);
BENCHMARK_CAPTURE(Norms, lars, OptimizerType::kLars)->Apply(Sizes);

}  // namespace
}  // namespace ebb::optim

BENCHMARK_MAIN();
#endif  // HWY_ONCE
