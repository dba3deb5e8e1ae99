#include "ebb/runtime/engine/engine_state.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/engine_parts.h"
#include "ebb/sharding/fit/advice.h"
#include "ebb/sharding/memory_model.h"

namespace ebb {
namespace {

// The result of a call of this rank alone: only an engine that has failed lets its ranks go apart.
absl::Status Local(const EngineParts& parts, absl::Status status) {
  return parts.outcome.errors.has_failed() ? parts.calls.ReturnedAlone(std::move(status)) : status;
}

}  // namespace

EngineState::EngineState(std::unique_ptr<EngineParts> parts) : parts_(std::move(parts)) {}
EngineState::EngineState(EngineState&&) noexcept = default;
EngineState& EngineState::operator=(EngineState&&) noexcept = default;
EngineState::~EngineState() = default;

absl::Status EngineState::Read(StateClass what, Sink sink, std::string_view optimizer_state) {
  if (parts_ == nullptr) return MovedFrom();
  return Local(*parts_, parts_->call.state->Read(what, sink, optimizer_state));
}
absl::Status EngineState::Write(StateClass what, const Initialiser& source,
                                std::string_view optimizer_state) {
  if (parts_ == nullptr) return MovedFrom();
  if (source == nullptr)
    return absl::InvalidArgumentError("Write without a source of values: an empty Initialiser");
  return Local(*parts_, parts_->call.state->Write(what, source, optimizer_state));
}
absl::Status EngineState::Gather(ParameterId p, StateClass what, std::span<float> whole, int root) {
  if (parts_ == nullptr) return MovedFrom();
  return parts_->calls.Returned(parts_->call.state->Gather(p, what, whole, root));
}
absl::Status EngineState::Gather(ParameterId p, StateClass what, Sink sink, int root) {
  if (parts_ == nullptr) return MovedFrom();
  return parts_->calls.Returned(parts_->call.state->Gather(p, what, sink, root));
}
std::vector<StateSlice> EngineState::StateSlices() const {
  if (parts_ == nullptr) return {};
  return parts_->call.reads->Slices();
}
absl::StatusOr<std::shared_future<absl::Status>> EngineState::ReadAsync(StateReader reader) {
  if (parts_ == nullptr) return MovedFrom();
  if (parts_->scopes.progress.alive)
    return parts_->calls.Returned(absl::FailedPreconditionError(
        "ReadAsync while a Step or Evaluation of the engine is alive: finish or drop it first"));
  return parts_->calls.Returned(parts_->call.state->ReadAsync(std::move(reader)));
}
bool EngineState::IsReadingAsync() const {
  return parts_ != nullptr && !parts_->call.reads->is_over();
}
void EngineState::AwaitAsyncRead() const {
  if (parts_ != nullptr && !parts_->scopes.progress.alive) parts_->call.state->AwaitReads();
}
std::function<absl::Status()> EngineState::AsyncReadBegin() const {
  if (parts_ == nullptr) return MovedFrom;
  return [state = &*parts_->call.state, waits = parts_->call.reads->waits(),
          thread = std::this_thread::get_id()] {
    if (!waits->load()) return absl::OkStatus();
    if (std::this_thread::get_id() == thread) return state->BeginReads();
    return absl::FailedPreconditionError(
        "the save begins after updates that the next step runs. Without a next step, only the "
        "thread that saves can run them: wait on that thread, or after one more step");
  };
}
absl::StatusOr<std::span<std::byte>> EngineState::FileBuffer(int64_t bytes) {
  if (parts_ == nullptr) return MovedFrom();
  ebb::FileBuffer& buffer = parts_->call.file_buffer;
  const bool has_staging = !HostReaches(parts_->inputs.device) || parts_->storage->files().exist();
  if (has_staging && buffer.memory.buffer.bytes() > bytes) {
    buffer.charge = {};
    buffer.memory = {};
  }
  return buffer.Of(bytes, parts_->ledger);
}
absl::Status EngineState::CheckRoomForSaves() const {
  if (parts_ == nullptr) return MovedFrom();
  if (!parts_->host_room) return absl::OkStatus();
  const sharding::Pools& pools = parts_->plans.plan().pools;
  sharding::HostRoom room = *parts_->host_room;
  room.save = sharding::SaveBytes(pools, /*has_gpu=*/!room.holds_device);
  // A load's buffer is larger. Without staging, saves use it as it is.
  if (sharding::StateStagingBytes(pools, !room.holds_device) == 0)
    room.save = std::max(room.save, parts_->call.file_buffer.memory.buffer.bytes());
  const absl::Status fits = sharding::CheckHostRoom(pools, room);
  if (fits.ok()) return fits;
  const EngineInputs& inputs = parts_->inputs;
  const sharding::MemoryCaps caps = sharding::CapsOf(inputs.config, room);
  return absl::Status(fits.code(), absl::StrCat(fits.message(), "; ",
                                                sharding::FindAdvice(inputs.ForPlan(), caps).text));
}
absl::StatusOr<TrainingState> EngineState::training_state() {
  if (parts_ == nullptr) return MovedFrom();
  absl::StatusOr<TrainingState> state = parts_->call.state->training_state();
  if (!state.ok()) return Local(*parts_, state.status());
  return state;
}
std::string EngineState::run() const {
  return parts_ == nullptr ? "" : parts_->run;
}
void EngineState::SetRun(std::string run) {
  if (parts_ != nullptr) parts_->run = std::move(run);
}
std::vector<std::shared_ptr<FolderLock>>* EngineState::folder_locks() {
  return parts_ == nullptr ? nullptr : &parts_->folder_locks;
}
std::vector<std::string>* EngineState::damaged_checkpoints() {
  return parts_ == nullptr ? nullptr : &parts_->damaged_checkpoints;
}
absl::Status EngineState::SetTrainingState(const TrainingState& state) {
  if (parts_ == nullptr) return MovedFrom();
  return parts_->calls.Returned(parts_->call.state->SetTrainingState(state));
}
absl::Status EngineState::CopyParametersFrom(EngineState& other) {
  if (parts_ == nullptr || other.parts_ == nullptr) return MovedFrom();
  return parts_->calls.Returned(parts_->call.state->CopyParametersFrom(*other.parts_->call.state));
}
std::vector<std::string> EngineState::optimizer_states(ParameterId parameter) const {
  if (parts_ == nullptr) return {};
  const ModelSpec& model = parts_->inputs.model;
  if (static_cast<size_t>(parameter) >= model.parameters.size()) return {};
  const ParameterSpec& of = model[parameter];
  return of.trainable ? parts_->updates.state_names.Of(of.group) : std::vector<std::string>();
}
}  // namespace ebb
