// gpt --show-plan and gpt --predict: the bytes that a run would hold and move. Both need no ranks,
// no text and no disk, and work on machines that are too small for the run.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "command_line/options.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/engine/program.h"

namespace ebb::gpt {

// Memory of a rank, the bytes that a step moves between tiers and between ranks, and, if asked for,
// the operations.
std::string PlanText(const ebb::Program& program, const Config& config, int64_t parameters,
                     ShowPlan what);

// The text that `options` ask for instead of training.
absl::StatusOr<std::string> PlanningText(Options options);

}  // namespace ebb::gpt
