// A whole run of the trainer: each rank's work, from its model to its reports.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/ebb.h"
#include "options.h"
#include "output_file.h"
#include "resident.h"
#include "text.h"

namespace ebb::gpt {

// The files that rank 0 writes at the end, opened before anything else.
struct Reports {
  std::optional<OutputFile> losses, curve, summary;

  // Refuses two reports in the same place, and a report in place of an input. Also tries the
  // timeline, which the engines write.
  static absl::StatusOr<Reports> Open(const Options& options, const Config& config);
};

struct Run {
  const Options& options;
  const Config& config;
  const Text& text;
  Reports& reports;          // rank 0's
  ResidentMemory& resident;  // of all ranks of this process
};

// True if a signal ended it early; the reports are written then, too. An error that refuses what
// the user asked for is marked (refusal.h).
absl::StatusOr<bool> RunRank(const World& world, const Run& run);

}  // namespace ebb::gpt
