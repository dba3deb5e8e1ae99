// The run as JSON, for programs: the file of `gpt --summary`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/engine.h"
#include "ops/ops.h"
#include "report/history.h"
#include "report/resident.h"

namespace ebb::gpt {

// The memory and the traffic of one rank.
struct RankUsage {
  std::vector<MemoryRow> memory;
  std::vector<CommunicationRow> communication;  // of a step
  std::vector<TrafficRow> traffic = {};         // of a step
};

// Collective: on every rank, the usage of the rank with the highest peak of memory. `traffic` is
// this one's.
absl::StatusOr<RankUsage> FullestRank(const World& world, Engine& engine,
                                      const std::vector<TrafficRow>& traffic);

struct Summary {
  std::string config_json;
  std::string version;
  int64_t parameters = 0;
  int ranks = 1;
  RankUsage usage;
  int64_t plan_operations = 0, plan_bytes = 0;  // of a step; the same on every rank
  std::optional<ResidentRow> resident = {};     // of rank 0's process; unknown: left out
  GraphUse graphs;                              // of rank 0; `most` is 0: none were wanted
  std::string products;                         // letters of --products; empty: the default
  std::string parameter_digest;
};
std::string SummaryJson(const Summary& summary, const History& history);

// The memory table for people: class, tier, predicted and, if counted, peak; and the sums of each
// tier. Below them the measured memory of a GPU that the driver and libraries take.
std::string MemoryTable(const std::vector<MemoryRow>& rows, bool counted = true);

}  // namespace ebb::gpt
