// Create: checks, streams, communicators, plans and pools.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/awaited_event.h"
#include "ebb/runtime/device/stream_priority.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/device_queues.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/advice.h"
#include "ebb/sharding/budget.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/interval.h"

namespace ebb {

using sharding::Section;

absl::StatusOr<std::unique_ptr<Executor>> Executor::Create(World world, Device device,
                                                           ModelSpec model, const Config& config,
                                                           EngineOptions options) {
  EBB_RETURN_IF_ERROR(config.Validate());
  EBB_RETURN_IF_ERROR(Validate(model));
  EBB_ASSIGN_OR_RETURN(Config resolved, config.ForWorld(world.size()));
  if (options.optimizer) {
    std::string overruled = sharding::WhatOwnOptimizerOverrules(config);
    if (!overruled.empty()) resolved.remarks.push_back(std::move(overruled));
  }
  if (options.compute.native != nullptr && device.kind() == DeviceKind::kCuda) {
    EBB_ASSIGN_OR_RETURN(device, Device::Cuda(device.ordinal(), options.compute));
  }
  std::unique_ptr<Executor> executor(new Executor(std::move(world), std::move(device),
                                                  std::move(model), std::move(resolved),
                                                  std::move(options)));
  EBB_RETURN_IF_ERROR(executor->Initialise());
  return executor;
}

absl::Status Executor::Initialise() {
  EBB_ASSIGN_OR_RETURN(world_, given_world_.On(device_));
  EBB_ASSIGN_OR_RETURN(kernels_, optim::Kernels::For(device_));
  EBB_ASSIGN_OR_RETURN(host_kernels_, optim::Kernels::For(Device::Cpu(1)));
  absl::Status own = CheckGroups();
  if (own.ok()) own = CheckOptimizer();
  if (own.ok()) ChooseRatioByCap();
  if (own.ok()) own = MakePlans();
  EBB_RETURN_IF_ERROR(MakeControl());
  EBB_RETURN_IF_ERROR(MakeStreams());
  EBB_RETURN_IF_ERROR(AgreeOnPlanned(own));
  EBB_RETURN_IF_ERROR(AgreeOnPlan(Control(), model_, config_, own_->plan));
  EBB_RETURN_IF_ERROR(AgreeOnInitialValues(Control(), model_));
  EBB_RETURN_IF_ERROR(MakeGatherCommunicator());
  EBB_RETURN_IF_ERROR(Measure());
  // Here no rank waits on its device for another, which may be giving back what it has measured with.
  EBB_RETURN_IF_ERROR(MakeSecondaryCommunicator());
  EBB_RETURN_IF_ERROR(MakeReduceCommunicators());
  EBB_RETURN_IF_ERROR(CheckHostMemory());
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), MakeState()));
  EBB_RETURN_IF_ERROR(ShowPools());
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), state_->FillSlices()));
  EBB_RETURN_IF_ERROR(state_->SpreadFilled());
  EBB_RETURN_IF_ERROR(ChooseVerifySwap());
  if (rank_ == 0) {
    for (const std::string& warning : config_.warnings)
      LogWarning(absl::StrCat(options_.name, ": ", warning));
    const std::string queues =
        WarnOfFewQueues(StreamsOfDevice(), std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"));
    if (!queues.empty()) LogWarning(absl::StrCat(options_.name, ": ", queues));
    for (const std::string& remark : config_.remarks)
      LogInfo(absl::StrCat(options_.name, ": ", remark));
    const std::string unused =
        sharding::WhyNoneIsOffloaded(plan().decisions, plan().pools.homes, config_);
    if (!unused.empty()) LogWarning(absl::StrCat(options_.name, ": ", unused));
    const sharding::Decisions& decisions = plan().decisions;
    const std::string_view timing = sharding::Name(decisions.timing);
    const std::string cut = decisions.replicas() == 1
                                ? ""
                                : absl::StrCat(" cut over groups of ", decisions.shards, " ranks");
    LogInfo(absl::StrCat(options_.name, ": ", size_, size_ == 1 ? " rank on " : " ranks on ",
                         device_.description(), ", stage ", decisions.stage, cut,
                         ", reduction group ",
                         decisions.replicas() > 1 ? decisions.shards : ReductionGroup(),
                         ", reduced once a ", config_.reduces_at_round() ? "round" : "step",
                         ", updates ", std::string(timing), ": ", decisions.timing_reason));
  }
  return absl::OkStatus();
}

