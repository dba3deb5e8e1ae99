// Answers as JSON, for programs; and a picture of their memory.
#pragma once

#include <span>
#include <string>

#include "ebb/runtime/planner/answer.h"
#include "ebb/runtime/planner/search.h"

namespace ebb::planner {

struct Advised {
  const Answer* chosen = nullptr;  // the fastest that fits, or the one asked about
  std::optional<Change> change = {}, purchase = {};
};
std::string AnswersAsJson(const Question& question, std::span<const Answer> answers,
                          const Advised& advised);

// A stacked bar of a rank's memory for each of these, a row for each tier, and a line at what there is.
std::string AnswersAsSvg(const Question& question, std::span<const Answer* const> answers);

}  // namespace ebb::planner
