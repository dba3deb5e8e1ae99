// Create: streams, communicators, plans, pools, and the first values.
#include <algorithm>
#include <cmath>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/interval.h"

namespace ebb {

using sharding::OperationKind;
using sharding::Section;

absl::StatusOr<std::unique_ptr<Executor>> Executor::Create(World world, Device device,
                                                           ModelSpec model, const Config& config,
                                                           EngineOptions options) {
  EBB_RETURN_IF_ERROR(config.Validate());
  EBB_RETURN_IF_ERROR(Validate(model));
  EBB_ASSIGN_OR_RETURN(Config resolved, config.ForWorld(world.size()));
  std::unique_ptr<Executor> executor(new Executor(std::move(world), std::move(device),
                                                  std::move(model), std::move(resolved),
                                                  std::move(options)));
  EBB_RETURN_IF_ERROR(executor->Initialise());
  return executor;
}

absl::Status Executor::Initialise() {
  EBB_RETURN_IF_ERROR(MakeStreams());
  absl::Status own = CheckGroups();
  if (own.ok()) own = CheckOptimizer();
  if (own.ok()) {
    absl::StatusOr<sharding::Plan> step = sharding::PlanStep(Inputs());
    absl::StatusOr<sharding::Plan> walk = sharding::PlanWalk(Inputs());
    own = !step.ok() ? step.status() : walk.status();
    if (own.ok()) {
      own_ = std::make_unique<Runnable>();
      own_->plan = *std::move(step);
      walk_ = std::make_unique<Runnable>();
      walk_->plan = *std::move(walk);
    }
  }
  EBB_RETURN_IF_ERROR(AgreeOnStatus(*control_, *reduce_, own));
  EBB_RETURN_IF_ERROR(AgreeOnPlan(*control_, *reduce_, model_, config_, own_->plan));
  if (kPoisonReleased) EBB_RETURN_IF_ERROR(AgreeOnInitialValues(*control_, *reduce_, model_));
  EBB_RETURN_IF_ERROR(MakeShardGroups());
  EBB_RETURN_IF_ERROR(AgreeOnStatus(*control_, *reduce_, MakeState()));
  EBB_RETURN_IF_ERROR(AgreeOnStatus(*control_, *reduce_, FillSlices()));
  EBB_RETURN_IF_ERROR(SpreadSlices(/*masters=*/true, /*parameters=*/true, /*states=*/false));
  if (rank_ == 0) {
    for (const std::string& remark : config_.remarks)
      LogInfo(absl::StrCat(options_.name, ": ", remark));
    const sharding::Decisions& decisions = plan().decisions;
    const std::string_view timing = sharding::Name(decisions.timing);
    const int64_t group = config_.ebb.reduction_group;
    const std::string cut = decisions.replicas() == 1
                                ? ""
                                : absl::StrCat(" cut over groups of ", decisions.shards, " ranks");
    LogInfo(absl::StrCat(options_.name, ": ", size_, " ranks on ", device_.description(),
                         ", stage ", decisions.stage, cut, ", reduction group ",
                         decisions.replicas() > 1 ? decisions.shards
                         : group == 0             ? size_
                                                  : group,
                         ", reduced once a ", config_.reduces_at_round() ? "round" : "step",
                         ", updates ", std::string(timing), ": ", decisions.timing_reason));
  }
  return absl::OkStatus();
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

CommunicatorOptions Executor::OptionsOf(absl::string_view name) const {
  return {.name = absl::StrCat(options_.name, " ", name),
          .reduction_group = static_cast<int>(config_.ebb.reduction_group),
          .timeout_seconds = config_.ebb.timeout_seconds};
}

absl::Status Executor::MakeStreams() {
  EBB_ASSIGN_OR_RETURN(Communicator control, world_.NewCommunicator(OptionsOf("control")));
  control_.emplace(std::move(control));
  const auto stream = [&](std::string_view name, std::optional<Stream>& into) {
    absl::StatusOr<Stream> made = device_.NewStream(name);
    if (made.ok()) into.emplace(*std::move(made));
    return made.status();
  };
  EBB_RETURN_IF_ERROR(stream("ebb gather", gather_));
  EBB_RETURN_IF_ERROR(stream("ebb reduce", reduce_));
  EBB_RETURN_IF_ERROR(stream("ebb update", update_));
  for (std::optional<Event>* event : {&exchanged_, &fence_, &demand_}) {
    EBB_ASSIGN_OR_RETURN(Event made, device_.NewEvent());
    event->emplace(std::move(made));
  }
  for (size_t i = 0; i < model_.units.size() + 2; ++i) {
    EBB_ASSIGN_OR_RETURN(Event made, device_.NewEvent());
    (i < 2 ? updates_done_ : updated_).push_back(std::move(made));
  }
  return absl::OkStatus();
}

// One communicator for gathers and one for reductions, so that neither waits for the other.
absl::Status Executor::MakeShardGroups() {
  const sharding::Decisions& decisions = plan().decisions;
  shard_ = rank_ % decisions.shards;
  replica_ = rank_ / decisions.shards;
  const auto of_world = [&](absl::string_view name, std::optional<Communicator>& into) {
    absl::StatusOr<Communicator> made = world_.NewCommunicator(OptionsOf(name));
    if (made.ok()) into.emplace(*std::move(made));
    return made.status();
  };
  const auto of_group = [&](int group, std::optional<Communicator>& into) {
    absl::StatusOr<Communicator> made = control_->Split(/*colour=*/group, /*key=*/rank_);
    if (made.ok()) into.emplace(*std::move(made));
    return made.status();
  };
  if (decisions.replicas() == 1) {
    EBB_RETURN_IF_ERROR(of_world("gather", gather_communicator_));
    return of_world("reduce", reduce_communicator_);
  }
  EBB_RETURN_IF_ERROR(of_group(replica_, gather_communicator_));
  EBB_RETURN_IF_ERROR(of_group(replica_, reduce_communicator_));
  EBB_RETURN_IF_ERROR(of_group(shard_, replicas_communicator_));
  return of_world("exchange", exchange_communicator_);
}

absl::Status Executor::MakeState() {
  EBB_ASSIGN_OR_RETURN(Storage storage, Storage::Create(device_, own_->plan, shard_, ledger_));
  storage_.emplace(std::move(storage));
  const sharding::Decisions& decisions = plan().decisions;
  EBB_RETURN_IF_ERROR(Prepare(*own_));
  EBB_RETURN_IF_ERROR(Prepare(*walk_));
  MakeUpdateRuns();

  const size_t units = model_.units.size(), visits = model_.forward.size();
  squares_.assign(units, 0);
  squares_stale_.assign(units, 0);
  contributions_.assign(units, 0);
  records_.resize(static_cast<size_t>(size_));
  requested_.resize(decisions.keeps_step_gradients ? visits : units);
  single_reduce_.resize(visits);
  single_all_reduce_.resize(visits);
  single_gather_.resize(units);
  for (size_t v = 0; v < visits; ++v) {
    const int visit = static_cast<int>(v), unit = static_cast<int>(model_.forward[v].unit);
    const Section& section = plan().layout.units[unit].trainable;
    requested_[decisions.keeps_step_gradients ? v : static_cast<size_t>(unit)].resize(
        section.placements.size());
    std::byte* const source = decisions.casts() ? storage_->Staging(plan().pools.staging_cast)
                                                : storage_->Gradient(visit);
    std::byte* const slice = source + SliceOffset(unit, decisions.reduced());
    single_reduce_[v] = {{.send = source, .receive = slice, .count = section.shard}};
    single_all_reduce_[v] = {{.send = slice, .receive = slice, .count = section.shard}};
    const int64_t bytes = model_.forward[v].output_bytes, size = SizeOf(decisions.compute);
    boundary_dtypes_.push_back(bytes % size == 0 ? decisions.compute : DType::kInt8);
    boundary_elements_.push_back(bytes % size == 0 ? bytes / size : bytes);
  }
  for (size_t u = 0; u < units; ++u) single_gather_[u] = GatherSpans(static_cast<int>(u));
  if (!config_.ebb.trace.empty()) {
    if (rank_ == 0) EBB_RETURN_IF_ERROR(Timeline::Create(config_.ebb.trace));
    timeline_ = std::make_unique<Timeline>(Timeline::Options{.rank = rank_, .name = options_.name});
    for (int s = 0; s < sharding::kStreams; ++s)
      timeline_->AddTrack(std::string(sharding::Name(static_cast<sharding::StreamId>(s))));
  }
  return absl::OkStatus();
}

std::vector<CollectiveSpan> Executor::GatherSpans(int unit) const {
  std::vector<CollectiveSpan> spans;
  for (const bool trainable : {true, false}) {
    const sharding::UnitLayout& layout = plan().layout.units[unit];
    const int64_t shard = trainable ? layout.trainable.shard : layout.frozen.shard;
    if (shard > 0)
      spans.push_back({.send = storage_->Slice(unit, trainable),
                       .receive = storage_->Whole(unit, trainable),
                       .count = shard});
  }
  return spans;
}

// Makes the events of a plan's operations and the spans of its collectives.
absl::Status Executor::Prepare(Runnable& run) {
  const size_t operations = run.plan.operations.size();
  run.spans.resize(operations);
  run.begin_ns.resize(operations);
  run.issued.resize(operations);
  for (int kind = 0; kind < kKinds; ++kind)
    run.bytes_of[kind] = run.plan.BytesOf(static_cast<OperationKind>(kind));
  for (size_t index = 0; index < operations; ++index) {
    EBB_ASSIGN_OR_RETURN(Event event, device_.NewEvent());
    run.events.push_back(std::move(event));
    const sharding::Operation& operation = run.plan.operations[index];
    for (const sharding::Part& part : operation.parts) {
      const int unit = part.unit;
      const Section& section = run.plan.layout.units[unit].trainable;
      std::vector<CollectiveSpan>& spans = run.spans[index];
      switch (operation.kind) {
        case OperationKind::kGather: {
          const std::vector<CollectiveSpan> own = GatherSpans(unit);
          spans.insert(spans.end(), own.begin(), own.end());
          break;
        }
        case OperationKind::kRefresh:
          spans.push_back({.send = storage_->Slice(unit, true),
                           .receive = storage_->Whole(unit, true),
                           .count = section.shard});
          break;
        case OperationKind::kGatherGradient:
          spans.push_back({.send = storage_->GradientSlice(unit),
                           .receive = storage_->ReducedGradient(unit),
                           .count = section.shard});
          break;
        case OperationKind::kReduce: {
          spans.push_back({.send = ReduceSource(run.plan, part),
                           .receive = SummedSlice(run.plan, part),
                           .count = section.shard});
          break;
        }
        case OperationKind::kAllReduce: {
          std::byte* const slice = SummedSlice(run.plan, part);
          spans.push_back({.send = slice, .receive = slice, .count = section.shard});
          break;
        }
        default:
          break;
      }
    }
  }
  return absl::OkStatus();
}

// Values.

// Fills this rank's slices from the parameters' own initialisers, spread over the device's threads.
absl::Status Executor::FillSlices() {
  struct Piece {
    int unit = 0;
    bool trainable = true;
    sharding::Interval interval;
  };
  constexpr int64_t kPieceElements = int64_t{1} << 18;
  std::vector<Piece> pieces;
  for (size_t u = 0; u < model_.units.size(); ++u) {
    for (const bool trainable : {true, false}) {
      const sharding::UnitLayout& layout = plan().layout.units[u];
      for (sharding::Interval interval :
           sharding::IntervalsOf(trainable ? layout.trainable : layout.frozen, shard_)) {
        for (; interval.begin < interval.end;
             interval.begin += kPieceElements, interval.offset += kPieceElements) {
          sharding::Interval piece = interval;
          piece.end = std::min(piece.end, piece.begin + kPieceElements);
          pieces.push_back({static_cast<int>(u), trainable, piece});
        }
      }
    }
  }
  std::mutex mutex;
  absl::Status first_error;
  compute_.team().Run(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Piece& piece = pieces[static_cast<size_t>(i)];
      absl::Status status = FillPiece(piece.unit, piece.trainable, piece.interval);
      const std::lock_guard lock(mutex);
      if (first_error.ok()) first_error = std::move(status);
    }
  });
  return first_error;
}

