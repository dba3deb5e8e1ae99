// All choices of a question, and what of them to take: the fastest that fits, the one change that helps most, and the
// largest model, batch or context that fits at all.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/answer.h"

namespace ebb::planner {

// Stages 0 to 3, each with the tiers that it may have parameters and states in, without recomputing, and with it and
// boundary activations on the device and in RAM. Without NVMe where the machine has no disk.
std::vector<Choice> Choices(const Question& question);

std::vector<Answer> AnswerAll(const Question& question);

// By tokens a second, of those that fit; of those within half a percent of it the first, which offloads least. Null:
// none fits.
const Answer* Fastest(std::span<const Answer> answers);

struct Change {
  std::string what;  // "zero_optimization.stage 3", "recompute", "twice the network"
  double tokens_per_second = 0;
};
// From `from`: of one setting, the micro-batch or gathers further ahead. Where `from` does not fit, the fastest that
// does; else the one that is most faster. Nothing: none is, or none fits.
std::optional<Change> BestChange(const Question& question, std::span<const Answer> answers,
                                 const Answer& from);
// Of the machine: twice what the step waits for most. Nothing: a step waits for no resource.
std::optional<Change> BestPurchase(const Question& question, const Answer& from);

enum class Quantity { kModel, kBatch, kContext };
struct Largest {
  int64_t most = 0;    // layers, sequences of a micro-batch, tokens of a sequence; 0: not even one
  Question question;   // with it
  Answer answer = {};  // of the choice that fits
};
// kModel: more layers of the same shape, of a model with equal blocks. `asked`: of this choice; none:
// of any.
absl::StatusOr<Largest> FindLargest(const Question& question, Quantity quantity,
                                    const std::optional<Choice>& asked = std::nullopt);

// Hosts that can be rented, and what the fewest of them that fit do.
struct Offer {
  Machine machine;
  double price_an_hour = 0;  // of a host, in any currency; 0: not known
  int hosts = 0;             // 1, 2, 4, ...; 0: it fits on no number of them
  std::optional<Answer> answer = {};
  // 0: not known.
  double price_of(double tokens) const;
};
void FillOffer(Question question, Offer& offer);
// Null: none fits, or none has a price.
const Offer* Cheapest(std::span<const Offer> offers);

}  // namespace ebb::planner