// With the trainer's, the one that zeroes memory, the crossings of host streams, and one of NCCL's for
// each communicator. None of CUDA's on a CPU.
int Executor::StreamsOfDevice() {
  if (device_.kind() != DeviceKind::kCuda) return 0;
  const auto made = [](const auto& all) {
    return static_cast<int>(
        std::count_if(all.begin(), all.end(), [](const auto* one) { return one->has_value(); }));
  };
  return 2 + made(Streams()) + (world_.connected_by_nccl() ? 1 + made(peers_.of_steps()) : 0);
}

// A group that the config names and no parameter has is a misspelling.
absl::Status Executor::CheckGroups() const {
  for (const auto& [name, group] : config_.ebb.parameter_groups) {
    const bool used =
        std::any_of(model_.parameters.begin(), model_.parameters.end(),
                    [&](const ParameterSpec& parameter) { return parameter.group == name; });
    if (!used)
      return absl::InvalidArgumentError(
          absl::StrCat("ebb.parameter_groups.", name,
                       ": no parameter of the model is in this group (ParameterSpec::group)"));
  }
  return absl::OkStatus();
}

absl::Status Executor::CheckOptimizer() const {
  if (!options_.optimizer) return absl::OkStatus();
  const auto refuse = [](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("EngineOptions::optimizer: ", why));
  };
  if (options_.optimizer->update == nullptr)
    return refuse("it has no update function; leave the optimizer out to use the config's");
  const std::vector<std::string>& states = options_.optimizer->states;
  for (size_t k = 0; k < states.size(); ++k) {
    if (states[k].empty())
      return refuse(absl::StrCat("state ", k, " has no name; Read and Write need one"));
    if (std::find(states.begin(), states.begin() + static_cast<int64_t>(k), states[k]) !=
        states.begin() + static_cast<int64_t>(k))
      return refuse(absl::StrCat("two states named '", states[k], "'; give each its own name"));
  }
  for (const auto& [name, group] : config_.ebb.parameter_groups) {
    if (!group.weight_decay && !group.optimizer) continue;
    return refuse(absl::StrCat("ebb.parameter_groups.", name, ".",
                               group.weight_decay ? "weight_decay" : "optimizer",
                               " is the config's optimizer's, which it replaces; act on "
                               "UpdateSlice::group instead (lr_factor is in its learning_rate)"));
  }
  return absl::OkStatus();
}

int Executor::ReductionGroup() const {
  const auto group = static_cast<int>(config_.ebb.reduction_group);
  return group == 0 ? world_.ranks_per_host() : group;
}

CommunicatorOptions Executor::OptionsOf(absl::string_view name) const {
  return {.name = absl::StrCat(options_.name, " ", name),
          .reduction_group = ReductionGroup(),
          .timeout_seconds = config_.ebb.timeout_seconds};
}

absl::Status Executor::MakePlans() {
  EBB_ASSIGN_OR_RETURN(sharding::Plan step, sharding::PlanStep(Inputs()));
  EBB_ASSIGN_OR_RETURN(sharding::Plan walk, sharding::PlanWalk(Inputs()));
  EBB_ASSIGN_OR_RETURN(sharding::Plan drain, sharding::PlanDrain(Inputs()));
  for (auto& [plan, run] :
       {std::pair(&step, &own_), std::pair(&walk, &walk_), std::pair(&drain, &drain_)}) {
    *run = std::make_unique<Runnable>();
    (*run)->plan = std::move(*plan);
  }
  return absl::OkStatus();
}

// `own`: what planning has come to. Of a cap that ranks exceed alike one looks for what would fit, and
// tells the others.
absl::Status Executor::AgreeOnPlanned(const absl::Status& own) {
  const bool exceeds_cap = absl::IsResourceExhausted(own);
  const absl::string_view what = own.message();
  const uint64_t cause = sharding::Hasher().Add({what.data(), what.size()}).hash();
  return AgreeOnStatus(Control(), own, exceeds_cap ? static_cast<int64_t>(cause) : 0,
                       [this] { return sharding::Advice(Inputs(), sharding::CapsOf(config_)); });
}

absl::Status Executor::MakeControl() {
  EBB_ASSIGN_OR_RETURN(Communicator control, world_.NewCommunicator(OptionsOf("control")));
  control_.emplace(std::move(control));
  constexpr int64_t kMirrorBytes = int64_t{1} << 20, kOfRankMin = 512;
  const absl::Status mirrored =
      mirror_.Allocate(device_, std::max(kMirrorBytes, (size_ + 1) * kOfRankMin), ledger_);
  if (!mirrored.ok()) control_->Abort(mirrored);  // the others are about to wait in it
  return mirrored;
}

