#include "ebb/runtime/planner/bound_text.h"

#include "absl/strings/str_format.h"

namespace ebb::planner {

std::string BoundText(const Answer& answer) {
  if (!answer.time || answer.time->bound.seconds() <= 0) return "";
  const sharding::StepBound& bound = answer.time->bound;
  std::string text = absl::StrFormat(
      "No order of these operations takes less than %.3g s, which is its %s: the step takes %.2f "
      "of it\n",
      bound.seconds(), bound.line(), answer.time->of_bound());
  for (const auto& [name, seconds] : bound.lines()) {
    if (seconds < 0.001 * bound.seconds()) break;
    absl::StrAppendFormat(&text, "  %-20s %8.3g s", name, seconds);
    if (name == "order") {
      absl::StrAppendFormat(&text, "  %s: %s",
                            bound.awaits_verdict
                                ? "no update before the norm of the whole step"
                                : "no update before its gradient or after its forward",
                            bound.order_word());
    }
    text += "\n";
  }
  return text;
}

}  // namespace ebb::planner
