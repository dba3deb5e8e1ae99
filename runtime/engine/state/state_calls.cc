#include "ebb/runtime/engine/state/state_calls.h"

#include <algorithm>
#include <bit>
#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/engine/state/parameter_copy.h"
#include "ebb/sharding/fingerprint.h"

namespace ebb {
namespace {

// A hash of the state, which is equal on all ranks that set the same one.
int64_t SubjectOf(const TrainingState& state) {
  const optim::LossScalerState& scaler = state.loss_scaler;
  sharding::Hasher hasher;
  hasher.Add(state.finished_steps).Add(state.applied_steps).Add(state.skipped_steps);
  hasher.Add(std::bit_cast<int64_t>(scaler.scale));
  hasher.Add(scaler.clean_steps).Add(scaler.hysteresis_left);
  return static_cast<int64_t>(hasher.hash());
}

}  // namespace

// Until pending updates have written state, and nothing reads it. Returns earlier errors first.
absl::Status StateCalls::AwaitState(StateClass what) {
  EBB_RETURN_IF_ERROR(with_.outcome->AwaitVerdicts());
  EBB_RETURN_IF_ERROR(with_.runner->MayLook());
  if (what == StateClass::kGradient &&
      (!with_.progress->alive || !with_.progress->gradients.are_final))
    return absl::FailedPreconditionError(
        "gradients can be read and written between Step::Reduce and Step::Finish only");
  with_.runner->AwaitState();
  return with_.errors->Report();
}

float StateCalls::ScaleOf(StateClass what) const {
  return what == StateClass::kGradient ? 1.0f / with_.control->loss_scale() : 1;
}

absl::Status StateCalls::Read(StateClass what, Engine::Sink sink,
                              std::string_view optimizer_state) {
  EBB_RETURN_IF_ERROR(AwaitState(what));
  EBB_RETURN_IF_ERROR(with_.state->Read(what, optimizer_state, ScaleOf(what), sink));
  return with_.errors->Report();
}

absl::Status StateCalls::Write(StateClass what, const Initialiser& source,
                               std::string_view optimizer_state) {
  if (with_.progress->alive && what != StateClass::kGradient) {
    return absl::FailedPreconditionError(
        "Write while a Step or Evaluation is alive: only gradients can be written then, between "
        "Reduce and Finish");
  }
  with_.state->NoteWrite(what);
  EBB_RETURN_IF_ERROR(AwaitState(what));
  EBB_RETURN_IF_ERROR(with_.state->Write(what, optimizer_state, ScaleOf(what), source));
  return with_.errors->Report();
}

absl::Status StateCalls::Gather(ParameterId p, StateClass what, std::span<float> whole, int root) {
  const auto fits = [&] {
    const int64_t elements = Elements(with_.inputs->model[p].shape);
    if ((root >= 0 && root != with_.inputs->rank()) || std::ssize(whole) == elements)
      return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("Gather of '", with_.inputs->model[p].name,
                                                   "' into ", whole.size(), " elements: it has ",
                                                   elements));
  };
  return Gather(p, what, root, fits, [&](const Slice& piece, std::span<const float> values) {
    std::copy(values.begin(), values.end(), whole.begin() + piece.begin);
    return absl::OkStatus();
  });
}

absl::Status StateCalls::Gather(ParameterId p, StateClass what, Engine::Sink sink, int root) {
  return Gather(
      p, what, root, [] { return absl::OkStatus(); }, sink);
}

absl::Status StateCalls::Gather(ParameterId p, StateClass what, int root,
                                absl::FunctionRef<absl::Status()> fits, Engine::Sink sink) {
  with_.calls->Note(CallKind::kGather);
  if (with_.errors->has_failed()) return with_.barrier->Withdraw();
  const auto check = [&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(with_.outcome->AwaitVerdicts());
    EBB_RETURN_IF_ERROR(with_.runner->MayLook());
    if (static_cast<size_t>(p) >= with_.inputs->model.parameters.size())
      return absl::InvalidArgumentError(absl::StrCat("Gather of parameter ", static_cast<int>(p),
                                                     ": the model has ",
                                                     with_.inputs->model.parameters.size()));
    if (what != StateClass::kMaster && what != StateClass::kParameter)
      return absl::InvalidArgumentError("Gather takes kMaster or kParameter");
    if (root < -1 || root >= with_.inputs->size())
      return absl::InvalidArgumentError(
          absl::StrCat("Gather to root ", root, " in a world of ", with_.inputs->size()));
    return fits();
  };
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), check()));
  with_.runner->AwaitState();
  return with_.state->Gather(p, what, root, sink);
}

