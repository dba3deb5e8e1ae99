// The engine's cost over a bare trainer: world 1, stage 3, the 10 M parameter GPT on the CPU, and
// GPT-2's shapes on a GPU if there is one. Both take their steps in turns within one run, so the
// ratio holds on a noisy machine. Both must end with the same masters, bit for bit. The engine's
// updates end within its step, so that the bare trainer's steps do not pay for them.
//
//   build/release/bin/engine_bench      EBB_BENCH_TEXT=FILE: other text than gpt's default
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "bare_trainer.h"
#include "command_line/options.h"
#include "trainer.h"

namespace ebb::bench {
namespace {

constexpr char kConfig[] = R"({
  "train_micro_batch_size_per_gpu": 4,
  "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 3},
  "ebb": {"asynchronous_step": "off"},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01}}
})";

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

template <class F>
double Seconds(F&& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Runs each step to its end, as the bare trainer does.
void RunStep(gpt::Trainer& trainer, int64_t step) {
  const auto ignore = [](const StepReport&) {};
  (void)trainer.Step(step, ignore);
  (void)trainer.AwaitReport(ignore);
}

absl::StatusOr<gpt::Text> LoadText(int64_t context) {
  if (const char* const file = std::getenv("EBB_BENCH_TEXT"))
    return gpt::Text::Load(std::vector<std::string>{file}, context);
  auto files = gpt::DefaultTextFiles();
  if (!files.ok()) return files.status();
  return gpt::Text::Load(*files, context);
}

// Compares slice by slice, because whole copies of a large model's masters would take longer than
// the steps.
absl::Status CompareMasters(Engine& engine, BareTrainer& bare) {
  int64_t compared = 0;
  const auto compare = [&](const Slice& slice, std::span<const float> values) -> absl::Status {
    const auto expected = bare.Masters(slice);
    if (!expected.ok()) return expected.status();
    if (std::memcmp(values.data(), expected->data(), values.size_bytes()) != 0) {
      return absl::DataLossError(
          absl::StrCat("the engine and the bare trainer ended with different masters of ",
                       std::string(slice.name)));
    }
    compared += static_cast<int64_t>(values.size());
    return absl::OkStatus();
  };
  if (absl::Status read = engine.Read(StateClass::kMaster, compare); !read.ok()) return read;
  if (compared == bare.elements()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("the engine has masters of ", compared,
                                          " elements, the bare trainer of ", bare.elements()));
}

void Compare(benchmark::State& state, const Device& device, DType compute,
             const gpt::GptShape& shape, int64_t sequences) {
  Config config = *Config::FromJson(kConfig);
  config.compute = compute;
  config.micro_batch_size = sequences;
  gpt::Options options;
  options.ranks = 1;
  options.shape = shape;
  // The bare trainer's products. Measured products differ from run to run, and so would the bits.
  options.products = gpt::kDefaultProducts;
  const auto text = LoadText(options.shape.context);
  if (!text.ok()) return state.SkipWithError(text.status().ToString().c_str());

  absl::StatusOr<std::unique_ptr<gpt::Trainer>> trainer =
      gpt::Trainer::Create(World::Single(), device, options, *config.ForWorld(1), *text);
  if (!trainer.ok()) return state.SkipWithError(trainer.status().ToString().c_str());
  absl::StatusOr<std::unique_ptr<BareTrainer>> bare =
      BareTrainer::Create(device,
                          {.shape = options.shape,
                           .compute = config.compute,
                           .sequences = config.micro_batch_size,
                           .seed = options.seed,
                           .optimizer = config.optimizer,
                           .gradient_clipping = config.gradient_clipping},
                          *text);
  if (!bare.ok()) return state.SkipWithError(bare.status().ToString().c_str());
  std::vector<double> engine_seconds, bare_seconds, ratios;
  int64_t step = 0;
  for (auto _ : state) {
    double engine = 0, other = 0;
    const auto run_engine = [&] { engine = Seconds([&] { RunStep(**trainer, step); }); };
    const auto run_bare = [&] { other = Seconds([&] { (void)(*bare)->Step(step); }); };
    // The order of the two changes from step to step.
    step % 2 == 0 ? (run_engine(), run_bare()) : (run_bare(), run_engine());
    if (step++ < 2) continue;
    engine_seconds.push_back(engine);
    bare_seconds.push_back(other);
    ratios.push_back(engine / other);
  }
  if (const absl::Status same = CompareMasters((*trainer)->engine(), **bare); !same.ok())
    return state.SkipWithError(same.ToString().c_str());
  if (ratios.empty()) return state.SkipWithError("too few iterations: at least 3 are needed");
  state.counters["engine_ms"] = Median(engine_seconds) * 1e3;
  state.counters["bare_ms"] = Median(bare_seconds) * 1e3;
  state.counters["ratio"] = Median(ratios);
}

void EngineOverBareTrainer(benchmark::State& state) {
  Compare(state, Device::Cpu(static_cast<int>(state.range(1))),
          state.range(0) == 32 ? DType::kFloat32 : DType::kBFloat16, gpt::GptShape(), 4);
}
BENCHMARK(EngineOverBareTrainer)
    ->ArgNames({"bits", "threads"})
    ->ArgsProduct({{32, 16}, {1, 2}})
    ->Iterations(32)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

// GPT-2 with 124 M and 1.5 B parameters (Radford et al. 2019, table 2), sequences of 1,024.
void EngineOverBareTrainerOnGpu(benchmark::State& state) {
  absl::StatusOr<Device> device = Device::Cuda();
  if (!device.ok()) return state.SkipWithError(device.status().ToString().c_str());
  Compare(state, *device, DType::kBFloat16,
          {.layers = state.range(0),
           .heads = state.range(1),
           .width = 64 * state.range(1),
           .context = 1024,
           .vocabulary = 50'304},
          state.range(2));
}
// bench/gpu_suite.sh runs the two cases one by one, by the names of these arguments.
BENCHMARK(EngineOverBareTrainerOnGpu)
    ->ArgNames({"layers", "heads", "sequences"})
    ->Args({12, 12, 16})
    ->Args({48, 25, 4})
    ->Iterations(12)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace ebb::bench

BENCHMARK_MAIN();