absl::Status Executor::MakeStreams() {
  using sharding::StreamId;
  // The others wait for what gathers and reductions carry.
  const std::tuple<const char*, StreamId, StreamPriority, std::optional<Stream>*> streams[] = {
      {"ebb gather", StreamId::kGather, StreamPriority::kFirst, &gather_},
      {"ebb reduce", StreamId::kReduce, StreamPriority::kFirst, &reduce_},
      {"ebb update", StreamId::kUpdate, StreamPriority::kUsual, &update_}};
  for (const auto& [name, id, priority, into] : streams) {
    EBB_ASSIGN_OR_RETURN(Stream made, NewStream(device_, name, TasksMax(id), priority));
    into->emplace(std::move(made));
  }
  EBB_ASSIGN_OR_RETURN(Event started, device_.NewEvent());
  started_.emplace(std::move(started));
  // What the caller waits for when it is two steps ahead.
  while (concluded_.size() < ControlBlock::kSlots) {
    EBB_ASSIGN_OR_RETURN(Event made, NewAwaitedEvent(device_));
    concluded_.push_back(std::move(made));
  }
  return absl::OkStatus();
}

absl::Status Executor::MakeOffloadStreams() {
  if (!plan().decisions.offloads()) return absl::OkStatus();
  using sharding::StreamId;
  const std::tuple<const char*, StreamId, std::optional<Stream>*> copies[] = {
      {"ebb upload", StreamId::kUpload, &upload_},
      {"ebb download", StreamId::kDownload, &download_}};
  for (const auto& [name, id, into] : copies) {
    EBB_ASSIGN_OR_RETURN(Stream made, device_.NewStream(name, TasksMax(id)));
    into->emplace(std::move(made));
  }
  const std::tuple<const char*, StreamId, std::optional<Stream>*> on_host[] = {
      {"ebb host sum", StreamId::kHostSum, &host_sum_},
      {"ebb host upd", StreamId::kHostUpdate, &host_update_},
      {"ebb read par", StreamId::kReadParameters, &read_parameters_},
      {"ebb par read", StreamId::kReadParameters, &parameters_read_},
      {"ebb read sta", StreamId::kReadStates, &read_states_},
      {"ebb sta read", StreamId::kReadStates, &states_read_},
      {"ebb write", StreamId::kWrite, &write_},
      {"ebb written", StreamId::kWrite, &written_}};
  for (const auto& [name, id, into] : on_host) {
    EBB_ASSIGN_OR_RETURN(Stream made, device_.NewHostStream(name, TasksMax(id)));
    into->emplace(std::move(made));
  }
  if (!storage_->HasFiles()) return absl::OkStatus();
  EBB_ASSIGN_OR_RETURN(Stream check,
                       device_.NewHostStream("ebb check", TasksMax(StreamId::kCheck)));
  check_.emplace(std::move(check));
  return absl::OkStatus();
}

// Room for all of two steps, so that enqueuing waits for no work. Without a plan ranks only agree that
// there is none.
int Executor::TasksMax(sharding::StreamId id) const {
  size_t tasks = 0;
  for (size_t i = 0; own_ != nullptr && i < plan().operations.size(); ++i) {
    const sharding::Operation& operation = plan().operations[i];
    if (operation.stream != id) continue;
    constexpr size_t kOwn = 5;  // begin, work, end, and what ties both streams of transfers
    tasks += kOwn + sharding::kLines + operation.moves.size() + operation.parts.size();
    if (operation.kind == sharding::OperationKind::kFillSecondary)
      tasks += operation.parts.size();  // a copy each of what is trainable and what is frozen
  }
  return kStreamTasksMax + 2 * static_cast<int>(tasks);
}

absl::Status Executor::MakeCommunicator(absl::string_view name, std::optional<Communicator>& into) {
  EBB_ASSIGN_OR_RETURN(Communicator made, world_.NewCommunicator(OptionsOf(name)));
  into.emplace(std::move(made));
  return absl::OkStatus();
}

absl::Status Executor::SplitWorld(absl::string_view name, int group,
                                  std::optional<Communicator>& into) {
  CommunicatorOptions options = OptionsOf(name);
  options.reduction_group = 0;  // the world's need not divide its parts
  EBB_ASSIGN_OR_RETURN(const World part, world_.Split(/*colour=*/group, /*key=*/rank_, options));
  EBB_ASSIGN_OR_RETURN(Communicator made, part.NewCommunicator(options));
  into.emplace(std::move(made));
  return absl::OkStatus();
}