absl::StatusOr<std::shared_future<absl::Status>> StateCalls::ReadAsync(StateReader reader) {
  with_.calls->Note(CallKind::kReadAsync);
  if (with_.errors->has_failed()) return with_.barrier->Withdraw();
  absl::Status own = with_.outcome->AwaitVerdicts();
  if (own.ok() && with_.suspension->suspended())
    own = absl::FailedPreconditionError(
        "a suspended engine cannot save (ReadAsync): call Resume first");
  AwaitReads();
  const absl::Status prepared = with_.reads->Prepare(reader.beside_steps);
  EBB_RETURN_IF_ERROR(
      with_.barrier->Enter(CallKind::kReadAsync, /*subject=*/0, own.ok() ? prepared : own));
  const bool in_step = reader.may_begin_in_step && with_.reads->MayBeginInStep();
  std::shared_future<absl::Status> over = with_.reads->Take(std::move(reader));
  if (!in_step) with_.runner->Drain();
  with_.runner->AfterCarried([reads = with_.reads] { reads->Begin(); });
  return over;
}

void StateCalls::AwaitReads() {
  (void)BeginReads();
  with_.reads->Await();
}

absl::Status StateCalls::BeginReads() {
  if (!with_.runner->has_after_carried()) return absl::OkStatus();
  if (with_.progress->alive) {
    return absl::FailedPreconditionError(
        "this step still has to run updates of the step before, so it cannot wait for a save: wait "
        "between steps");
  }
  with_.runner->Drain();
  return absl::OkStatus();
}

absl::StatusOr<TrainingState> StateCalls::training_state() {
  EBB_RETURN_IF_ERROR(with_.outcome->AwaitVerdicts());
  return with_.outcome->training_state();
}

absl::Status StateCalls::SetTrainingState(const TrainingState& state) {
  if (with_.progress->alive) {
    return absl::FailedPreconditionError(
        "SetTrainingState while a Step or Evaluation of the engine is alive: finish or drop it "
        "first");
  }
  with_.calls->Note(CallKind::kSetTrainingState);
  absl::Status own = with_.outcome->AwaitVerdicts();
  if (own.ok()) own = Validate(state);
  // A carried update is of the steps that were counted so far.
  with_.runner->Drain();
  with_.streams->WaitIdle();
  EBB_RETURN_IF_ERROR(with_.barrier->Enter(CallKind::kSetTrainingState, SubjectOf(state), own));
  with_.outcome->SetTrainingState(state);
  return absl::OkStatus();
}

absl::Status StateCalls::CheckCopyInto(const StateCalls& destination) const {
  const std::string& name = with_.inputs->options.name;
  if (!(with_.inputs->given_world == destination.with_.inputs->given_world)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "CopyParametersFrom('", name, "') into '", destination.with_.inputs->options.name,
        "': the engines are of different worlds; create both with the same World"));
  }
  if (with_.progress->alive) {
    return absl::FailedPreconditionError(absl::StrCat(
        "CopyParametersFrom('", name,
        "') while a Step or Evaluation of that engine is alive: finish or drop it first"));
  }
  return with_.errors->Report();
}

absl::Status StateCalls::CopyParametersFrom(StateCalls& source) {
  const std::string& name = with_.inputs->options.name;
  if (&source == this) {
    return absl::InvalidArgumentError(
        absl::StrCat("CopyParametersFrom of '", name, "' from itself"));
  }
  if (with_.progress->alive) {
    return absl::FailedPreconditionError(
        absl::StrCat("CopyParametersFrom into '", name,
                     "' while a Step or Evaluation of it is alive: finish or drop it first"));
  }
  with_.calls->Note(CallKind::kCopy);
  ParameterCopy copy(*source.with_.state, *with_.state, Control(), copy_mirror_,
                     with_.inputs->rank());
  absl::Status own = with_.outcome->AwaitVerdicts();
  own.Update(source.with_.outcome->AwaitVerdicts());
  if (own.ok()) own = source.CheckCopyInto(*this);
  if (own.ok()) own = copy.Prepare(with_.inputs->device, with_.inputs->size(), *with_.ledger);
  const EngineInputs& from = *source.with_.inputs;
  const uint64_t subject =
      sharding::Hasher().Add(from.options.name).Add(sharding::Fingerprint(from.model)).hash();
  EBB_RETURN_IF_ERROR(with_.barrier->Enter(CallKind::kCopy, static_cast<int64_t>(subject), own));
  EBB_RETURN_IF_ERROR(
      source.with_.barrier->Enter(CallKind::kCopyFrom, /*subject=*/0, absl::OkStatus()));

  with_.runner->AwaitState();
  source.with_.runner->AwaitState();
  absl::Status copied = copy.Run();
  if (copied.ok()) copied = source.with_.errors->Report();
  with_.state->NoteWrite(StateClass::kMaster);
  if (copied.ok() && !with_.suspension->suspended()) copied = with_.state->SpreadWritten();
  copied = AgreeOnStatus(Control(), copied);
  if (!copied.ok()) {
    with_.errors->Fail(absl::Status(
        copied.code(), absl::StrCat("the engine '", name,
                                    "' has failed: CopyParametersFrom ended in the middle; reload "
                                    "the model. ",
                                    copied.message())));
  }
  return with_.errors->Report();
}

}  // namespace ebb
