#include "ebb/runtime/engine/ranks/call_barrier.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/outcome/exchange.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/sharding/fingerprint.h"

namespace ebb {

// The error of a communicator that broke, if one did.
absl::Status CallBarrier::WaitOnStepCommunicators() {
  for (int lane = 1; lane < sharding::kLanes; ++lane) {
    std::optional<Communicator>& communicator =
        *with_.communicators->at(static_cast<sharding::Lane>(lane));
    if (!communicator.has_value()) continue;
    Stream& stream = lane == static_cast<int>(sharding::Lane::kGather) ? with_.streams->gather()
                                                                       : with_.streams->reduce();
    with_.peers->NoteCollective(*communicator, communicator->Barrier(stream), *with_.errors);
    const auto note = [this, &communicator] {
      with_.peers->NoteIfBroken(*communicator, [] { return std::string(); });
    };
    if (RunsOnDevice(stream)) {  // a host stream runs it after the barrier
      note();
    } else {
      stream.Enqueue(note);
    }
  }
  with_.streams->gather().WaitIdle();
  with_.streams->reduce().WaitIdle();
  return with_.peers->Broken();
}

absl::Status CallBarrier::Enter(CallKind call, int64_t subject, const absl::Status& own) {
  StepErrors& errors = *with_.errors;
  log_.Clear();
  log_.Begin(with_.calls->NextNumber());
  log_.Begin(kOfCall + static_cast<int64_t>(call));
  log_.Begin(subject);
  if (errors.has_failed()) {
    with_.peers->Abort(errors.failure());
    return Withdraw();
  }
  Verdict ranks;
  absl::Status broken = WaitOnStepCommunicators();
  if (broken.ok()) {
    ExchangeRecord record{.scopes_hash = log_.hash};
    if (!own.ok()) record.SetError(own);
    const std::span<ExchangeRecord> records = with_.control->records(0);
    broken = GatherRecords(with_.communicators->Control(with_.streams->reduce()), record, records);
    if (broken.ok()) {
      ranks = Conclude(records, [this](int rank) { return with_.messages->RankName(rank); });
    } else {
      broken = with_.messages->Located(broken, with_.peers->WhereBroken(broken), log_.entries,
                                       with_.outcome->finished_steps() + 1);
      errors.Fail(
          absl::Status(broken.code(), absl::StrCat("the engine has failed: ", broken.message())));
    }
  } else if (!absl::IsFailedPrecondition(broken) && !absl::IsDeadlineExceeded(broken)) {
    // With repeated shards, ranks of other shard groups may not see this error, and wait for this
    // rank's record.
    with_.communicators->control().Abort(broken);
  }
  const absl::Status agreed = with_.outcome->ErrorOfCall(log_.entries, ranks);
  return own.ok() || errors.has_failed() ? agreed : own;
}

absl::Status CallBarrier::Agree(const absl::Status& own, std::string_view about) {
  with_.calls->Note(CallKind::kAgree);
  const absl::Status settled = with_.outcome->AwaitVerdicts();
  return Enter(CallKind::kAgree, static_cast<int64_t>(sharding::Hasher().Add(about).hash()),
               settled.ok() ? own : settled);
}

absl::StatusOr<std::vector<std::string>> CallBarrier::Exchange(const absl::Status& own,
                                                               std::string_view about,
                                                               std::string_view text) {
  EBB_RETURN_IF_ERROR(Agree(own, about));
  return AllTexts(with_.communicators->Control(with_.streams->reduce()), text);
}

absl::Status CallBarrier::Withdraw() {
  with_.peers->Withdraw(with_.errors->failure());
  return with_.errors->Report();
}

}  // namespace ebb
