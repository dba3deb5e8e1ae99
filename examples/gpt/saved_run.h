// --save and --resume: the run as checkpoints of Ebb. A step's batch follows from its number, so the place in the data
// is the number of finished steps, and all random numbers follow from the seed.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "run.h"
#include "trainer.h"

namespace ebb::gpt {

// What --resume names, loaded. Collective. The steps that are finished then: 0 where "latest" finds nothing yet, or
// nothing is resumed.
absl::StatusOr<int64_t> Resume(Trainer& trainer, const Run& run);

// Into the folder of --save. Collective, between steps. The path.
absl::StatusOr<std::string> Save(Trainer& trainer, const Run& run);

}  // namespace ebb::gpt
