// Answers as text of at most 100 columns.
#pragma once

#include <span>
#include <string>

#include "ebb/runtime/planner/answer.h"
#include "ebb/runtime/planner/offers.h"

namespace ebb::planner {

// A line for each stage and place of parameters and states: of `marked`, else with or without
// recomputing, whichever is faster. `all`: lines for both. `marked`: the answer that gets a star.
std::string AnswerTable(const Question& question, std::span<const Answer> answers,
                        const Answer* marked, bool all);

// Memory by class and tier, with bars; the peak; the step's time, its waits and its traffic.
std::string AnswerText(const Question& question, const Answer& answer);

// A line for each machine; the cheapest has a star.
std::string OffersText(const Question& question, std::span<const Offer> offers);

std::string WordsOf(const Choice& choice);  // "stage 3, states in RAM, blocks recomputed"
std::string WordsOf(const Answer& answer);  // also the keys that an advice changed

// The answers that have a line in AnswerTable.
std::vector<const Answer*> ShownAnswers(std::span<const Answer> answers, const Answer* marked,
                                        bool all);

}  // namespace ebb::planner
