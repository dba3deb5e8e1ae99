// How much of a step's communication and of its updates runs under compute: the 10 M parameter GPT
// on two ranks, its timeline read back.
//
//   build/release/bin/overlap_bench       the timelines stay in TMPDIR, or /tmp, as overlap_*.json
//
// For each operation, OPERATION_ms: its time a step and rank; OPERATION_hidden_percent: the share of
// it during which the same rank's compute stream was running a scope, not waiting. early: updates
// begin in backward; else after it. The time of the benchmark itself is that of a training of 12
// steps.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "options.h"
#include "trainer.h"

namespace ebb::bench {
namespace {

constexpr int kRanks = 2;
constexpr int kSteps = 12, kWarmSteps = 2;

struct Interval {
  double begin = 0, end = 0;
};

absl::Status Train(const std::string& trace, int stage, bool early) {
  gpt::Options options;
  options.shape = gpt::GptShape();
  options.ranks = kRanks;
  options.threads = 1;
  Config config;
  config.micro_batch_size = 2;
  config.zero.stage = stage;
  config.zero.param_persistence_threshold = 0;
  config.ebb.trace = trace;
  config.gradient_clipping = early ? 0 : 1;
  config.ebb.check_overflow = !early;
  const auto files = gpt::DefaultTextFiles();
  if (!files.ok()) return files.status();
  const auto text = gpt::Text::Load(*files, options.shape.context);
  if (!text.ok()) return text.status();
  return RunThreads(options.ranks, [&](World world) -> absl::Status {
    auto trainer = gpt::Trainer::Create(world, Device::Cpu(options.threads), options,
                                        *config.ForWorld(options.ranks), *text);
    if (!trainer.ok()) return trainer.status();
    for (int step = 0; step < kSteps; ++step) {
      absl::Status trained = (*trainer)->Step(step, [](const StepReport&) {});
      if (!trained.ok()) return trained;
    }
    return absl::OkStatus();
  });
}

void Count(const std::string& trace, benchmark::State& state) {
  std::ifstream file(trace);
  const nlohmann::json events = nlohmann::json::parse(file);
  std::map<int, std::vector<Interval>> compute;  // by rank: scopes, without their waits
  std::map<std::string, std::vector<std::pair<int, Interval>>> others;  // by operation
  for (const nlohmann::json& event : events) {
    if (event["ph"] != "X") continue;
    if (event["args"].value("step", 0) <= kWarmSteps) continue;
    const Interval interval{event["ts"].get<double>(),
                            event["ts"].get<double>() + event["dur"].get<double>()};
    const std::string name = event["name"];
    const std::string operation = name.substr(0, name.find(' '));
    if (event["tid"] == 0) {
      if (operation != "wait") compute[event["pid"]].push_back(interval);
    } else {
      others[operation].push_back({event["pid"].get<int>(), interval});
    }
  }
  for (const auto& [operation, spans] : others) {
    double busy = 0, hidden = 0;
    for (const auto& [rank, span] : spans) {
      busy += span.end - span.begin;
      for (const Interval& scope : compute[rank]) {
        hidden += std::max(0.0, std::min(span.end, scope.end) - std::max(span.begin, scope.begin));
      }
    }
    constexpr double kMicrosecondsToMs = 1e-3;
    state.counters[operation + "_ms"] = busy * kMicrosecondsToMs / (kSteps - kWarmSteps) / kRanks;
    state.counters[operation + "_hidden_percent"] = 100 * hidden / busy;
  }
}

void Overlap(benchmark::State& state) {
  const int stage = static_cast<int>(state.range(0));
  const bool early = state.range(1) != 0;
  const std::string trace =
      std::filesystem::temp_directory_path() /
      absl::StrCat("overlap_stage", stage, early ? "_early" : "_late", ".json");
  for (auto _ : state) {
    if (const absl::Status status = Train(trace, stage, early); !status.ok()) {
      state.SkipWithError(status.ToString().c_str());
      return;
    }
  }
  Count(trace, state);
}
BENCHMARK(Overlap)
    ->ArgNames({"stage", "early"})
    ->ArgsProduct({{1, 3}, {0, 1}})
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace ebb::bench

BENCHMARK_MAIN();
