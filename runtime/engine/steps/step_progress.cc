#include "ebb/runtime/engine/steps/step_progress.h"

#include <algorithm>
#include <bit>
#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/order.h"
#include "ebb/sharding/plan_facts.h"

namespace ebb {
namespace {

constexpr char kAllow[] =
    ", or allow it: StepOptions::may_leave_out for one step, \"ebb\": {\"strict\": false} for all";

std::string Times(int count) {
  return count == 1 ? "once" : absl::StrCat(count, " times");
}

}  // namespace

void MissingBackwards::Begin(const sharding::Plan& plan, int rounds) {
  plan_ = &plan;
  rounds_ = rounds;
  found_ = false;
}

void MissingBackwards::LeftOut(int begin, int end) {
  const int per_round = static_cast<int>(plan_->scopes.size()) / sharding::PlannedRounds(*plan_);
  const std::span<const sharding::PlannedScope> scopes =
      std::span(plan_->scopes).first(static_cast<size_t>(per_round));
  for (int s = begin; s < end && !found_; ++s) {
    const sharding::PlannedScope& scope = scopes[static_cast<size_t>(s % per_round)];
    const int round = s / per_round, round_begin = round * per_round,
              round_end = round_begin + per_round;
    const bool whole_round = s == round_begin && end >= round_end;
    if (!whole_round && !scope.gradients) continue;
    const auto count = [&](int from, int to) {
      return static_cast<int>(std::count_if(scopes.begin() + from - round_begin,
                                            scopes.begin() + to - round_begin,
                                            [&](const sharding::PlannedScope& other) {
                                              return other.gradients && other.unit == scope.unit;
                                            }));
    };
    found_ = true;
    round_ = round;
    unit_ = whole_round ? -1 : scope.unit;
    left_out_ = count(s, std::min(end, round_end));
    declared_ = count(round_begin, round_end);
  }
}

absl::Status MissingBackwards::Error() const {
  if (!found_) return absl::OkStatus();
  const int rounds = rounds_;
  if (unit_ < 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the step ended after ", round_, " of its ", rounds,
        " rounds, so its gradients are not complete: run all rounds (Step::rounds()), or begin the "
        "step with fewer micro-batches (StepOptions::micro_batches)",
        kAllow));
  }
  const std::string scope =
      absl::StrCat("Backward('", plan_->unit_names[static_cast<size_t>(unit_)], "')");
  const std::string where =
      rounds == 1 ? "of the step" : absl::StrCat("of round ", round_ + 1, " of ", rounds);
  const bool all = left_out_ == declared_;
  return absl::FailedPreconditionError(
      absl::StrCat(scope, " was left out ", where,
                   all ? ""
                       : absl::StrCat(" ", Times(left_out_), " of the ", declared_,
                                      " times that the model has it"),
                   ", so its gradient would ", rounds == 1 && all ? "be zero" : "lack a part",
                   ": open the scope, which may ask for no gradient, in the order of the model "
                   "(ModelSpec::forward, ",
                   sharding::kOrderDeclaredIn, ")", kAllow));
}

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
