#include "ebb/runtime/engine/state/state_calls.h"

#include <algorithm>
#include <bit>
#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/engine/ranks/engine_calls.h"
#include "ebb/runtime/engine/state/mesh_copy.h"
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

// Returns earlier errors first.
absl::Status StateCalls::MayLook(StateClass what) {
  EBB_RETURN_IF_ERROR(outcome_.AwaitVerdicts());
  EBB_RETURN_IF_ERROR(runner_.MayLook());
  if (what == StateClass::kGradient && (!progress_.alive || !progress_.gradients.are_final))
    return absl::FailedPreconditionError(
        "gradients can be read and written between Step::Reduce and Step::Finish only");
  return absl::OkStatus();
}

// Until pending updates have written state, and nothing reads it.
absl::Status StateCalls::AwaitState(StateClass what) {
  EBB_RETURN_IF_ERROR(MayLook(what));
  runner_.AwaitState();
  return core_.errors.Report();
}

// A parameter that is named must have the state.
absl::Status StateCalls::CheckHas(std::optional<ParameterId> p, StateAccess::What what) const {
  if (!p) return absl::OkStatus();
  const size_t parameters = core_.inputs.model.parameters.size();
  if (static_cast<size_t>(*p) >= parameters)
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", static_cast<int>(*p), ": the model has ", parameters));
  EBB_ASSIGN_OR_RETURN(const bool has, state_.Has(*p, what));
  if (has) return absl::OkStatus();
  const ParameterSpec& parameter = core_.inputs.model[*p];
  const std::string state = what.state.empty() ? std::string(Name(what.of))
                                               : absl::StrCat("'", std::string(what.state), "'");
  return absl::InvalidArgumentError(absl::StrCat("'", parameter.name, "' has no ", state,
                                                 parameter.trainable
                                                     ? ", which its group's optimizer does not keep"
                                                     : ", because it is frozen"));
}

float StateCalls::ScaleOf(StateClass what) const {
  return what == StateClass::kGradient ? 1.0f / control_.loss_scale() : 1;
}

absl::Status StateCalls::Read(std::optional<ParameterId> p, StateAccess::What what,
                              Engine::Sink sink) {
  EBB_RETURN_IF_ERROR(CheckHas(p, what));
  EBB_RETURN_IF_ERROR(AwaitState(what.of));
  EBB_RETURN_IF_ERROR(state_.Read(p, what, ScaleOf(what.of), sink));
  return core_.errors.Report();
}

absl::Status StateCalls::Write(std::optional<ParameterId> p, StateAccess::What what,
                               const Initialiser& source) {
  if (source == nullptr)
    return absl::InvalidArgumentError("Write without a source of values: an empty Initialiser");
  EBB_RETURN_IF_ERROR(CheckHas(p, what));
  if (progress_.alive && what.of != StateClass::kGradient) {
    return absl::FailedPreconditionError(
        "Write while a Step or Evaluation is alive: only gradients can be written then, between "
        "Reduce and Finish");
  }
  state_.NoteWrite(what.of);
  EBB_RETURN_IF_ERROR(AwaitState(what.of));
  EBB_RETURN_IF_ERROR(state_.Write(p, what, ScaleOf(what.of), source));
  return core_.errors.Report();
}

absl::Status StateCalls::Gather(ParameterId p, StateAccess::What what, std::span<float> whole,
                                int root) {
  const auto fits = [&] {
    const int64_t elements = Elements(WholeShape(core_.inputs.model[p]));
    if ((root >= 0 && root != core_.inputs.of_calls().rank()) || std::ssize(whole) == elements)
      return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("Gather of '", core_.inputs.model[p].name,
                                                   "' into ", whole.size(), " elements: it has ",
                                                   elements));
  };
  return Gather(p, what, root, fits, [&](const Slice& piece, std::span<const float> values) {
    std::copy(values.begin(), values.end(), whole.begin() + piece.begin);
    return absl::OkStatus();
  });
}

absl::Status StateCalls::Gather(ParameterId p, StateAccess::What what, Engine::Sink sink,
                                int root) {
  return Gather(
      p, what, root, [] { return absl::OkStatus(); }, sink);
}

absl::Status StateCalls::Gather(ParameterId p, StateAccess::What what, int root,
                                absl::FunctionRef<absl::Status()> fits, Engine::Sink sink) {
  core_.calls.Note(CallKind::kGather);
  if (core_.errors.has_failed()) return barrier_.Withdraw();
  const auto check = [&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(MayLook(what.of));
    EBB_RETURN_IF_ERROR(CheckHas(p, what));
    if (root < -1 || root >= core_.inputs.of_calls().size())
      return absl::InvalidArgumentError(
          absl::StrCat("Gather to root ", root, " in a world of ", core_.inputs.of_calls().size()));
    return fits();
  };
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), check()));
  runner_.AwaitState();
  return state_.Gather(p, what, ScaleOf(what.of), root, sink);
}

absl::StatusOr<std::shared_future<absl::Status>> StateCalls::ReadAsync(StateReader reader) {
  core_.calls.Note(CallKind::kReadAsync);
  if (core_.errors.has_failed()) return barrier_.Withdraw();
  absl::Status own = outcome_.AwaitVerdicts();
  if (own.ok() && suspension_.suspended())
    own = absl::FailedPreconditionError(
        "a suspended engine cannot save (ReadAsync): call Resume first");
  AwaitReads();
  const absl::Status prepared = reads_.Prepare(reader.beside_steps);
  EBB_RETURN_IF_ERROR(
      barrier_.Enter(CallKind::kReadAsync, /*subject=*/0, own.ok() ? prepared : own));
  const bool in_step = reader.may_begin_in_step && reads_.MayBeginInStep();
  std::shared_future<absl::Status> over = reads_.Take(std::move(reader));
  if (!in_step) runner_.Drain();
  runner_.AfterCarried([reads = &reads_] { reads->Begin(); });
  return over;
}

