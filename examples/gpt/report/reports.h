// The files that rank 0 writes, and the run in numbers: its first line, and at the end the tables for
// people and, for programs, the JSON of `gpt --summary`.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "command_line/options.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/engine.h"
#include "ops/ops.h"
#include "report/output.h"
#include "report/progress.h"

namespace ebb::gpt {

class Trainer;
struct Run;

// The file of --losses: a CSV with a line for each step, written when the step's report comes. So a
// killed run leaves its lines, and the run that goes on adds to them.
class LossesFile {
 public:
  // Changes nothing yet. kInvalidArgument: the file is there, and is something else.
  static absl::StatusOr<LossesFile> Open(const std::string& path);
  // Call it once, before the first Add. The lines of the first `finished` steps stay. Later ones
  // go, because the run repeats their steps, and so does a line that was cut off by a kill. An
  // error if the disk has no room for more lines.
  absl::Status Begin(int64_t finished);
  // The lines of earlier calls that could not be written are tried again.
  absl::Status Add(const StepRecord& record, int64_t tokens_per_step);
  absl::Status Sync();  // to the disk

  bool is_direct() const { return file_.is_direct(); }

 private:
  explicit LossesFile(OutputFile file) : file_(std::move(file)) {}
  absl::Status WritePending();

  OutputFile file_;
  std::string pending_;
};

// The RAM that training was predicted to take in this process, and so in all ranks that are its
// threads, and the RAM that it took.
struct ResidentRow {
  int64_t before_bytes = 0;     // before engines existed
  int64_t predicted_bytes = 0;  // it, and the memory that the engines take afterwards
  int64_t peak_bytes = 0;
};

class ResidentMemory {
 public:
  ResidentMemory();  // made before engines exist

  // Any thread. Adds what the engine's tables predict to be in RAM (the device's memory, too, if
  // that is the CPU's), and its plan.
  void Add(const Engine& engine, DeviceKind device);
  // The row now; any thread. Nothing if the system does not report resident memory.
  std::optional<ResidentRow> Row() const;

 private:
  std::optional<int64_t> before_bytes_;
  std::atomic<int64_t> engines_bytes_{0};
};

struct Reports {
  std::optional<LossesFile> losses;
  std::optional<OutputFile> curve, summary;
  std::unique_ptr<ResidentMemory> resident = std::make_unique<ResidentMemory>();

  // Opens the files first, so that an error comes before training. Refuses two reports in the same
  // place, and a report in place of an input. Also tries the timeline, which the engines write.
  static absl::StatusOr<Reports> Open(const Options& options, const Config& config);
};

// The memory and the traffic of one rank.
struct RankUsage {
  std::vector<MemoryRow> memory;
  std::vector<CommunicationRow> communication;  // of a step
  std::vector<TrafficRow> traffic = {};         // of a step
};

struct Summary {
  std::string config_json;
  std::string version;
  int64_t parameters = 0;
  int ranks = 1;
  RankUsage usage;                              // of the rank with the highest peak of memory
  int64_t plan_operations = 0, plan_bytes = 0;  // of a step; the same on every rank
  std::optional<ResidentRow> resident = {};     // of rank 0's process; unknown: left out
  GraphUse graphs;                              // of rank 0; `most` is 0: none were wanted
  std::string products;                         // letters of --products; empty: the default
  std::string parameter_digest;
};

// `how`: of the products and graphs, in words.
std::string Headline(Trainer& trainer, const Run& run, const std::string& how);

// Collective, after the last step.
absl::StatusOr<Summary> Summarize(const World& world, const Run& run, Trainer& trainer,
                                  const History& history);
std::string SummaryJson(const Summary& summary, const History& history);
// Rank 0's: the files, and the tables of memory and traffic.
absl::Status ReportRun(const Run& run, Trainer& trainer, const History& history,
                       const Summary& summary, Progress& progress);

}  // namespace ebb::gpt
