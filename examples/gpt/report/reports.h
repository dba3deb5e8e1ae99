// The files that rank 0 writes. They are opened first, so that an error comes before training.
#pragma once

#include <optional>

#include "absl/status/statusor.h"
#include "command_line/options.h"
#include "ebb/runtime/config/config.h"
#include "report/losses_file.h"
#include "report/output_file.h"

namespace ebb::gpt {

struct Reports {
  std::optional<LossesFile> losses;
  std::optional<OutputFile> curve, summary;

  // Refuses two reports in the same place, and a report in place of an input. Also tries the
  // timeline, which the engines write.
  static absl::StatusOr<Reports> Open(const Options& options, const Config& config);
};

}  // namespace ebb::gpt
