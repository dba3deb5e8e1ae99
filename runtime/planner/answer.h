// The memory and the step time of one configuration on a machine. The memory is the pools of the
// engine's own plan. The time comes from Simulate, which runs the operations that the engine
// executes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/tier.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/planner/activations.h"
#include "ebb/runtime/planner/machine.h"
#include "ebb/runtime/planner/model.h"
#include "ebb/sharding/fit/advice.h"
#include "ebb/sharding/report/bound.h"
#include "ebb/sharding/report/simulate.h"
#include "ebb/sharding/state.h"

namespace ebb::planner {

// The settings that differ between answers. The question has all others.
struct Choice {
  int stage = 0;
  Tier parameters = Tier::kDevice, states = Tier::kDevice, boundaries = Tier::kDevice;
  bool recompute = false;
  int tensor = 1;  // ranks that share each layer
  friend bool operator==(const Choice&, const Choice&) = default;
};
// The config's own words: at stage 0 its states may be on NVMe, which is refused.
Choice ChoiceOf(const Config& config, bool recompute);

struct Question {
  Model model;
  Machine machine;
  int ranks = 1;
  Config config;  // a choice replaces some of its settings
  Pass pass;      // its batch is the config's
  // Sequences of a step of all ranks, which the search cuts into micro-batches and rounds (of
  // micro-batches of `micro_batch`, if that is not 0); 0: the config's.
  int64_t sequences = 0, micro_batch = 0;
  double batch_tokens = 0;   // of which `sequences` were made; 0: not given
  double tokens = 0;         // of the whole training; 0: not known
  double price_an_hour = 0;  // of a host, in any currency; 0: not known
  // The numbers of tensor ranks that are searched, rising, and the model as one of so many has it.
  std::vector<int> widths = {1};
  std::map<int, Model> over_tensor = {};  // without 1
  bool sizes_gathers = false;             // WithGathers of each model replaces the config's sizes

  // Null: it is not known how so many tensor ranks share the model.
  const Model* model_over(int tensor) const;
  // The widths that divide the ranks. Of several those that divide a host's ranks and leave each
  // data rank a sequence.
  std::vector<int> possible_widths() const;
  int data_ranks(int tensor) const { return std::max(1, ranks / tensor); }

  // The config with the choice. If something is on NVMe, it also has folders.
  Config With(const Choice& choice) const;

  int first_width() const;  // of the possible ones: the batch is rounded for it
  // A data rank's. If they do not divide `sequences`, which is not 0: as SequencesThatCutWell.
  int64_t sequences_of_rank(int tensor) const;
  int64_t sequences_of_step() const;  // of all ranks
  int hosts() const;
  double hours_of(double tokens_per_second) const { return tokens / tokens_per_second / 3600; }
};

// The sizes of gathers with which the next unit is gathered ahead, whatever its size.
Config WithGathers(const Model& model, Config config);

inline constexpr char kNvmeFolder[] = "/local_nvme";  // if the question names no folder

using TierBytes = std::array<int64_t, kTiers>;

// The moment at which most of the device's pools is in use.
struct Peak {
  std::string moment;  // "backward of block3"
  int64_t bytes = 0;   // in use
  std::array<int64_t, kStateClasses> classes = {};
};

struct StepTime {
  sharding::Simulated simulated;
  sharding::StepBound bound;
  sharding::Amounts moved;  // by resource: bytes, or seconds of device and cores
  double tokens_per_second = 0,
         flops_per_second = 0;                  // of all ranks; of one rank, without recomputation
  double tensor_seconds = 0, tensor_bytes = 0;  // of the layers' exchanges over tensor ranks
  double of_bound() const { return simulated.seconds_per_step / bound.seconds(); }
};

struct Answer {
  Choice choice;
  Config config;
  std::string keys = "";      // what an advice changed in the config, as JSON
  absl::Status refused = {};  // the config's error; after an error there are no results
  std::vector<MemoryRow> memory = {};
  TierBytes held = {}, room = {};  // of a rank
  Activations activations = {};
  std::optional<Peak> peak = {};
  std::optional<StepTime> time = {};  // only if the answer fits

  bool fits() const;
  int64_t locked_bytes() const;  // locked RAM: beside a GPU, that of the pools
  std::string lacks() const;     // "needs 120.3 of 77.6 GiB on the GPU"; "": it fits
};

// Whether a unit is updated as soon as its gradient is reduced: nothing waits for all gradients.
bool UpdatesEarly(const Config& config);

enum class Depth { kMemory, kTime, kTimeAndPeak };
Answer AnswerFor(const Question& question, const Choice& choice, Depth depth);
// The answer for a whole config. It has no time if its resources alone (sharding::LeastSeconds)
// allow no more than `enough` tokens a second.
Answer AnswerFor(const Question& question, const Config& config, bool recompute, Depth depth,
                 double enough = 0);

// The keys to change so that an answer fits into the machine's memory and disks, from the search
// that also advises in the errors of memory caps, and the answer with them, if any fits.
struct Remedy {
  sharding::FoundAdvice advice;
  std::optional<Answer> answer = {};
};
Remedy RemedyFor(const Question& question, const Answer& lacking, Depth depth);

// "3 micro-batches of 4 sequences, all in a round".
std::string WordsOfBatch(const Config& config);

// Days until the disks of a host have had all writes that they allow. 0: not known, or none.
double DaysOfDisks(const Answer& answer, const Machine& machine, int ranks);

// Bytes that a day of steps writes to a host's disks.
double DiskBytesWrittenADay(const Answer& answer, const Machine& machine, int ranks);

// The simulated steps, for ui.perfetto.dev.
absl::Status WriteTrace(const Question& question, const Answer& answer, const std::string& path);

}  // namespace ebb::planner