absl::Status Executor::FillPiece(int unit, bool trainable, const sharding::Interval& interval) {
  const ParameterSpec& parameter = model_[interval.parameter];
  const size_t count = static_cast<size_t>(interval.end - interval.begin);
  Slice slice{.parameter = interval.parameter,
              .name = parameter.name,
              .shape = parameter.shape,
              .begin = interval.begin,
              .end = interval.end};
  std::vector<float> values;
  std::span<float> out;
  if (trainable) {
    out = {storage_->MasterSlice(unit) + interval.offset, count};
  } else {
    values.resize(count);
    out = values;
  }
  const auto named = [&](const absl::Status& status) {
    return absl::Status(
        status.code(), absl::StrCat("initial values of parameter '", parameter.name, "', elements ",
                                    slice.begin, " to ", slice.end, ": ", status.message()));
  };
  if (absl::Status status = parameter.init(slice, out); !status.ok()) return named(status);
  if (kPoisonReleased && count > 1) {
    // A hidden state, such as a random generator, gives other values when the same elements are
    // asked for in another cut.
    std::vector<float> again(std::min<size_t>(count / 2 + 1, 4096));
    slice.begin = interval.end - static_cast<int64_t>(again.size());
    if (absl::Status status = parameter.init(slice, again); !status.ok()) return named(status);
    const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
    if (!std::equal(again.begin(), again.end(), out.end() - static_cast<int64_t>(again.size()),
                    same)) {
      return named(absl::InvalidArgumentError(
          "asked twice, in different cuts, the initialiser gave different values; it must be a "
          "pure function of name and index"));
    }
  }
  if (!trainable) {
    ThreadTeam caller_only(1);
    optim::Cast(caller_only, out.data(), DType::kFloat32,
                storage_->Slice(unit, false) + interval.offset * SizeOf(config_.compute),
                config_.compute, static_cast<int64_t>(count), optim::Rounding::kParameter);
  }
  return absl::OkStatus();
}

