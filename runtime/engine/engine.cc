#include "ebb/runtime/engine/engine.h"

#include <string>
#include <utility>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/offload_ratio.h"

namespace ebb {
namespace {

absl::Status MovedFrom() {
  return absl::FailedPreconditionError("this Engine was moved from; use the one it was moved to");
}

// What a call of this rank alone returns: only an engine that has failed lets its ranks go apart.
absl::Status Local(const Executor& executor, absl::Status status) {
  return executor.has_failed() ? executor.calls().ReturnedAlone(std::move(status)) : status;
}

}  // namespace

Engine::Engine(std::unique_ptr<Executor> executor) : executor_(std::move(executor)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

absl::StatusOr<Engine> Engine::Create(World world, Device device, ModelSpec model,
                                      const Config& config, EngineOptions options) {
  absl::StatusOr<std::unique_ptr<Executor>> executor = EngineCalls::Returned(
      world,
      Executor::Create(world, std::move(device), std::move(model), config, std::move(options)));
  EBB_RETURN_IF_ERROR(executor.status());
  return Engine(*std::move(executor));
}

StreamView Engine::compute_stream() const {
  if (executor_ == nullptr) return {};
  return executor_->compute_stream();
}
MutableTensorView Engine::workspace() const {
  if (executor_ == nullptr) return {};
  return executor_->workspace();
}
Step Engine::BeginStep(StepOptions options) {
  if (executor_ == nullptr) return Step();
  return Step(executor_.get(), executor_->BeginStep(options));
}
Evaluation Engine::BeginEvaluation(int micro_batches, EvaluationOptions options) {
  if (executor_ == nullptr) return Evaluation();
  return Evaluation(executor_.get(), executor_->BeginEvaluation(micro_batches, options));
}
absl::StatusOr<StepReport> Engine::Report() {
  if (executor_ == nullptr) return MovedFrom();
  return executor_->Report();
}
absl::Status Engine::Read(StateClass what, Sink sink, std::string_view optimizer_state) {
  if (executor_ == nullptr) return MovedFrom();
  absl::Status read = executor_->Read(what, sink, optimizer_state);
  return Local(*executor_, std::move(read));
}
absl::Status Engine::Write(StateClass what, const Initialiser& source,
                           std::string_view optimizer_state) {
  if (executor_ == nullptr) return MovedFrom();
  if (source == nullptr)
    return absl::InvalidArgumentError("Write without a source of values: an empty Initialiser");
  absl::Status written = executor_->Write(what, source, optimizer_state);
  return Local(*executor_, std::move(written));
}
absl::Status Engine::Gather(ParameterId p, StateClass what, std::span<float> whole, int root) {
  if (executor_ == nullptr) return MovedFrom();
  return executor_->calls().Returned(executor_->Gather(p, what, whole, root));
}
absl::Status Engine::Gather(ParameterId p, StateClass what, Sink sink, int root) {
  if (executor_ == nullptr) return MovedFrom();
  return executor_->calls().Returned(executor_->Gather(p, what, sink, root));
}
absl::StatusOr<TrainingState> Engine::training_state() {
  if (executor_ == nullptr) return MovedFrom();
  absl::StatusOr<TrainingState> state = executor_->training_state();
  if (!state.ok()) return Local(*executor_, state.status());
  return state;
}
absl::Status Engine::SetTrainingState(const TrainingState& state) {
  if (executor_ == nullptr) return MovedFrom();
  return executor_->calls().Returned(executor_->SetTrainingState(state));
}
absl::Status Engine::Agree(const absl::Status& own, std::string_view about) {
  if (executor_ == nullptr) return MovedFrom();
  return executor_->calls().Returned(executor_->Agree(own, about));
}
absl::Status Engine::Suspend() {
  if (executor_ == nullptr) return MovedFrom();
  return executor_->calls().Returned(executor_->Suspend());
}
absl::Status Engine::Resume() {
  if (executor_ == nullptr) return MovedFrom();
  return executor_->calls().Returned(executor_->Resume());
}
absl::Status Engine::CopyParametersFrom(Engine& other) {
  if (executor_ == nullptr || other.executor_ == nullptr) return MovedFrom();
  return executor_->calls().Returned(executor_->CopyParametersFrom(*other.executor_));
}
std::vector<MemoryRow> Engine::memory() const {
  if (executor_ == nullptr) return {};
  std::vector<MemoryRow> rows = executor_->memory();
  const DriverMemory* const driver = executor_->device().backend().driver_memory();
  if (driver != nullptr && driver->peak_bytes() > 0) {
    rows.push_back({.state = StateClass::kDriver,
                    .tier = Tier::kDevice,
                    .current_bytes = static_cast<uint64_t>(driver->bytes()),
                    .peak_bytes = static_cast<uint64_t>(driver->peak_bytes())});
  }
  return rows;
}
std::vector<TrafficRow> Engine::traffic() const {
  if (executor_ == nullptr) return {};
  return executor_->traffic();
}
std::vector<CommunicationRow> Engine::communication() const {
  if (executor_ == nullptr) return {};
  return executor_->communication();
}
const World& Engine::world() const {
  return executor_->world();
}
const ModelSpec& Engine::model() const {
  return executor_->model();
}
std::vector<std::string> Engine::optimizer_states(ParameterId parameter) const {
  return executor_->optimizer_states(parameter);
}
const sharding::Plan& Engine::plan() const {
  return executor_->plan();
}
const Config& Engine::config() const {
  return executor_->config();
}

absl::StatusOr<sharding::Plan> PredictPlan(const ModelSpec& model, int world, const Config& config,
                                           bool advises) {
  EBB_RETURN_IF_ERROR(config.Validate());
  EBB_ASSIGN_OR_RETURN(Config resolved, config.ForWorld(world));
  sharding::PlanInputs inputs = Executor::InputsFor(model, resolved, world, /*own=*/nullptr);
  if (!advises) inputs.cap_error = sharding::PlanInputs::CapError::kNeed;
  if (OffloadOptimizerConfig& optimizer = resolved.zero.offload_optimizer; optimizer.measures_ratio)
    optimizer.ratio = sharding::ChooseRatio(inputs, /*balanced=*/0, resolved.ebb.device_memory);
  return sharding::PlanStep(inputs);
}

absl::StatusOr<std::vector<MemoryRow>> PredictMemory(const ModelSpec& model, int world,
                                                     const Config& config) {
  EBB_ASSIGN_OR_RETURN(const sharding::Plan plan, PredictPlan(model, world, config));
  return sharding::PredictMemory(plan);
}

}  // namespace ebb
