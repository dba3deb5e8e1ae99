// A whole run of the trainer: the work of each rank, from its model to its reports.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "command_line/options.h"
#include "data/text.h"
#include "ebb/ebb.h"
#include "report/reports.h"

namespace ebb::gpt {

struct Run {
  const Options& options;
  const Config& config;
  const Text& text;
  Reports& reports;  // the files are rank 0's
};

// Why a signal ended it early ("SIGTERM in training, after step 20 of 400"); the reports are
// written then, too. Empty: none did. An error that refuses what the user asked for is marked
// (refusal.h).
absl::StatusOr<std::string> RunRank(const World& world, const Run& run);

}  // namespace ebb::gpt
