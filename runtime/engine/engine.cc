#include "ebb/runtime/engine/engine.h"

#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/engine/create/engine_members.h"
#include "ebb/runtime/engine/create/reorder.h"
#include "ebb/runtime/engine/create/setup.h"

namespace ebb {

absl::Status MovedFrom() {
  return absl::FailedPreconditionError("this Engine was moved from; use the one it was moved to");
}

namespace {

// For a call that is allowed only between steps.
absl::Status WhileAlive(std::string_view call, std::string_view what_now) {
  return absl::FailedPreconditionError(
      absl::StrCat(std::string(call), " while a Step or Evaluation of the engine is alive",
                   std::string(what_now)));
}
constexpr std::string_view kFinishFirst = ": finish or drop it first";
// "SaveCheckpoint: begin" is of the call that the trainer has made.
std::string_view CallOf(std::string_view about) {
  const size_t colon = about.find(':');
  return colon == about.npos ? "Agree" : about.substr(0, colon);
}

}  // namespace

Engine::Engine(std::unique_ptr<EngineMembers> members) : EngineState(std::move(members)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

absl::StatusOr<Engine> Engine::Create(World world, Device device, ModelSpec model,
                                      const Config& config, EngineOptions options) {
  absl::StatusOr<std::unique_ptr<EngineMembers>> members = EngineCalls::Returned(
      world, MakeEngine(world, std::move(device), std::move(model), config, std::move(options)));
  EBB_RETURN_IF_ERROR(members.status());
  return Engine(*std::move(members));
}

StreamView Engine::compute_stream() const {
  if (members_ == nullptr) return {};
  return members_->streams.compute().view();
}
MutableTensorView Engine::workspace() const {
  if (members_ == nullptr || members_->inputs.model.workspace_bytes == 0) return {};
  if (members_->interpreter->suspension.suspended()) return {};
  return members_->interpreter->views.Workspace();
}
std::vector<ParameterView> Engine::Views(UnitId unit) const {
  if (members_ == nullptr || members_->interpreter->suspension.suspended()) return {};
  return members_->interpreter->views.Unit(unit);
}
std::shared_ptr<void> Engine::HoldMemory() {
  return members_ == nullptr ? nullptr : members_->storage->Hold();
}
Step Engine::BeginStep(StepOptions options) {
  if (members_ == nullptr) return Step();
  Steps& steps = members_->interpreter->steps;
  return Step(&steps, steps.Begin(options));
}
Evaluation Engine::BeginEvaluation(int micro_batches, EvaluationOptions options) {
  if (members_ == nullptr) return Evaluation();
  Steps& steps = members_->interpreter->steps;
  return Evaluation(&steps, steps.BeginEvaluation(micro_batches, options));
}
absl::StatusOr<StepReport> Engine::Report() {
  if (members_ == nullptr) return MovedFrom();
  return members_->interpreter->steps.Report();
}
absl::Status Engine::Agree(const absl::Status& own, std::string_view about) {
  if (members_ == nullptr) return MovedFrom();
  if (members_->interpreter->progress.alive)
    return members_->calls.Returned(WhileAlive(CallOf(about), kFinishFirst));
  return members_->calls.Returned(members_->interpreter->barrier.Agree(own, about));
}
absl::StatusOr<std::vector<std::string>> Engine::Exchange(const absl::Status& own,
                                                          std::string_view about,
                                                          std::string_view text) {
  if (members_ == nullptr) return MovedFrom();
  if (members_->interpreter->progress.alive)
    return members_->calls.Returned(WhileAlive(CallOf(about), kFinishFirst));
  return members_->calls.Returned(members_->interpreter->barrier.Exchange(own, about, text));
}
absl::Status Engine::Suspend() {
  if (members_ == nullptr) return MovedFrom();
  if (members_->interpreter->progress.alive)
    return members_->calls.Returned(WhileAlive("Suspend", kFinishFirst));
  return members_->calls.Returned(members_->interpreter->suspension.Suspend());
}
absl::Status Engine::Resume() {
  if (members_ == nullptr) return MovedFrom();
  if (members_->interpreter->progress.alive) {
    return members_->calls.Returned(WhileAlive("Resume", ", which shows that it is not suspended"));
  }
  return members_->calls.Returned(members_->interpreter->suspension.Resume());
}
absl::Status Engine::Reorder(std::vector<Visit> forward, std::vector<ScopeEvent> order) {
  if (members_ == nullptr) return MovedFrom();
  if (members_->interpreter->progress.alive)
    return members_->calls.Returned(WhileAlive("Reorder", kFinishFirst));
  return members_->calls.Returned(ebb::Reorder(*members_).To(std::move(forward), std::move(order)));
}
std::vector<MemoryRow> Engine::memory() const {
  if (members_ == nullptr) return {};
  std::vector<MemoryRow> rows = members_->ledger.Rows();
  const DriverMemory* const driver = members_->inputs.device.backend().driver_memory();
  if (driver != nullptr && driver->peak_bytes() > 0) {
    rows.push_back({.state = StateClass::kDriver,
                    .tier = Tier::kDevice,
                    .current_bytes = static_cast<uint64_t>(driver->bytes()),
                    .peak_bytes = static_cast<uint64_t>(driver->peak_bytes())});
  }
  return rows;
}
std::vector<TrafficRow> Engine::traffic() const {
  if (members_ == nullptr) return {};
  return members_->interpreter->runner.traffic();
}
std::vector<CommunicationRow> Engine::communication() const {
  if (members_ == nullptr) return {};
  return members_->interpreter->runner.communication();
}
const World& Engine::world() const {
  return members_->inputs.cuts_model ? members_->inputs.given_world : members_->inputs.data_world;
}
const Mesh& Engine::mesh() const {
  return members_->verdict_ranks.mesh;
}
int Engine::rank_in_mesh() const {
  return members_->verdict_ranks.own;
}
const World& Engine::data_world() const {
  return members_->inputs.data_world;
}
int Engine::data_rank() const {
  return mesh().index(rank_in_mesh(), kDataAxes);
}
int Engine::data_ranks() const {
  return mesh().size(kDataAxes);
}
TensorAxis Engine::tensor() {
  return members_ == nullptr ? TensorAxis() : TensorAxis(&members_->interpreter->tensor);
}
const ModelSpec& Engine::model() const {
  return members_->inputs.model;
}
const Program& Engine::program() const {
  return *members_->program;
}
const Config& Engine::config() const {
  return members_->inputs.config;
}

}  // namespace ebb
