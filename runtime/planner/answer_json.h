// Answers as JSON, for programs; and a picture of their memory.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "ebb/runtime/planner/answer.h"
#include "ebb/runtime/planner/search.h"

namespace ebb::planner {

struct Advised {
  const Answer* chosen = nullptr;  // the fastest that fits, or the one asked about
  std::optional<Change> change = {}, purchase = {};
  std::string remedy = {};  // of what does not fit
};
std::string AnswersAsJson(const Question& question, std::span<const Answer> answers,
                          const Advised& advised);

std::string OffersAsJson(const Question& question, std::span<const Offer> offers);

struct MemoryBar {
  std::string label;
  const Answer* answer = nullptr;  // its memory, what is held of it, and the room; 0: not known
  int64_t unclassed = 0;           // instead, bytes of the device's memory of no known class
};
// A stacked bar of a rank's memory for each of these, a row for each tier, and a dashed line at its room.
std::string BarsAsSvg(std::string_view title, std::string_view device,
                      std::span<const MemoryBar> bars);
std::string AnswersAsSvg(const Question& question, std::span<const Answer* const> answers);

}  // namespace ebb::planner