// Makes what ranks keep whole of masters, parameters and states agree with the slices that were
// filled or written.
absl::Status Executor::SpreadSlices(bool masters, bool parameters, bool states) {
  const sharding::Decisions& decisions = plan().decisions;
  const bool stage0 = decisions.stage == 0;
  const auto gather = [&](const std::vector<CollectiveSpan>& spans, DType dtype) {
    absl::Status called = gather_communicator_->AllGather(*gather_, spans, dtype);
    if (!called.ok()) gather_communicator_->Abort(called);  // the others are waiting in it
    gather_->WaitIdle();
    return called;
  };
  for (size_t i = 0; i < model_.units.size(); ++i) {
    const int unit = static_cast<int>(i);
    const sharding::UnitLayout& layout = plan().layout.units[i];
    std::vector<CollectiveSpan> fp32, compute;
    if (stage0 && masters && layout.trainable.shard > 0) {
      fp32.push_back({.send = storage_->MasterSlice(unit),
                      .receive = storage_->Master(unit),
                      .count = layout.trainable.shard});
    }
    for (int k = 0;
         states && stage0 && k < decisions.optimizer_states && layout.trainable.shard > 0; ++k) {
      fp32.push_back({.send = storage_->StateSlice(unit, k),
                      .receive = storage_->State(unit, k),
                      .count = layout.trainable.shard});
    }
    EBB_RETURN_IF_ERROR(gather(fp32, DType::kFloat32));
    if (masters && layout.trainable.shard > 0 && storage_->UpdatedParameter(unit) != nullptr) {
      optim::Cast(gather_->team(), storage_->Master(unit), DType::kFloat32,
                  storage_->UpdatedParameter(unit), decisions.compute,
                  storage_->UpdatedElements(unit), optim::Rounding::kParameter);
    }
    if (decisions.kept_whole[i] && (parameters || masters)) compute = GatherSpans(unit);
    EBB_RETURN_IF_ERROR(gather(compute, decisions.compute));
  }
  return gather_communicator_->status();
}

}  // namespace ebb
