// Checks that all ranks were started with the same options, because each process has a command line
// of its own. With different options the ranks would wait for each other for ever, or train a
// mixture of two models.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"
#include "run.h"

namespace ebb::gpt {

// Collective. kFailedPrecondition, on every rank, names the first option that differs and the two
// ranks. The engine compares model and configuration itself.
absl::Status AgreeOnRun(const World& world, const Run& run);

// Collective: rank 0's `text`, on every rank. The others wait for it, at most `timeout_seconds`.
absl::StatusOr<std::string> TextOfFirst(const World& world, const std::string& text,
                                        double timeout_seconds);

}  // namespace ebb::gpt