// One communicator for gathers and one for reductions, so that neither waits for the other.
absl::Status Executor::MakeGatherCommunicator() {
  const sharding::Decisions& decisions = plan().decisions;
  shard_ = rank_ % decisions.shards;
  replica_ = rank_ / decisions.shards;
  if (decisions.replicas() == 1) return MakeCommunicator("gather", gather_communicator_);
  return SplitWorld("gather", replica_, gather_communicator_);
}

// Gathers of either kind are on one stream; these reach the ranks of one group only.
absl::Status Executor::MakeSecondaryCommunicator() {
  const sharding::Decisions& decisions = plan().decisions;
  if (!decisions.has_secondary()) return absl::OkStatus();
  return SplitWorld("gather secondary", rank_ / decisions.secondary_shards,
                    secondary_communicator_);
}

absl::Status Executor::MakeReduceCommunicators() {
  if (plan().decisions.replicas() == 1) return MakeCommunicator("reduce", reduce_communicator_);
  EBB_RETURN_IF_ERROR(SplitWorld("reduce", replica_, reduce_communicator_));
  EBB_RETURN_IF_ERROR(SplitWorld("replicas", shard_, replicas_communicator_));
  return MakeCommunicator("exchange", exchange_communicator_);
}

absl::Status Executor::MakeState() {
  EBB_RETURN_IF_ERROR(Storage::Create(
      device_, own_->plan, config_, shard_, world_.local_size(),
      absl::StrCat(options_.name, "-rank", rank_), ledger_,
      [this](StateClass state, int64_t bytes, std::string_view what) {
        return AllocatePool(state, bytes, what);
      },
      storage_));
  EBB_RETURN_IF_ERROR(storage_->TakeStateStaging());
  // Auto: what is written from here on is summed, until it is known what is not to be.
  const VerifySwap verify = config_.ebb.verify_swap;
  swap_verifier_.emplace(plan(), model_, verify == VerifySwap::kAuto ? VerifySwap::kAll : verify,
                         *storage_, errors_);
  EBB_RETURN_IF_ERROR(MakeOffloadStreams());
  EBB_RETURN_IF_ERROR(MakeTimeline());
  profiler_ranges_.emplace(plan().unit_names);
  update_table_ = UpdateTable(model_, config_, plan(), shard_);
  state_names_ =
      OptimizerStateNames(model_, config_, options_.optimizer ? &*options_.optimizer : nullptr);
  const std::vector<sharding::SubGroup>& groups = plan().pools.homes.sub_groups;
  own_optimizer_enqueues_ =
      options_.optimizer && kernels_->enqueues() &&
      std::any_of(groups.begin(), groups.end(),
                  [](const sharding::SubGroup& group) { return group.tier == Tier::kDevice; });

  const sharding::Decisions& decisions = plan().decisions;
  const size_t units = model_.units.size(), visits = model_.forward.size();
  EBB_RETURN_IF_ERROR(ControlBlock::Create(device_, units, static_cast<size_t>(size_),
                                           update_table_.sets().size(), update_table_.runs(),
                                           control_block_));
  if (decisions.has_norms())
    EBB_RETURN_IF_ERROR(NormExchange::Create(device_, plan(), update_table_, shard_, norms_));
  control_block_->CopyRuns(*update_);  // before whatever is updated on that stream
  step_constants_.emplace(config_, update_table_, *control_block_,
                          /*own_optimizer=*/options_.optimizer.has_value());
  outcome_.emplace(StepOutcome::Parts{.config = &config_,
                                      .errors = &errors_,
                                      .peers = &peers_,
                                      .control = &*control_block_,
                                      .constants = &*step_constants_,
                                      .messages = &messages_,
                                      .adds_squares = replica_ == 0});
  requested_.resize(decisions.keeps_step_gradients ? visits : units);
  for (size_t v = 0; v < visits; ++v) {
    const size_t unit = static_cast<size_t>(model_.forward[v].unit);
    requested_[decisions.keeps_step_gradients ? v : unit].resize(
        plan().layout.units[unit].trainable.placements.size());
    const int64_t bytes = model_.forward[v].output_bytes, size = SizeOf(decisions.compute);
    boundary_dtypes_.push_back(bytes % size == 0 ? decisions.compute : DType::kInt8);
    boundary_elements_.push_back(bytes % size == 0 ? bytes / size : bytes);
  }
  return MakeIssuer();
}

}  // namespace ebb
