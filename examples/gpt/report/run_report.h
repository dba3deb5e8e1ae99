// The output of a run: its first line, and at the end the tables and the files of rank 0.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "report/history.h"
#include "report/progress.h"
#include "report/summary.h"
#include "run.h"
#include "trainer.h"

namespace ebb::gpt {

// `how`: of the products and graphs, in words.
std::string Headline(Trainer& trainer, const Run& run, const std::string& how);

// Collective, after the last step.
absl::StatusOr<Summary> Summarize(const World& world, const Run& run, Trainer& trainer,
                                  const History& history);
// Rank 0's: the files, and the tables of memory and traffic.
absl::Status ReportRun(const Run& run, Trainer& trainer, const History& history,
                       const Summary& summary, Progress& progress);

}  // namespace ebb::gpt
