// Answers as JSON, and a picture of their memory.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ebb/runtime/planner/answer.h"
#include "ebb/runtime/planner/batch.h"
#include "ebb/runtime/planner/offers.h"
#include "ebb/runtime/planner/small_states.h"

namespace ebb::planner {

struct Advised {
  const Answer* chosen = nullptr;  // the fastest that fits, or the one asked about
  std::optional<Change> change = {}, purchase = {};
  std::string remedy = {};               // if `chosen` does not fit: the keys to change
  std::optional<Quantity> largest = {};  // the question has the largest that fits
  int64_t most = 0;                      // Largest::most
  std::optional<LargerBatch> larger_batch = {};
  std::optional<SmallStates> small_states = {};
  std::vector<Answer> with_small_states = {};  // of all choices, if they are asked for
  std::vector<Answer> over_tensor = {};        // FastestOfOtherWidths, if it is asked for
  // The largest with states in each place, by the tier's name.
  std::vector<std::pair<Tier, int64_t>> most_of_states = {};
  std::vector<std::string> warnings = {};  // on the question
};
std::string AnswersAsJson(const Question& question, std::span<const Answer> answers,
                          const Advised& advised);

std::string OffersAsJson(const Question& question, std::span<const Offer> offers);

struct MemoryBar {
  std::string label;
  TierBytes held = {}, room = {};      // room 0: not known
  std::vector<MemoryRow> memory = {};  // kDriver: bytes of no known class
};
// One stacked bar of a rank's memory for each of `bars`, a row for each tier, and a dashed line at
// the tier's room if the row is long enough. A title may have several lines.
std::string BarsAsSvg(std::string_view title, std::string_view device,
                      std::span<const MemoryBar> bars);
std::string AnswersAsSvg(const Question& question, std::span<const Answer* const> answers);

}  // namespace ebb::planner
