#include "ebb/runtime/engine/outcome/error_agreement.h"

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/call_order.h"

namespace ebb {

// The error of any rank, after the exchange; the same step fails on all of them.
absl::Status ErrorAgreement::ErrorOf(const Known& known) {
  StepErrors& errors = *with_.errors;
  if (errors.has_failed()) {
    const absl::Status failure = errors.failure();
    with_.peers->Abort(failure);
    with_.peers->Withdraw(failure);
    return failure;
  }
  absl::Status status = known.error;
  // The first thing that ranks did differently. OK if there is none, or if they can no longer tell
  // each other. `broken`: why they have to.
  const auto difference = [&](const absl::Status& broken) {
    const absl::StatusOr<std::vector<std::vector<int64_t>>> logs =
        with_.peers->Logs(known.log, broken);
    return logs.ok() ? with_.messages->DifferenceOfLogs(*logs) : absl::OkStatus();
  };
  if (known.ranks.engine_failed) {
    errors.Fail(status.ok() ? known.ranks.error : status);
    return errors.failure();
  }
  // A failure after the exchange of a step that was left open fails the next step.
  const bool stands = known.is_step && !known.waits && known.complete && !known.ranks.broken;
  absl::Status broken = stands ? with_.peers->DeviceFailure() : with_.peers->Broken();
  if (broken.ok() && known.ranks.broken) broken = known.ranks.error;
  if (!broken.ok()) {
    // A rank may be waiting in another communicator for this rank.
    with_.peers->Abort(broken);
    // The others know it too, or are told now.
    const bool is_difference = CallOrder::IsDifference(broken);
    if (is_difference) with_.peers->Withdraw(broken);
    // The ranks may have opened different scopes before the collectives noticed, and that explains
    // the failure better. Some ranks may learn of any other failure a step later than others.
    const bool may_have_gone_apart =
        !is_difference && (absl::IsFailedPrecondition(broken) || absl::IsDeadlineExceeded(broken));
    const absl::Status apart = may_have_gone_apart ? difference(broken) : absl::OkStatus();
    if (status.ok()) status = apart;
    if (status.ok()) {
      status =
          with_.messages->Located(broken, with_.peers->WhereBroken(broken), known.log, known.step);
    }
    errors.Fail(
        absl::Status(status.code(), absl::StrCat("the engine has failed: ", status.message())));
    return errors.failure();
  }
  if (status.ok()) status = known.ranks.error;
  if (status.ok() && known.ranks.scopes_differ) {
    // The ranks come here at different times where the step was left open.
    status = !known.is_step || known.waits
                 ? difference(absl::OkStatus())
                 : with_.messages->DifferenceOfTrails(with_.control->records(known.parity));
    if (status.ok()) status = absl::FailedPreconditionError("ranks opened different scopes");
  }
  if (status.ok() && known.ranks.other_rates >= 0) status = with_.messages->OtherRates(known.ranks);
  return status;
}

absl::Status ErrorAgreement::ErrorOfCall(std::span<const int64_t> log, const Verdict& ranks,
                                         int64_t step) {
  StepErrors& errors = *with_.errors;
  const absl::Status own = errors.Report();
  const absl::Status agreed = ErrorOf({.error = own, .log = log, .ranks = ranks, .step = step});
  return errors.has_failed() ? errors.Report() : agreed;
}

}  // namespace ebb
