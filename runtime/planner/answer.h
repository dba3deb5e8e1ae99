// What one configuration would need and take on a machine: the pools of the engine's own plan, and the step that
// Simulate runs of the very instructions that the engine executes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/tier.h"
#include "ebb/runtime/planner/activations.h"
#include "ebb/runtime/planner/machine.h"
#include "ebb/runtime/planner/model.h"
#include "ebb/sharding/report/simulate.h"
#include "ebb/sharding/state.h"

namespace ebb::planner {

// What is chosen; all else is the question's.
struct Choice {
  int stage = 0;
  Tier parameters = Tier::kDevice, states = Tier::kDevice, boundaries = Tier::kDevice;
  bool recompute = false;
  friend bool operator==(const Choice&, const Choice&) = default;
};
Choice ChoiceOf(const Config& config, bool recompute);

struct Question {
  Model model;
  Machine machine;
  int ranks = 1;
  Config config;  // choices are made in it
  Pass pass;      // its batch is the config's

  // The config with the choice, and with folders where something is on NVMe.
  Config With(const Choice& choice) const;
};

inline constexpr char kNvmeFolder[] = "/local_nvme";  // where the question names none

using TierBytes = std::array<int64_t, kTiers>;

// When most of the device's memory is in use, of what the pools hold.
struct Peak {
  std::string moment;  // "backward of block3"
  int64_t bytes = 0;   // in use
  std::array<int64_t, kStateClasses> classes = {};
};

struct StepTime {
  sharding::Simulated simulated;
  sharding::Amounts moved;  // by resource: bytes, or seconds of device and cores
  double tokens_per_second = 0,
         flops_per_second = 0;  // of all ranks; of one, without what is recomputed
};

struct Answer {
  Choice choice;
  Config config;
  absl::Status refused = {};  // the config's error: then there is nothing else
  std::vector<MemoryRow> memory = {};
  TierBytes held = {}, room = {};  // of a rank
  Activations activations = {};
  std::optional<Peak> peak = {};
  std::optional<StepTime> time = {};  // of what fits

  bool fits() const;
  int64_t locked_bytes() const;  // of RAM, beside a GPU: that of pools
  std::string lacks() const;     // "needs 120.3 of 77.6 GiB on the GPU"; "": it fits
};

enum class Depth { kMemory, kTime, kTimeAndPeak };
Answer AnswerFor(const Question& question, const Choice& choice, Depth depth);
// The same of a config that is taken as it is.
Answer AnswerFor(const Question& question, const Config& config, bool recompute, Depth depth);

// What to change so that an answer that does not fit does: found as in the errors of caps (ebb/sharding/advice.h).
std::string RemedyFor(const Question& question, const Answer& answer);

// Bytes that a host's disks take in a day of steps.
double DiskBytesWrittenADay(const Answer& answer, const Machine& machine, int ranks);

// The simulated steps, for ui.perfetto.dev.
absl::Status WriteTrace(const Question& question, const Answer& answer, const std::string& path);

}  // namespace ebb::planner
