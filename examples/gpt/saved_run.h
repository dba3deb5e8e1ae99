// --save, --resume, --init-from and --export: the run as checkpoints of Ebb. A step's batch follows
// from its number, so the place in the data is the number of finished steps, and all random numbers
// follow from the seed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "report/progress.h"
#include "run.h"
#include "trainer.h"

namespace ebb::gpt {

// Loads what --resume names. Collective. Returns the steps that are finished then: 0 if "latest"
// finds nothing yet, or if nothing is resumed.
absl::StatusOr<int64_t> Resume(Trainer& trainer, const Run& run);

// Whether --resume names --save's folder, or a checkpoint in it.
bool ResumesItsFolder(const Run& run);

// Before training: no checkpoint of another run may lie in the folder of --save at a step that this
// run can reach, because its save would be refused. Collective.
absl::Status CheckSaves(Trainer& trainer, const Run& run);

// Saves into the folder of --save, during the following steps.
class Saves {
 public:
  // `progress` says which saves have succeeded; null: nothing does.
  Saves(Trainer& trainer, const Run& run, Progress* progress)
      : trainer_(trainer), run_(run), progress_(progress) {}

  // Collective, between steps. Ends an earlier save first.
  absl::Status Begin();
  // Collective: waits for the running save. An error is the same on every rank.
  absl::Status End();
  // Says that the running save has ended, if it has.
  void Show();

 private:
  Trainer& trainer_;
  const Run& run_;
  Progress* const progress_;
  std::optional<SaveTicket> ticket_;
  bool shown_ = false;
};

// Reads the parameters of --init-from, unless this run was resumed (`resumed` is not 0).
// Collective.
absl::Status InitFrom(Trainer& trainer, const Run& run, int64_t resumed);

// Writes the parameters into the folder of --export, for Hugging Face's GPT2LMHeadModel.
// Collective, between steps.
absl::Status Export(Trainer& trainer, const Run& run);
// Before training: a new run may not save where another run has saved.
absl::Status CheckSave(const Options& options);
// Before training: checks what would otherwise fail after it.
absl::Status CheckExport(const Options& options);

}  // namespace ebb::gpt
