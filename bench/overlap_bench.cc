// How much of a step's communication and of its updates runs under compute: the 10 M parameter GPT
// on two ranks, its timeline read back. "hidden" is the share of a stream's busy time during which
// the same rank's compute stream was running a scope, not waiting.
//
//   build/release/bin/overlap_bench [DIRECTORY]     the timelines stay there; default: temporary
#include <algorithm>
#include <cstdio>
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

struct Interval {
  double begin = 0, end = 0;
};

absl::Status Train(const std::string& trace, int stage, bool early) {
  gpt::Options options;
  options.ranks = 2;
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
    auto trainer = gpt::Trainer::Create(world, options, *config.ForWorld(options.ranks), *text);
    if (!trainer.ok()) return trainer.status();
    for (int step = 0; step < 12; ++step) {
      if (auto report = (*trainer)->Step(step); !report.ok()) return report.status();
    }
    return absl::OkStatus();
  });
}

void Report(const std::string& trace, int stage, bool early) {
  std::ifstream file(trace);
  const nlohmann::json events = nlohmann::json::parse(file);
  std::map<int, std::vector<Interval>> compute;  // by rank: scopes, without their waits
  std::map<std::string, std::vector<std::pair<int, Interval>>> others;  // by operation
  for (const nlohmann::json& event : events) {
    if (event["ph"] != "X") continue;
    if (event["args"].value("step", 0) <= 2) continue;  // warming up
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
    std::printf("| %d | %s | %s | %.2f | %.0f%% |\n", stage, early ? "early" : "late",
                operation.c_str(), busy / 1e3 / 10 / 2, 100 * hidden / busy);
  }
}

}  // namespace
}  // namespace ebb::bench

int main(int argc, char** argv) {
  const std::string directory =
      argc > 1 ? argv[1] : std::filesystem::temp_directory_path().string();
  std::printf(
      "| stage | updates | operation | ms a step and rank | hidden under compute "
      "|\n|---|---|---|---|---|\n");
  for (const int stage : {1, 3}) {
    for (const bool early : {false, true}) {
      const std::string trace =
          absl::StrCat(directory, "/overlap_stage", stage, early ? "_early" : "_late", ".json");
      if (absl::Status status = ebb::bench::Train(trace, stage, early); !status.ok()) {
        std::fprintf(stderr, "%s\n", status.ToString().c_str());
        return 1;
      }
      ebb::bench::Report(trace, stage, early);
    }
  }
  return 0;
}
