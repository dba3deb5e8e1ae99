// Memory as the operating system sees it against the prediction: two ranks as threads, at least 1
// GiB of states a rank, each stage in a process of its own so that its peak resident set is its
// own; and stage 3 with parameters and states in RAM, or on NVMe in the folder of $EBB_BENCH_DISK.
//
//   EBB_BENCH_DISK=FOLDER build/release/bin/memory_bench
//
// predicted_MiB: of the engine's table, a rank, of what is in memory. measured_MiB: growth of the peak
// resident set, a rank. The time is that of making the engine and of three steps.
//
// PlanOfRounds: units of little memory, so that what is measured beside the table is what the engine keeps of plans:
// operation_bytes, for each operation of the plan. The rounds of a step make no difference.
#include <benchmark/benchmark.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/ebb.h"
#include "ebb/runtime/trace/resident_set.h"
#include "ebb/sharding/plan.h"

namespace ebb::bench {
namespace {

constexpr int kRanks = 2;
constexpr int kUnits = 20;
constexpr int64_t kRows = 4096, kColumns = 2048;  // 8.4 M parameters a unit

int64_t PeakBytes() {
  return ReadResidentSet().value_or(ResidentSet()).peak_bytes;
}

// `operations`: of the plan.
absl::Status Train(World world, const Config& config, int64_t rows, int64_t& predicted,
                   int64_t& operations) {
  ModelSpec model;
  std::vector<ParameterId> weights;
  for (int u = 0; u < kUnits; ++u) {
    const UnitId unit = model.AddUnit(absl::StrCat("unit", u));
    weights.push_back(model.Add(
        unit, {.name = absl::StrCat("w", u), .shape = {rows, kColumns}, .init = Constant(0.5f)}));
    model.forward.push_back({.unit = unit});
  }
  auto engine = Engine::Create(world, Device::Cpu(1), model, config);
  if (!engine.ok()) return engine.status();
  for (int n = 0; n < 3; ++n) {
    Step step = engine->BeginStep();
    for (int64_t round = 0; round < engine->config().gradient_accumulation_steps; ++round) {
      for (int u = 0; u < kUnits; ++u) step.Forward(UnitId{u}).Close();
      for (int u = kUnits; u-- > 0;) {
        BackwardScope scope = step.Backward(UnitId{u});
        WithNumbers(scope.gradient(weights[static_cast<size_t>(u)]), [](auto gradient) {
          using T = typename decltype(gradient)::value_type;
          for (T& g : gradient) g = T(static_cast<float>(g) + 1e-3f);
        });
      }
    }
    if (absl::Status status = step.Finish(); !status.ok()) return status;
  }
  if (absl::Status status = engine->Report().status(); !status.ok()) return status;
  if (world.rank() == 0) {
    operations = static_cast<int64_t>(engine->program().plan().operations.size());
    for (const MemoryRow& row : engine->memory())
      if (row.tier != Tier::kNvme) predicted += static_cast<int64_t>(row.predicted_bytes);
  }
  return absl::OkStatus();
}

// Bytes of a rank: predicted, then measured; and how many operations its plan has.
using Bytes = std::array<int64_t, 3>;

struct Run {
  int stage = 0;
  DType dtype{};
  Tier tier{};
  int64_t rows = kRows, rounds = 1;
};

absl::StatusOr<Bytes> RunStage(const Run& run) {
  const auto& [stage, dtype, tier, rows, rounds] = run;
  Config config;
  config.micro_batch_size = 1;
  config.gradient_accumulation_steps = rounds;
  if (rounds > 1) config.zero.param_persistence_threshold = 0;
  config.zero.stage = stage;
  config.compute = dtype;
  if (tier != Tier::kDevice) {
    const char* const disk = std::getenv("EBB_BENCH_DISK");
    const std::vector<std::string> paths = {disk == nullptr ? "." : disk};
    config.zero.offload_param = {.device = tier, .nvme_paths = paths, .max_in_cpu = 0};
    config.zero.offload_optimizer = {.device = tier, .nvme_paths = paths};
  }
  const int64_t before = PeakBytes();
  int64_t predicted = 0, operations = 0;
  const absl::Status status = RunThreads(
      kRanks, [&](World world) { return Train(world, config, run.rows, predicted, operations); });
  if (!status.ok()) return status;
  return Bytes{predicted, (PeakBytes() - before) / kRanks, operations};
}

// RunStage in a process of its own, which this one, without threads, is forked to.
bool RunStageForked(const Run& run, Bytes& bytes) {
  int ends[2];
  if (pipe(ends) != 0) return false;
  const pid_t child = fork();
  if (child == 0) {
    const absl::StatusOr<Bytes> result = RunStage(run);
    if (!result.ok()) std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
    _exit(result.ok() && write(ends[1], &*result, sizeof(Bytes)) == sizeof(Bytes) ? 0 : 1);
  }
  close(ends[1]);
  const bool came = read(ends[0], &bytes, sizeof(bytes)) == sizeof(bytes);
  close(ends[0]);
  if (child > 0) waitpid(child, nullptr, 0);
  return came;
}

void PeakResidentSet(benchmark::State& state) {
  const int stage = static_cast<int>(state.range(0));
  const DType dtype = state.range(1) == 32 ? DType::kFloat32 : DType::kBFloat16;
  Bytes bytes = {};
  for (auto _ : state) {
    if (!RunStageForked({.stage = stage, .dtype = dtype, .tier = static_cast<Tier>(state.range(2))},
                        bytes)) {
      state.SkipWithError("the stage's process failed");
      return;
    }
  }
  const double predicted = static_cast<double>(bytes[0]), measured = static_cast<double>(bytes[1]);
  state.counters["predicted_MiB"] = predicted / (1 << 20);
  state.counters["measured_MiB"] = measured / (1 << 20);
  state.counters["difference_percent"] = 100 * (measured / predicted - 1);
}
BENCHMARK(PeakResidentSet)
    ->ArgNames({"stage", "bits", "tier"})
    ->ArgsProduct({{0, 1, 2, 3}, {16, 32}, {static_cast<int>(Tier::kDevice)}})
    ->ArgsProduct({{3}, {16, 32}, {static_cast<int>(Tier::kCpu), static_cast<int>(Tier::kNvme)}})
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

void PlanOfRounds(benchmark::State& state) {
  Bytes bytes = {};
  for (auto _ : state) {
    if (!RunStageForked({.stage = 3,
                         .dtype = DType::kBFloat16,
                         .tier = static_cast<Tier>(state.range(1)),
                         .rows = 1,
                         .rounds = state.range(0)},
                        bytes)) {
      state.SkipWithError("the process failed");
      return;
    }
  }
  const double beside = static_cast<double>(bytes[1] - bytes[0]);
  state.counters["predicted_MiB"] = static_cast<double>(bytes[0]) / (1 << 20);
  state.counters["measured_MiB"] = static_cast<double>(bytes[1]) / (1 << 20);
  state.counters["operations"] = static_cast<double>(bytes[2]);
  state.counters["operation_bytes"] = beside / static_cast<double>(bytes[2]);
}
BENCHMARK(PlanOfRounds)
    ->ArgNames({"rounds", "tier"})
    ->ArgsProduct({{16, 256, 4096},
                   {static_cast<int>(Tier::kDevice), static_cast<int>(Tier::kCpu)}})
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace ebb::bench

BENCHMARK_MAIN();
