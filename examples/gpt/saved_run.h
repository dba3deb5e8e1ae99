// --save, --resume, --init-from and --export: the run as checkpoints of Ebb. A step's batch follows from its number, so the place in the data
// is the number of finished steps, and all random numbers follow from the seed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "run.h"
#include "trainer.h"

namespace ebb::gpt {

// What --resume names, loaded. Collective. The steps that are finished then: 0 where "latest" finds nothing yet, or
// nothing is resumed.
absl::StatusOr<int64_t> Resume(Trainer& trainer, const Run& run);

// Saves into the folder of --save, beside the steps that come.
class Saves {
 public:
  Saves(Trainer& trainer, const Run& run) : trainer_(trainer), run_(run) {}

  // Collective, between steps. First ends the save before.
  absl::Status Begin();
  // Collective: waits for the save that is on its way. An error is that of every rank.
  absl::Status End();
  // The path of one that has ended well since the last call; empty: none.
  std::string TakeEnded();

 private:
  Trainer& trainer_;
  const Run& run_;
  std::optional<SaveTicket> ticket_;
  bool shown_ = false;
};

// The parameters of --init-from; not in a run that went on from `resumed` steps. Collective.
absl::Status InitFrom(Trainer& trainer, const Run& run, int64_t resumed);

// The parameters into the folder of --export, for Hugging Face's GPT2LMHeadModel. Collective, between steps.
absl::Status Export(Trainer& trainer, const Run& run);
// Before training: a run that begins afresh may not save where another one has.
absl::Status CheckSave(const Options& options);
// Before training, what would fail after it.
absl::Status CheckExport(const Options& options);

}  // namespace ebb::gpt
