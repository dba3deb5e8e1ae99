// Several answers at a time, and the fastest of some configurations. Those whose resources alone
// take too long are planned and not simulated.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ebb/runtime/planner/answer.h"

namespace ebb::planner {

// A change must make the step faster by more than this factor.
inline constexpr double kWorthIt = 1.005;

// Tokens a second; 0: it does not fit, or was not simulated.
double SpeedOf(const Answer& answer);

// Computed on several cores. An answer of 700 blocks takes 0.8 GB.
std::vector<Answer> AnswersOf(size_t count, const std::function<Answer(size_t)>& answer);

// A configuration that may be faster, and the question that it answers.
struct Try {
  std::string what;
  const Question* question = nullptr;
  Config config;
  bool recompute = false;
};
struct Tried {
  size_t number = 0;  // of the tries
  Answer answer;
};
// The fastest answer of more than `least` tokens a second; of those within half a percent the first.
std::optional<Tried> FastestOf(std::span<const Try> tries, double least);

}  // namespace ebb::planner
