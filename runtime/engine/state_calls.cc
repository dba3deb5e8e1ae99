// The calls of an engine for its state: what each of them checks and waits for before StateAccess and ParameterCopy do
// the work.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/copy_plan.h"
#include "ebb/sharding/fingerprint.h"

namespace ebb {

// Until pending updates have written state, and nothing reads it. Errors come before what they left behind.
absl::Status Executor::SettleState(StateClass what) {
  EBB_RETURN_IF_ERROR(Settle());
  EBB_RETURN_IF_ERROR(MayLook());
  if (what == StateClass::kGradient && (!progress_.alive || !progress_.reduced))
    return absl::FailedPreconditionError(
        "gradients can be read and written between Step::Reduce and Step::Finish only");
  AwaitState();
  return errors_.Tell();
}

float Executor::ScaleOf(StateClass what) const {
  return what == StateClass::kGradient ? 1.0f / control_block_->loss_scale() : 1;
}

absl::Status Executor::Read(StateClass what, Engine::Sink sink, std::string_view optimizer_state) {
  EBB_RETURN_IF_ERROR(SettleState(what));
  EBB_RETURN_IF_ERROR(state_->Read(what, optimizer_state, ScaleOf(what), sink));
  return errors_.Tell();
}

absl::Status Executor::Write(StateClass what, const Initialiser& source,
                             std::string_view optimizer_state) {
  if (progress_.alive && what != StateClass::kGradient) {
    return absl::FailedPreconditionError(
        "Write while a Step or Evaluation is alive: only gradients can be written then, between "
        "Reduce and Finish");
  }
  state_->NoteWrite(what);
  EBB_RETURN_IF_ERROR(SettleState(what));
  EBB_RETURN_IF_ERROR(state_->Write(what, optimizer_state, ScaleOf(what), source));
  return errors_.Tell();
}

absl::Status Executor::Gather(ParameterId p, StateClass what, std::span<float> whole, int root) {
  const auto fits = [&] {
    const int64_t elements = Elements(model_[p].shape);
    if ((root >= 0 && root != rank_) || std::ssize(whole) == elements) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("Gather of '", model_[p].name, "' into ",
                                                   whole.size(), " elements: it has ", elements));
  };
  return Gather(p, what, root, fits, [&](const Slice& piece, std::span<const float> values) {
    std::copy(values.begin(), values.end(), whole.begin() + piece.begin);
    return absl::OkStatus();
  });
}

absl::Status Executor::Gather(ParameterId p, StateClass what, Engine::Sink sink, int root) {
  return Gather(
      p, what, root, [] { return absl::OkStatus(); }, sink);
}

absl::Status Executor::Gather(ParameterId p, StateClass what, int root,
                              absl::FunctionRef<absl::Status()> fits, Engine::Sink sink) {
  calls_.Note(CallKind::kGather);
  if (errors_.has_failed()) return Withdraw();
  const auto check = [&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(Settle());
    EBB_RETURN_IF_ERROR(MayLook());
    if (static_cast<size_t>(p) >= model_.parameters.size())
      return absl::InvalidArgumentError(absl::StrCat("Gather of parameter ", static_cast<int>(p),
                                                     ": the model has ", model_.parameters.size()));
    if (what != StateClass::kMaster && what != StateClass::kParameter)
      return absl::InvalidArgumentError("Gather takes kMaster or kParameter");
    if (root < -1 || root >= size_)
      return absl::InvalidArgumentError(
          absl::StrCat("Gather to root ", root, " in a world of ", size_));
    return fits();
  };
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), check()));
  AwaitState();
  return state_->Gather(p, what, root, sink);
}

absl::Status Executor::SpreadWritten() {
  if (!state_->has_written()) return absl::OkStatus();
  AwaitState();
  return state_->SpreadWritten();
}

absl::Status Executor::CheckCopy(Executor& source) const {
  if (!(source.given_world_ == given_world_)) {
    return absl::FailedPreconditionError(
        absl::StrCat("CopyParametersFrom('", source.options_.name, "') into '", options_.name,
                     "': the engines are of different worlds; create both with the same World"));
  }
  if (source.progress_.alive) {
    return absl::FailedPreconditionError(absl::StrCat(
        "CopyParametersFrom('", source.options_.name,
        "') while a Step or Evaluation of that engine is alive: finish or drop it first"));
  }
  return source.errors_.Tell();
}

absl::Status Executor::CopyParametersFrom(Executor& source) {
  if (&source == this) {
    return absl::InvalidArgumentError(
        absl::StrCat("CopyParametersFrom of '", options_.name, "' from itself"));
  }
  if (progress_.alive) {
    return absl::FailedPreconditionError(
        absl::StrCat("CopyParametersFrom into '", options_.name,
                     "' while a Step or Evaluation of it is alive: finish or drop it first"));
  }
  calls_.Note(CallKind::kCopy);
  ParameterCopy copy(*source.state_, *state_, Control(), copy_mirror_, rank_);
  absl::Status own = Settle();
  own.Update(source.Settle());
  if (own.ok()) own = CheckCopy(source);
  if (own.ok()) own = copy.Prepare(device_, size_, ledger_);
  const uint64_t from =
      sharding::Hasher().Add(source.options_.name).Add(sharding::Fingerprint(source.model_)).hash();
  EBB_RETURN_IF_ERROR(Meet(Meeting::kCopyInto, static_cast<int64_t>(from), own));
  EBB_RETURN_IF_ERROR(source.Meet(Meeting::kCopyFrom, /*subject=*/0, absl::OkStatus()));

  AwaitState();
  source.AwaitState();
  absl::Status copied = copy.Run();
  if (copied.ok()) copied = source.errors_.Tell();
  state_->NoteWrite(StateClass::kMaster);
  if (copied.ok() && !suspended_) copied = SpreadWritten();
  copied = AgreeOnStatus(Control(), copied);
  if (!copied.ok()) {
    errors_.Fail(absl::Status(
        copied.code(), absl::StrCat("the engine '", options_.name,
                                    "' has failed: CopyParametersFrom ended in the middle; reload "
                                    "the model. ",
                                    copied.message())));
  }
  return errors_.Tell();
}

}  // namespace ebb
