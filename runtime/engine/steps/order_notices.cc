#include "ebb/runtime/engine/steps/order_notices.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {

using sharding::Match;
using sharding::PlannedScope;

void OrderNotices::Opened(const Match& match, sharding::ScopeKind kind, int unit) {
  if (match.kind == Match::kRefused) {
    return errors_.Note(absl::FailedPreconditionError(
        absl::StrCat(messages_.ScopeName(kind, unit), " ",
                     absl::string_view(match.reason.data(), match.reason.size()))));
  }
  if (match.kind == Match::kAgain) {
    return Warn(match.expected, messages_.ScopeName(kind, unit),
                "the unit is gathered for this scope alone; the unit that had its memory is "
                "gathered again afterwards");
  }
  if (match.scope == match.expected) return;
  const auto at = [this](int scope) -> const PlannedScope& {
    return progress_.PlannedScopeOf(scope);
  };
  // A head and loss that are fused into the last visit's backward, where forwards of the parts of
  // its unit are left out, too; and scopes that a trainer need not recompute.
  bool fused = at(match.scope).backward && (match.scope == match.expected + 1 ||
                                            at(match.scope).visit == at(match.expected).visit);
  for (int scope = match.expected; fused && scope < match.scope; ++scope)
    fused = at(scope).kind() == sharding::ScopeKind::kForward;
  bool kept = !OwnsBoundaries();
  for (int scope = match.expected; kept && scope < match.scope; ++scope) kept = at(scope).recompute;
  if (!fused && !kept)
    Warn(match.expected, messages_.ScopeName(kind, unit),
         "the scopes before it in the order are left out of this step");
  if (progress_.evaluation) return;
  progress_.backwards.LeftOut(match.expected, match.scope);
  CheckNothingLeftOut();
}

void OrderNotices::LeaveOutRest() {
  const int first = progress_.order.LeaveOutRest(), count = progress_.order.scopes();
  if (first == count) return;
  progress_.backwards.LeftOut(first, count);
  CheckNothingLeftOut();
  if (errors_.Peek().ok())
    Warn(first, "the end of the step", "the rest is left out, with zero gradients");
}

void OrderNotices::Warn(int expected, std::string_view what_came, std::string_view how) {
  std::string next = "the end of the step";
  if (expected < progress_.order.scopes()) {
    const PlannedScope& scope = progress_.PlannedScopeOf(expected);
    next = messages_.ScopeName(scope.kind(), scope.unit);
  }
  const std::string what =
      absl::StrCat(std::string(what_came), " where the declared order has ", next);
  if (OwnsBoundaries()) {
    errors_.Note(absl::FailedPreconditionError(
        absl::StrCat(what,
                     ": the engine keeps boundary activations (Visit::output_bytes), so every "
                     "visit must come in the declared order")));
  } else if (!warned_ && !progress_.options.may_leave_out && inputs_.rank() == 0) {
    LogWarning(absl::StrCat(inputs_.options.name, ": ", what, ": ", std::string(how), "; ",
                            sharding::kOrderDeclaredIn, " declares the order (said once)"));
  }
  warned_ = true;
}

bool OrderNotices::OwnsBoundaries() const {
  return HasBoundaries(progress_.plan().table);
}

// Before an update uses an incomplete gradient. If boundaries belong to the engine, a scope that
// was left out is an error in any step.
void OrderNotices::CheckNothingLeftOut() {
  if (!inputs_.config.ebb.strict || progress_.options.may_leave_out || OwnsBoundaries()) return;
  if (absl::Status missing = progress_.backwards.Error(); !missing.ok())
    errors_.Note(std::move(missing));
}

}  // namespace ebb
