// The file of --losses: a CSV with a line for each step, written when the step's report comes. So a
// killed run leaves its lines, and the run that goes on adds to them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "report/history.h"
#include "report/output_file.h"

namespace ebb::gpt {

class LossesFile {
 public:
  // Changes nothing yet. kInvalidArgument: the file is there, and is something else.
  static absl::StatusOr<LossesFile> Open(const std::string& path);
  // Call it once, before the first Add. The lines of the first `finished` steps stay. Later ones
  // go, because the run repeats their steps, and so does a line that was cut off by a kill. An
  // error if the disk has no room for more lines.
  absl::Status Begin(int64_t finished);
  // The lines of earlier calls that could not be written are tried again.
  absl::Status Add(const StepRecord& record, int64_t tokens_per_step);
  absl::Status Sync();  // to the disk

  bool is_direct() const { return file_.is_direct(); }

 private:
  explicit LossesFile(OutputFile file) : file_(std::move(file)) {}
  absl::Status WritePending();

  OutputFile file_;
  std::string pending_;
};

}  // namespace ebb::gpt
