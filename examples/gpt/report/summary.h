// The run in numbers: its first line, and at the end the tables for people and, for programs, the
// JSON of `gpt --summary`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/engine/engine.h"
#include "ops/ops.h"
#include "report/progress.h"
#include "run.h"
#include "trainer.h"

namespace ebb::gpt {

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
