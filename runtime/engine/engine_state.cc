#include "ebb/runtime/engine/engine_state.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/create/engine_members.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/sharding/fit/advice.h"
#include "ebb/sharding/memory_model.h"

namespace ebb {
namespace {

// The result of a call of this rank alone: only an engine that has failed lets its ranks go apart.
absl::Status Local(const EngineMembers& engine, absl::Status status) {
  return engine.errors.has_failed() ? engine.calls.ReturnedAlone(std::move(status)) : status;
}

}  // namespace

EngineState::EngineState(std::unique_ptr<EngineMembers> members) : members_(std::move(members)) {}
EngineState::EngineState(EngineState&&) noexcept = default;
EngineState& EngineState::operator=(EngineState&&) noexcept = default;
EngineState::~EngineState() = default;

absl::Status EngineState::Read(StateClass what, Sink sink, std::string_view optimizer_state) {
  if (members_ == nullptr) return MovedFrom();
  return Local(*members_,
               members_->interpreter->state_calls.Read({}, {what, optimizer_state}, sink));
}
absl::Status EngineState::Read(ParameterId p, StateClass what, Sink sink,
                               std::string_view optimizer_state) {
  if (members_ == nullptr) return MovedFrom();
  return Local(*members_,
               members_->interpreter->state_calls.Read(p, {what, optimizer_state}, sink));
}
absl::Status EngineState::Write(StateClass what, const Initialiser& source,
                                std::string_view optimizer_state) {
  if (members_ == nullptr) return MovedFrom();
  return Local(*members_,
               members_->interpreter->state_calls.Write({}, {what, optimizer_state}, source));
}
absl::Status EngineState::Write(ParameterId p, StateClass what, const Initialiser& source,
                                std::string_view optimizer_state) {
  if (members_ == nullptr) return MovedFrom();
  return Local(*members_,
               members_->interpreter->state_calls.Write(p, {what, optimizer_state}, source));
}
absl::Status EngineState::Gather(ParameterId p, StateClass what, std::span<float> whole, int root,
                                 std::string_view optimizer_state) {
  if (members_ == nullptr) return MovedFrom();
  return members_->calls.Returned(
      members_->interpreter->state_calls.Gather(p, {what, optimizer_state}, whole, root));
}
absl::Status EngineState::Gather(ParameterId p, StateClass what, Sink sink, int root,
                                 std::string_view optimizer_state) {
  if (members_ == nullptr) return MovedFrom();
  return members_->calls.Returned(
      members_->interpreter->state_calls.Gather(p, {what, optimizer_state}, sink, root));
}
std::vector<StateSlice> EngineState::StateSlices() const {
  if (members_ == nullptr) return {};
  return members_->interpreter->reads.Slices();
}
absl::StatusOr<std::shared_future<absl::Status>> EngineState::ReadAsync(StateReader reader) {
  if (members_ == nullptr) return MovedFrom();
  if (members_->interpreter->progress.alive)
    return members_->calls.Returned(absl::FailedPreconditionError(
        "ReadAsync while a Step or Evaluation of the engine is alive: finish or drop it first"));
  return members_->calls.Returned(members_->interpreter->state_calls.ReadAsync(std::move(reader)));
}
bool EngineState::IsReadingAsync() const {
  return members_ != nullptr && !members_->interpreter->reads.is_over();
}
void EngineState::AwaitAsyncRead() const {
  if (members_ != nullptr && !members_->interpreter->progress.alive)
    members_->interpreter->state_calls.AwaitReads();
}
std::function<absl::Status()> EngineState::AsyncReadBegin() const {
  if (members_ == nullptr) return MovedFrom;
  return [state = &members_->interpreter->state_calls, waits = members_->interpreter->reads.waits(),
          thread = std::this_thread::get_id()] {
    if (!waits->load()) return absl::OkStatus();
    if (std::this_thread::get_id() == thread) return state->BeginReads();
    return absl::FailedPreconditionError(
        "the save begins after updates that the next step runs. Without a next step, only the "
        "thread that saves can run them: wait on that thread, or after one more step");
  };
}
absl::StatusOr<std::span<std::byte>> EngineState::FileBuffer(int64_t bytes) {
  if (members_ == nullptr) return MovedFrom();
  ebb::FileBuffer& buffer = members_->file_buffer;
  const bool has_staging =
      !HostReaches(members_->inputs.device) || members_->storage->files().exist();
  if (has_staging && buffer.memory.buffer.bytes() > bytes) {
    buffer.charge = {};
    buffer.memory = {};
  }
  return buffer.Of(bytes, members_->ledger);
}
absl::Status EngineState::CheckRoomForSaves() const {
  if (members_ == nullptr) return MovedFrom();
  if (!members_->host_room) return absl::OkStatus();
  const sharding::PoolBytes& pools = members_->plans.plan().table.bytes;
  sharding::HostRoom room = *members_->host_room;
  room.save = sharding::SaveBytes(pools, /*has_gpu=*/!room.holds_device);
  // A load's buffer is larger. Without staging, saves use it as it is.
  if (sharding::StateStagingBytes(pools, !room.holds_device) == 0)
    room.save = std::max(room.save, members_->file_buffer.memory.buffer.bytes());
  const absl::Status fits = sharding::CheckHostRoom(pools, room);
  if (fits.ok()) return fits;
  const EngineInputs& inputs = members_->inputs;
  const sharding::MemoryCaps caps = sharding::CapsOf(inputs.config, room);
  return absl::Status(fits.code(), absl::StrCat(fits.message(), "; ",
                                                sharding::FindAdvice(inputs.ForPlan(), caps).text));
}
absl::StatusOr<bool> EngineState::AwaitWhole(UnitId unit) {
  if (members_ == nullptr) return MovedFrom();
  absl::StatusOr<bool> whole = members_->interpreter->steps.AwaitWhole(unit);
  if (!whole.ok()) return Local(*members_, whole.status());
  return whole;
}
absl::StatusOr<TrainingState> EngineState::training_state() {
  if (members_ == nullptr) return MovedFrom();
  absl::StatusOr<TrainingState> state = members_->interpreter->state_calls.training_state();
  if (!state.ok()) return Local(*members_, state.status());
  return state;
}
std::string EngineState::run() const {
  return members_ == nullptr ? "" : members_->run;
}
void EngineState::SetRun(std::string run) {
  if (members_ != nullptr) members_->run = std::move(run);
}
std::vector<std::shared_ptr<FolderLock>>* EngineState::folder_locks() {
  return members_ == nullptr ? nullptr : &members_->folder_locks;
}
std::vector<std::string>* EngineState::damaged_checkpoints() {
  return members_ == nullptr ? nullptr : &members_->damaged_checkpoints;
}
absl::Status EngineState::SetTrainingState(const TrainingState& state) {
  if (members_ == nullptr) return MovedFrom();
  return members_->calls.Returned(members_->interpreter->state_calls.SetTrainingState(state));
}
absl::Status EngineState::CopyParametersFrom(EngineState& other) {
  if (members_ == nullptr || other.members_ == nullptr) return MovedFrom();
  return members_->calls.Returned(members_->interpreter->state_calls.CopyParametersFrom(
      other.members_->interpreter->state_calls));
}
std::vector<std::string> EngineState::optimizer_states(ParameterId parameter) const {
  if (members_ == nullptr) return {};
  const ModelSpec& model = members_->inputs.model;
  if (static_cast<size_t>(parameter) >= model.parameters.size()) return {};
  const ParameterSpec& of = model[parameter];
  return of.trainable ? members_->state_names.Of(of.group) : std::vector<std::string>();
}
}  // namespace ebb
