// Searches all choices of a question for the fastest that fits, the one change that helps most, and
// the largest model, batch or context that fits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/answer.h"

namespace ebb::planner {

// Stages 0 to 3, each with all tiers that it allows for parameters and states: without recomputing,
// and with recomputing and boundary activations on the device or in RAM; of several micro-batches
// also on NVMe, because a round of all keeps as many. NVMe only if the machine has a disk. Each with
// all possible widths.
std::vector<Choice> Choices(const Question& question);

// Updates that are early, and take a step's only round, need no gradients in RAM: the first of the
// device, RAM and NVMe that fits. Others: as the config says.
struct PlacedGradients {
  Config config;
  std::optional<bool> fits;  // none: no place was tried
};
PlacedGradients WithGradients(const Question& question, Config config, bool recompute);

// An answer for each choice; if the question has sequences, that of AnswerForBatch.
std::vector<Answer> AnswerAll(const Question& question);

// The answer with most tokens a second of those that fit. Among answers within half a percent of
// it, the first, because it offloads least. Null: none fits.
const Answer* Fastest(std::span<const Answer> answers);

struct Change {
  std::string what;  // "zero_optimization.stage 3", "recompute", "twice the network"
  double tokens_per_second = 0;
};
// The best change of one setting of `from`'s config, of the micro-batch or of gathers further
// ahead: the fastest answer that fits. Nothing: no change is faster, or none fits.
std::optional<Change> BestChange(const Question& question, const Answer& from);
// `from` with the memory that it leaves free, if that is faster: the GPU's has gathers further ahead
// (ebb.prefetch_depth) and states that it updates (offload_optimizer.ratio), or gradients go to RAM
// for more of these; RAM has a part of what is on NVMe, parameters first (max_in_cpu,
// ebb.host_memory). An eighth of what is free stays free.
std::optional<Answer> WithFreeMemory(const Question& question, const Answer& from, Depth depth);
// A machine with twice the resource that the step waits for most. Nothing: the step waits for no
// resource.
std::optional<Change> BestPurchase(const Question& question, const Answer& from);

enum class Quantity { kModel, kBatch, kContext };
struct QuantityFacts {
  const char *word, *unit;
  int64_t most;  // that is planned
};
inline constexpr QuantityFacts kQuantities[] = {{"model", "layers", kUnitsMax - 2},
                                                {"batch", "sequences a micro-batch", 1 << 20},
                                                {"context", "tokens a sequence", 1 << 28}};
constexpr const QuantityFacts& FactsOf(Quantity quantity) {
  return kQuantities[static_cast<int>(quantity)];
}
struct Largest {
  int64_t most = 0;       // in the quantity's unit; 0: not even one
  bool is_limit = false;  // more may fit, but no more are planned
  Question question;      // with `most` of them, or with one
  Answer answer = {};     // of the choice that fits, or of the one that needs least memory
  // If no choice was asked for: the largest with states in each place. `most` is one of them.
  std::vector<std::pair<Tier, int64_t>> with_states = {};
};
// kModel: more layers of the same shape; the model has equal blocks. `asked`: the choice that must
// fit; none: any choice, or what RemedyFor makes of one.
absl::StatusOr<Largest> FindLargest(const Question& question, Quantity quantity,
                                    const std::optional<Choice>& asked = std::nullopt);

// A line about what other programs do with a model of this size; "": nothing else.
std::string OtherParallelism(const Question& question);

}  // namespace ebb::planner
