#include "ebb/runtime/engine/steps/step_progress.h"

#include <algorithm>
#include <bit>

namespace ebb {

OpenScope* StepProgress::Find(int64_t id) {
  const auto found = std::find_if(open.begin(), open.end(),
                                  [&](const OpenScope& scope) { return scope.id == id; });
  return found == open.end() ? nullptr : &*found;
}

int StepProgress::NextCode() const {
  if (order.next() >= order.scopes()) return ScopeTrail::kNothing;
  const sharding::PlannedScope& scope = PlannedScopeOf(order.next());
  return sharding::ScopeCode(scope.kind(), scope.unit);
}

void StepProgress::LogBegun() {
  log.Begin(number);
  log.Begin(evaluation ? -micro_batches : micro_batches);
  log.Begin(std::bit_cast<int64_t>(gradients.divisor));
  log.Begin(std::bit_cast<int64_t>(options.learning_rate.value_or(-1)));
  log.Begin((options.hold_updates ? 1 : 0) + (options.may_leave_out ? 2 : 0) +
            (options.rates_at_finish ? 4 : 0));
  std::copy_n(log.entries.begin(), kBegunEntries, trail.begun.begin());
}

int StepProgress::RoundInPlan(int round) const {
  const int planned = sharding::PlannedRounds(plan());
  return round + 1 == rounds ? planned - 1 : std::min(round, std::max(planned - 2, 0));
}

int StepProgress::RoundOf(size_t at) const {
  if (at == 0) return 0;
  return std::min(static_cast<int>((at - 1) / moments_of_round()), rounds - 1);
}

size_t StepProgress::MomentInPlan(size_t at) const {
  if (at == 0) return 0;
  const int round = RoundOf(at);
  return at - static_cast<size_t>(round - RoundInPlan(round)) * moments_of_round();
}

int StepProgress::ScopeOf(size_t at) const {
  const int round = RoundOf(at);
  return MomentOf(at).scope + (round - RoundInPlan(round)) * scopes_of_round();
}

size_t StepProgress::OpeningOf(int scope) const {
  const int of_round = scopes_of_round();
  const auto in_round = plan().scopes[static_cast<size_t>(scope % of_round)].open_tick;
  return static_cast<size_t>(scope / of_round) * moments_of_round() + static_cast<size_t>(in_round);
}

int StepProgress::ScopeInPlan(int scope) const {
  const int of_round = scopes_of_round(), round = scope / of_round;
  return scope - (round - RoundInPlan(round)) * of_round;
}

}  // namespace ebb