void StateCalls::AwaitReads() {
  (void)BeginReads();
  reads_.Await();
}

absl::Status StateCalls::BeginReads() {
  if (!runner_.has_after_carried()) return absl::OkStatus();
  if (progress_.alive) {
    return absl::FailedPreconditionError(
        "this step still has to run updates of the step before, so it cannot wait for a save: wait "
        "between steps");
  }
  runner_.Drain();
  return absl::OkStatus();
}

absl::StatusOr<TrainingState> StateCalls::training_state() {
  EBB_RETURN_IF_ERROR(outcome_.AwaitVerdicts());
  return outcome_.training_state();
}

absl::Status StateCalls::SetTrainingState(const TrainingState& state) {
  if (progress_.alive) {
    return absl::FailedPreconditionError(
        "SetTrainingState while a Step or Evaluation of the engine is alive: finish or drop it "
        "first");
  }
  core_.calls.Note(CallKind::kSetTrainingState);
  absl::Status own = outcome_.AwaitVerdicts();
  if (own.ok()) own = Validate(state);
  // A carried update is of the steps that were counted so far.
  runner_.Drain();
  core_.streams.WaitIdle();
  EBB_RETURN_IF_ERROR(barrier_.Enter(CallKind::kSetTrainingState, SubjectOf(state), own));
  outcome_.SetTrainingState(state);
  return absl::OkStatus();
}

absl::Status StateCalls::CheckCopyInto(const StateCalls& destination) const {
  const std::string& name = core_.inputs.options.name;
  const auto tensor_of = [](const StateCalls& one) {
    return one.core_.inputs.config.ebb.mesh.tensor;
  };
  // A part that the trainer has made by itself is no whole model.
  const auto is_part = [&](const StateCalls& one) {
    return tensor_of(one) > 1 && !one.core_.inputs.cuts_model;
  };
  if (core_.inputs.given_world == destination.core_.inputs.given_world &&
      tensor_of(*this) != tensor_of(destination) && (is_part(*this) || is_part(destination))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "CopyParametersFrom('", name, "') into '", destination.core_.inputs.options.name,
        "': the engines have different meshes, with \"ebb.mesh.tensor\" ", tensor_of(*this),
        " and ", tensor_of(destination), "; create both with the same"));
  }
  if (!(core_.inputs.given_world == destination.core_.inputs.given_world)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "CopyParametersFrom('", name, "') into '", destination.core_.inputs.options.name,
        "': the engines are of different worlds; create both with the same World"));
  }
  if (progress_.alive) {
    return absl::FailedPreconditionError(absl::StrCat(
        "CopyParametersFrom('", name,
        "') while a Step or Evaluation of that engine is alive: finish or drop it first"));
  }
  return core_.errors.Report();
}

absl::Status StateCalls::CopyParametersFrom(StateCalls& source) {
  const std::string& name = core_.inputs.options.name;
  if (&source == this) {
    return absl::InvalidArgumentError(
        absl::StrCat("CopyParametersFrom of '", name, "' from itself"));
  }
  if (progress_.alive) {
    return absl::FailedPreconditionError(
        absl::StrCat("CopyParametersFrom into '", name,
                     "' while a Step or Evaluation of it is alive: finish or drop it first"));
  }
  core_.calls.Note(CallKind::kCopy);
  ParameterCopy copy(source.state_, state_, Control(), copy_mirror_, core_.inputs);
  MeshCopy over_meshes(source.state_, state_);
  const bool alike = source.core_.inputs.tensor_ranks() == core_.inputs.tensor_ranks() &&
                     AreCutAlike(source.core_.inputs.model, core_.inputs.model);
  absl::Status own = outcome_.AwaitVerdicts();
  own.Update(source.outcome_.AwaitVerdicts());
  if (own.ok()) own = source.CheckCopyInto(*this);
  if (own.ok())
    own = alike ? copy.Prepare(core_.inputs.device, core_.inputs.size(), core_.ledger)
                : over_meshes.Prepare();
  const EngineInputs& from = source.core_.inputs;
  const uint64_t subject =
      sharding::Hasher().Add(from.options.name).Add(sharding::Fingerprint(from.model)).hash();
  EBB_RETURN_IF_ERROR(barrier_.Enter(CallKind::kCopy, static_cast<int64_t>(subject), own));
  EBB_RETURN_IF_ERROR(source.barrier_.Enter(CallKind::kCopyFrom, /*subject=*/0, absl::OkStatus()));

  runner_.AwaitState();
  source.runner_.AwaitState();
  absl::Status copied = alike ? copy.Run() : over_meshes.Run();
  if (copied.ok()) copied = source.core_.errors.Report();
  state_.NoteWrite(StateClass::kMaster);
  if (copied.ok() && !suspension_.suspended()) copied = state_.SpreadWritten();
  copied = AgreeOnStatus(Control(), copied);
  if (!copied.ok()) {
    core_.errors.Fail(absl::Status(
        copied.code(), absl::StrCat("the engine '", name,
                                    "' has failed: CopyParametersFrom ended in the middle; reload "
                                    "the model. ",
                                    copied.message())));
  }
  return core_.errors.Report();
}

}  // namespace ebb
