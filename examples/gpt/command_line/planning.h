// gpt --show-plan and gpt --predict: what a run would hold and move. They need neither ranks nor
// text nor disk, nor a machine that could hold the run.
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
