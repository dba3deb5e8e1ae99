// The tables for people of what a rank holds and moves: memory, traffic between tiers beside the
// smallest possible number and that of DeepSpeed's scheme, and communication. Without `counted`
// the rows are only predicted: gpt --show-plan and gpt --predict need no ranks, no text and no disk,
// and work on machines that are too small for the run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "command_line/options.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/engine/program.h"
#include "ebb/sharding/state.h"

namespace ebb::gpt {

inline constexpr double kMebi = 1024.0 * 1024.0;  // bytes of a MiB, the tables' unit

// Class, tier, predicted and counted peak; and the sums of each tier. Below them the measured
// memory of a GPU that the driver and libraries take.
std::string MemoryTable(const std::vector<MemoryRow>& rows, bool counted = true);

// A row for each of `rows`, and NVMe's sum beside both schemes. `parameters`: this rank's own.
std::string TrafficTable(const std::vector<TrafficRow>& rows, const Config& config,
                         int64_t parameters, bool counted = true);

// Bytes that a step reads and writes on NVMe, per parameter, if nothing is kept in RAM. Nothing if
// neither parameters nor states are on NVMe. Nothing either for an optimizer other than Adam or for
// fp32 compute, because the schemes do not cover these.
struct SchemeBytes {
  // Without loss, with each unit fetched twice in a step. States: two moments and the master's
  // part beyond the parameter (in bf16 16 bits, where that suffices; in fp16 all 32), both ways.
  // Parameters: in bf16 two reads and one write, which the update's own pass shares; in fp16 one
  // read, because the other visit takes its copy from the new masters.
  double least = 0;
  // Masters, moments and gradients in fp32, both ways; parameters read twice for each micro-batch
  // and written once.
  double deepspeed = 0;
};
std::optional<SchemeBytes> NvmeSchemes(const Config& config);

// Memory of a rank, the bytes that a step moves between tiers and between ranks, and, if asked for,
// the operations.
std::string PlanText(const ebb::Program& program, const Config& config, int64_t parameters,
                     ShowPlan what);

// The text that `options` ask for instead of training.
absl::StatusOr<std::string> PlanningText(Options options);

}  // namespace ebb::gpt
