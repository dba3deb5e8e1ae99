#include "ebb/runtime/engine/missing_backwards.h"

#include "absl/strings/str_cat.h"

namespace ebb {
namespace {

constexpr char kAllow[] =
    ", or allow it: StepOptions::may_leave_out for one step, \"ebb\": {\"strict\": false} for all";

std::string Times(int count) {
  return count == 1 ? "once" : absl::StrCat(count, " times");
}

}  // namespace

void MissingBackwards::Begin(const sharding::Plan& plan) {
  plan_ = &plan;
  declared_.assign(plan.layout.units.size(), 0);
  came_.assign(plan.layout.units.size(), 0);
  for (const sharding::PlannedScope& scope : plan.scopes) {
    if (scope.round > 0) break;
    if (scope.backward && plan.decisions.trainable[static_cast<size_t>(scope.unit)])
      ++declared_[static_cast<size_t>(scope.unit)];
  }
  round_ = 0;
  any_ = found_ = false;
}

void MissingBackwards::Opened(bool backward, int unit, int round) {
  while (round_ < round) EndRound();
  any_ = true;
  if (backward) ++came_[static_cast<size_t>(unit)];
}

void MissingBackwards::End() {
  while (round_ < plan_->decisions.rounds) EndRound();
}

void MissingBackwards::EndRound() {
  for (const sharding::PlannedScope& scope : plan_->scopes) {
    if (found_ || scope.round > 0) break;
    const size_t unit = static_cast<size_t>(scope.unit);
    if (!scope.backward || came_[unit] >= declared_[unit]) continue;
    found_ = true;
    missing_round_ = round_;
    missing_unit_ = any_ ? scope.unit : -1;
    missing_came_ = came_[unit];
  }
  came_.assign(came_.size(), 0);
  any_ = false;
  ++round_;
}

absl::Status MissingBackwards::Error() const {
  if (!found_) return absl::OkStatus();
  const int rounds = plan_->decisions.rounds;
  if (missing_unit_ < 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the step ended after ", missing_round_, " of its ", rounds,
        " rounds, so its gradients lack the rest: run them all (Step::rounds()), or begin the step "
        "with as many micro-batches as there are (StepOptions::micro_batches)",
        kAllow));
  }
  const size_t unit = static_cast<size_t>(missing_unit_);
  const std::string scope = absl::StrCat("Backward('", plan_->unit_names[unit], "')");
  const std::string where =
      rounds == 1 ? "of the step" : absl::StrCat("of round ", missing_round_ + 1, " of ", rounds);
  const std::string what =
      missing_came_ == 0
          ? absl::StrCat(scope, " was left out ", where)
          : absl::StrCat(scope, " ", where, " came ", Times(missing_came_), ", but ",
                         "ModelSpec::forward visits the unit ", Times(declared_[unit]));
  return absl::FailedPreconditionError(
      absl::StrCat(what, ", so its gradient would ",
                   rounds == 1 && missing_came_ == 0 ? "be zero" : "lack a part",
                   ": open the scope, which may ask for no gradient", kAllow));
}

}  // namespace ebb
