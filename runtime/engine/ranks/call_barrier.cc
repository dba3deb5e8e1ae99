#include "ebb/runtime/engine/ranks/call_barrier.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/outcome/exchange.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/engine/ranks/engine_calls.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"
#include "ebb/sharding/fingerprint.h"

namespace ebb {

// The error of a communicator that broke, if one did.
absl::Status CallBarrier::WaitOnStepCommunicators() {
  for (EngineCommunicators::OfSteps& of : core_.communicators.of_steps()) {
    // Parts of a model that is divided over tensor make such calls by themselves.
    const bool has_parts = core_.inputs.verdict.has_value() && !core_.inputs.cuts_model;
    if (has_parts && of.axes.Has(Axis::kTensor)) continue;
    Communicator& communicator = of.communicator;
    Stream& stream = *core_.streams.all()[of.line];
    peers_.NoteCollective(communicator, communicator.Barrier(stream), core_.errors);
    const auto note = [this, &communicator] {
      peers_.NoteIfBroken(communicator, [] { return std::string(); });
    };
    if (RunsOnDevice(stream)) {  // a host stream runs it after the barrier
      note();
    } else {
      stream.Enqueue(note);
    }
  }
  for (const EngineCommunicators::OfSteps& of : core_.communicators.of_steps())
    core_.streams.all()[of.line]->WaitIdle();
  return peers_.Broken();
}

absl::Status CallBarrier::Enter(CallKind call, int64_t subject, const absl::Status& own) {
  log_.Clear();
  log_.Begin(core_.calls.NextCall());
  log_.Begin(kOfCall + static_cast<int64_t>(call));
  log_.Begin(subject);
  if (core_.errors.has_failed()) {
    peers_.Abort(core_.errors.failure());
    return Withdraw();
  }
  Verdict ranks;
  absl::Status broken = WaitOnStepCommunicators();
  if (broken.ok()) {
    ExchangeRecord record{.scopes_hash = log_.hash};
    if (!own.ok()) record.SetError(own);
    std::vector<ExchangeRecord> records(static_cast<size_t>(core_.inputs.of_calls().size()));
    broken = GatherRecords(core_.communicators.Control(core_.streams.reduce()), record, records);
    if (broken.ok()) {
      ranks =
          Conclude(records, [this](int rank) { return core_.inputs.of_calls().RankName(rank); });
    } else {
      broken = outcome_.Located(broken, log_.entries);
      core_.errors.Fail(
          absl::Status(broken.code(), absl::StrCat("the engine has failed: ", broken.message())));
    }
  } else if (!absl::IsFailedPrecondition(broken) && !absl::IsDeadlineExceeded(broken)) {
    // With repeated shards, ranks of other shard groups may not see this error, and wait for this
    // rank's record.
    core_.communicators.control().Abort(broken);
  }
  const absl::Status agreed = outcome_.ErrorOfCall(log_.entries, ranks);
  return own.ok() || core_.errors.has_failed() ? agreed : own;
}

absl::Status CallBarrier::Agree(const absl::Status& own, std::string_view about) {
  core_.calls.Note(CallKind::kAgree);
  const absl::Status settled = outcome_.AwaitVerdicts();
  return Enter(CallKind::kAgree, static_cast<int64_t>(sharding::Hasher().Add(about).hash()),
               settled.ok() ? own : settled);
}

absl::StatusOr<std::vector<std::string>> CallBarrier::Exchange(const absl::Status& own,
                                                               std::string_view about,
                                                               std::string_view text) {
  EBB_RETURN_IF_ERROR(Agree(own, about));
  return AllTexts(core_.communicators.Control(core_.streams.reduce()), text);
}

absl::Status CallBarrier::Withdraw() {
  peers_.Withdraw(core_.errors.failure());
  return core_.errors.Report();
}

}  // namespace ebb
