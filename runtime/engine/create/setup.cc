#include "ebb/runtime/engine/create/setup.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/create/measure.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/issue/issuer.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/engine/ranks/reduction_group.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/fit/budget.h"
#include "ebb/sharding/fit/offload_ratio.h"

namespace ebb {
absl::StatusOr<std::unique_ptr<EngineParts>> MakeEngine(World world, Device device, ModelSpec model,
                                                        const Config& config,
                                                        EngineOptions options) {
  EBB_RETURN_IF_ERROR(config.Validate());
  if (options.error.ok()) EBB_RETURN_IF_ERROR(Validate(model));
  EBB_ASSIGN_OR_RETURN(Config resolved, config.ForWorld(world.size()));
  model = DivideByDType(std::move(model), resolved.compute);
  if (options.optimizer) {
    std::string overruled = sharding::WhatOwnOptimizerOverrules(config);
    if (!overruled.empty()) resolved.remarks.push_back(std::move(overruled));
  }
  if (options.compute.native != nullptr && !HostReaches(device)) {
    EBB_ASSIGN_OR_RETURN(device, Device::Cuda(device.ordinal(), options.compute));
  }
  auto parts = std::make_unique<EngineParts>(EngineInputs{.given_world = world,
                                                          .world = world,
                                                          .device = std::move(device),
                                                          .model = std::move(model),
                                                          .config = std::move(resolved),
                                                          .options = std::move(options)});
  EBB_RETURN_IF_ERROR(Setup(*parts).Make());
  parts->program.emplace(parts->plans.plan());
  return parts;
}

absl::Status Setup::Make() {
  EngineInputs& inputs = with_.inputs;
  EBB_ASSIGN_OR_RETURN(inputs.world, inputs.given_world.On(inputs.device));
  EBB_ASSIGN_OR_RETURN(with_.kernels.device, optim::Kernels::For(inputs.device));
  EBB_ASSIGN_OR_RETURN(with_.kernels.host, optim::Kernels::For(Device::Cpu(1)));
  Measuring measuring(with_);
  absl::Status own = inputs.options.error;
  if (own.ok()) own = CheckGroups();
  if (own.ok()) own = CheckOptimizer();
  if (own.ok()) measuring.ChooseRatioByCap();
  if (own.ok()) own = with_.plans.Plan();
  EBB_RETURN_IF_ERROR(with_.communicators.MakeControl(with_.ledger));
  EBB_RETURN_IF_ERROR(
      with_.streams.Make(inputs.device, with_.plans.has_plans() ? &plan() : nullptr));
  EBB_RETURN_IF_ERROR(AgreeOnPlanned(with_, own));
  EBB_RETURN_IF_ERROR(AgreeOnPlans(Control(), inputs, with_.plans.Fingerprint()));
  EBB_RETURN_IF_ERROR(
      AgreeOnInitialValues(Control(), inputs.model, inputs.options.initial_values_of_rank_0));
  EBB_RETURN_IF_ERROR(with_.communicators.MakeGather(decisions().shards));
  EBB_RETURN_IF_ERROR(measuring.Measure());
  // No rank waits on its device for another rank here, because that one may be freeing memory of
  // the measurements.
  EBB_RETURN_IF_ERROR(with_.communicators.MakeSecondary(decisions().secondary_shards));
  EBB_RETURN_IF_ERROR(with_.communicators.MakeReduce(decisions().shards));
  EBB_RETURN_IF_ERROR(CheckHostMemory(inputs, plan().pools, Control(), with_.host_room));
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), MakeMemory()));
  EBB_RETURN_IF_ERROR(with_.collective_pools.Show(*with_.storage, plan().pools));
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), with_.state->FillSlices()));
  EBB_RETURN_IF_ERROR(with_.state->SpreadFilled());
  EBB_RETURN_IF_ERROR(measuring.ChooseVerifySwap());
  if (inputs.rank() == 0) LogMade();
  return absl::OkStatus();
}

void Setup::LogMade() const {
  const EngineInputs& inputs = with_.inputs;
  const std::string& name = inputs.options.name;
  for (const std::string& warning : inputs.config.warnings)
    LogWarning(absl::StrCat(name, ": ", warning));
  const std::string queues =
      WarnOfFewQueues(StreamsOfDevice(), std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"));
  if (!queues.empty()) LogWarning(absl::StrCat(name, ": ", queues));
  for (const std::string& remark : inputs.config.remarks) LogInfo(absl::StrCat(name, ": ", remark));
  const std::string apart = WhatPartsDoApart();
  if (!apart.empty()) LogWarning(absl::StrCat(name, ": ", apart));
  const sharding::Decisions& decided = decisions();
  const std::string unused =
      sharding::WhyNoneIsOffloaded(decided, plan().pools.placement, inputs.config);
  if (!unused.empty()) LogWarning(absl::StrCat(name, ": ", unused));
  const std::string_view timing = sharding::Name(decided.timing);
  const std::string cut =
      decided.replicas() == 1 ? "" : absl::StrCat(" cut over groups of ", decided.shards, " ranks");
  LogInfo(absl::StrCat(name, ": ", inputs.size(), inputs.size() == 1 ? " rank on " : " ranks on ",
                       inputs.device.description(), ", stage ", decided.stage, cut,
                       ", reduction group ",
                       ReductionGroupInEffect(inputs.world, inputs.config, decided.shards),
                       ", reduced once a ", inputs.config.reduces_at_round() ? "round" : "step",
                       ", updates ", std::string(timing), ": ", decided.timing_reason));
}

// A trainer may divide one model over the parts of a world (World::Split). Each part then clips and
// skips by its own gradients. The part of world rank 0 says it, because there may be many parts.
std::string Setup::WhatPartsDoApart() const {
  const EngineInputs& inputs = with_.inputs;
  const std::vector<int>& of_world = inputs.world.backend()->me().world_ranks;
  if (!inputs.world.is_part() || std::find(of_world.begin(), of_world.end(), 0) == of_world.end())
    return "";
  std::vector<std::string> which;
  if (inputs.config.gradient_clipping > 0) which.emplace_back("clipping (gradient_clipping)");
  if (inputs.config.compute == DType::kFloat16) {
    which.emplace_back("the loss scale (fp16)");
  } else if (inputs.config.checks_overflow()) {
    which.emplace_back("skipped steps (ebb.check_overflow)");
  }
  if (decisions().has_norms()) which.emplace_back("the ratios of LAMB or LARS (optimizer.type)");
  if (which.empty()) return "";
  return absl::StrCat("its world is a part of another, with ", inputs.size(), " of ",
                      inputs.world.backend()->me().whole_size,
                      " ranks, and only the part's gradients decide about ",
                      absl::StrJoin(which, ", "),
                      ". If the parts hold one model, they do this differently from each other");
}

// With the trainer's, the one that zeroes memory, the crossings of host streams, and one of NCCL's
// for each communicator. None of CUDA's on a CPU.
int Setup::StreamsOfDevice() const {
  if (HostReaches(with_.inputs.device)) return 0;
  const bool has_nccl = with_.inputs.uses_nccl();
  const auto lanes = std::count_if(
      with_.communicators.of_steps().begin(), with_.communicators.of_steps().end(),
      [](const std::optional<Communicator>& communicator) { return communicator.has_value(); });
  return 2 + with_.streams.count() + (has_nccl ? 1 + static_cast<int>(lanes) : 0);
}

// A group that the config names and no parameter has is a misspelling.
absl::Status Setup::CheckGroups() const {
  std::string missing;
  for (const auto& [name, group] : with_.inputs.config.ebb.parameter_groups) {
    const bool used =
        std::any_of(with_.inputs.model.parameters.begin(), with_.inputs.model.parameters.end(),
                    [&](const ParameterSpec& parameter) { return parameter.group == name; });
    if (!used)
      absl::StrAppend(&missing, missing.empty() ? "" : ", ", "ebb.parameter_groups.", name);
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(missing, ": no parameter of the model is in this group (ParameterSpec::group)"));
}

absl::Status Setup::CheckOptimizer() const {
  if (!with_.inputs.options.optimizer) return absl::OkStatus();
  const auto refuse = [](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("EngineOptions::optimizer: ", why));
  };
  if (with_.inputs.options.optimizer->update == nullptr)
    return refuse("it has no update function; leave the optimizer out to use the config's");
  const std::vector<std::string>& states = with_.inputs.options.optimizer->states;
  for (size_t k = 0; k < states.size(); ++k) {
    if (states[k].empty())
      return refuse(absl::StrCat("state ", k, " has no name; Read and Write need one"));
    if (std::find(states.begin(), states.begin() + static_cast<int64_t>(k), states[k]) !=
        states.begin() + static_cast<int64_t>(k))
      return refuse(absl::StrCat("two states named '", states[k], "'; give each its own name"));
  }
  for (const auto& [name, group] : with_.inputs.config.ebb.parameter_groups) {
    if (!group.weight_decay && !group.optimizer) continue;
    return refuse(absl::StrCat("ebb.parameter_groups.", name, ".",
                               group.weight_decay ? "weight_decay" : "optimizer",
                               " is the config's optimizer's, which it replaces; act on "
                               "UpdateSlice::group instead (lr_factor is in its learning_rate)"));
  }
  return absl::OkStatus();
}

// Pools, files, and all that lives in them or works on them.
absl::Status Setup::MakeMemory() {
  EngineInputs& inputs = with_.inputs;
  EBB_RETURN_IF_ERROR(Storage::Create(
      inputs.device, plan(), inputs.config, Slice(), inputs.world.local_size(),
      absl::StrCat(inputs.options.name, "-rank", inputs.rank()), with_.ledger,
      [&inputs](StateClass state, int64_t bytes, std::string_view what) {
        return AllocatePool(inputs, state, bytes, what);
      },
      with_.storage));
  EBB_RETURN_IF_ERROR(with_.storage->TakeStateStaging());
  // Auto: writes are summed from now on, until the measurement decides.
  const VerifySwap verify = inputs.config.ebb.verify_swap;
  with_.verifier.emplace(
      sharding::LayOutSwapFiles(plan()), inputs.model.units,
      verify == VerifySwap::kAuto ? VerifySwap::kAll : verify, with_.storage->files(),
      [&errors = with_.outcome.errors](absl::Status status) { errors.Fail(std::move(status)); });
  EBB_RETURN_IF_ERROR(with_.streams.MakeOffload(inputs.device, plan()));
  EBB_RETURN_IF_ERROR(with_.timeline.Make(plan()));
  with_.updates.table =
      UpdateTable(inputs.model, inputs.config, plan(), Slice(), decisions().stochastic_rounding);
  if (inputs.own_optimizer() != nullptr)
    with_.updates.own.emplace(*inputs.own_optimizer(), inputs.model, inputs.config, plan(),
                              Slice());
  with_.updates.state_names =
      OptimizerStateNames(inputs.model, inputs.config, inputs.own_optimizer());
  ControlBlock::Sizes sizes{.units = inputs.model.units.size(),
                            .ranks = static_cast<size_t>(inputs.size()),
                            .sets = with_.updates.table.sets().size()};
  const bool has_norms = decisions().has_norms();
  if (has_norms) {
    sizes.norm_sums = sizes.sets;
    if (const sharding::NormRecords records = sharding::NormRecordsOf(plan()); records.exchanged) {
      sizes.norm_record = static_cast<size_t>(records.bytes());
      sizes.norm_records = static_cast<size_t>(decisions().shards);
    }
  }
  EBB_RETURN_IF_ERROR(
      ControlBlock::Create(inputs.device, sizes, with_.updates.table.runs(), with_.control));
  if (has_norms) with_.updates.norms.emplace(plan(), with_.updates.table, Slice(), *with_.control);
  with_.control->CopyRuns(with_.streams.update());  // before the first update on that stream
  MakeOutcome();
  EBB_RETURN_IF_ERROR(MakeIssuer());
  MakeScopes();
  MakeCalls();
  return absl::OkStatus();
}

void Setup::MakeOutcome() {
  OutcomeParts& parts = with_.outcome;
  const EngineInputs& inputs = with_.inputs;
  parts.constants.emplace(inputs.config, with_.updates.table, *with_.control,
                          /*own_optimizer=*/inputs.options.optimizer.has_value());
  parts.outcome.emplace(StepOutcome::Parts{.config = &inputs.config,
                                           .errors = &parts.errors,
                                           .peers = &parts.peers,
                                           .control = &*with_.control,
                                           .constants = &*parts.constants,
                                           .messages = &parts.messages,
                                           .adds_squares = inputs.rank() < decisions().shards,
                                           .backwards = &parts.backwards});
}

// An optimizer of the trainer's enqueues updates on the device.
bool Setup::OwnOptimizerEnqueues() const {
  const std::vector<sharding::SubGroup>& groups = plan().pools.placement.sub_groups;
  return with_.inputs.options.optimizer && !HostReaches(with_.inputs.device) &&
         std::any_of(groups.begin(), groups.end(),
                     [](const sharding::SubGroup& group) { return group.tier == Tier::kDevice; });
}

absl::Status Setup::MakeIssuer() {
  using sharding::Lane;
  const EngineInputs& inputs = with_.inputs;
  EngineCommunicators& communicators = with_.communicators;
  OutcomeParts& outcome = with_.outcome;
  IssueParts& parts = with_.issue;
  NormExchange* const norms = with_.updates.norms ? &*with_.updates.norms : nullptr;
  parts.exchange.emplace(RecordExchange::Parts{.plan = &plan(),
                                               .of_world = &**communicators.of_world(),
                                               .of_shards = &communicators.reduce(),
                                               .control = &*with_.control,
                                               .norms = norms,
                                               .table = &with_.updates.table,
                                               .constants = &*outcome.constants,
                                               .outcome = &*outcome.outcome,
                                               .errors = &outcome.errors,
                                               .peers = &outcome.peers,
                                               .concluded = &with_.streams.concluded(),
                                               .reaches_device = HostReaches(inputs.device),
                                               .shard = Slice(),
                                               .own_enqueues = OwnOptimizerEnqueues()});
  with_.updates.call.emplace(
      UpdateCall::Parts{.own = with_.updates.own ? &*with_.updates.own : nullptr,
                        .table = &with_.updates.table,
                        .constants = &*outcome.constants,
                        .control = &*with_.control,
                        .outcome = &*outcome.outcome,
                        .errors = &outcome.errors,
                        .verifier = &*with_.verifier,
                        .device = &inputs.device,
                        .kernels = Kernels(),
                        .slice = Slice(),
                        .own_enqueues = OwnOptimizerEnqueues()});
  parts.ranges.emplace(plan().unit_names);
  parts.observer = NewIssueObserver(
      {.device = &inputs.device, .storage = &*with_.storage, .control = &*with_.control});
  if (IssueTracer* const tracer = with_.timeline.tracer()) parts.observers.Add(*tracer);
  parts.observers.Add(*parts.ranges);
  if (parts.observer != nullptr) parts.observers.Add(*parts.observer);
  EBB_RETURN_IF_ERROR(LinkPlan(with_));
  parts.issuer = std::make_unique<Issuer>(
      Issuer::Parts{.order = &*parts.order,
                    .lanes = {nullptr, communicators.at(Lane::kGather),
                              communicators.at(Lane::kSecondary), communicators.at(Lane::kReduce),
                              communicators.at(Lane::kReplicas), communicators.of_world()},
                    .storage = &*with_.storage,
                    .control = &*with_.control,
                    .verifier = &*with_.verifier,
                    .kernels = Kernels(),
                    .updates = &*with_.updates.call,
                    .exchange = &*parts.exchange,
                    .outcome = &*outcome.outcome,
                    .errors = &outcome.errors,
                    .peers = &outcome.peers,
                    .observers = &parts.observers});
  parts.runner.emplace(FragmentRunner::Parts{.progress = &with_.scopes.progress,
                                             .plans = &with_.plans,
                                             .order = &*parts.order,
                                             .issuer = parts.issuer.get(),
                                             .outcome = &*outcome.outcome,
                                             .errors = &outcome.errors,
                                             .timeline = &with_.timeline});
  with_.state.emplace(
      StateAccess::Parts{
          .initial = {.model = &inputs.model,
                      .config = &inputs.config,
                      .own_optimizer = inputs.options.optimizer.has_value(),
                      .of_rank_0 = inputs.options.initial_values_of_rank_0},
          .names = &with_.updates.state_names,
          .errors = &outcome.errors,
          .gather = &communicators.gather(),
          .rank = inputs.rank(),
          .shards = decisions().shards,
          .compute = decisions().compute,
          .master = decisions().stochastic_rounding ? decisions().compute : DType::kFloat32,
          .parameters_on_device = decisions().parameter_tier == Tier::kDevice},
      StateValues::Parts{.plan = &plan(),
                         .config = &inputs.config,
                         .device = &inputs.device,
                         .team = &with_.streams.compute().team(),
                         .storage = &*with_.storage,
                         .order = &*parts.order,
                         .issuer = parts.issuer.get(),
                         .verifier = &*with_.verifier,
                         .errors = &outcome.errors,
                         .shard = Slice()},
      Control());
  return absl::OkStatus();
}

void Setup::MakeScopes() {
  ScopeParts& parts = with_.scopes;
  OutcomeParts& outcome = with_.outcome;
  StreamOrder& order = *with_.issue.order;
  FragmentRunner& runner = *with_.issue.runner;
  parts.open.emplace(OpenScopes::Parts{.inputs = &with_.inputs,
                                       .progress = &parts.progress,
                                       .runner = &runner,
                                       .order = &order,
                                       .state = &*with_.state,
                                       .notices = &parts.notices,
                                       .views = &*parts.views,
                                       .errors = &outcome.errors,
                                       .messages = &outcome.messages,
                                       .ranges = &*with_.issue.ranges,
                                       .timeline = &with_.timeline,
                                       .core = &parts.core,
                                       .calls = &with_.calls});
  parts.paused.emplace(PausedStep::Parts{.progress = &parts.progress,
                                         .runner = &runner,
                                         .scopes = &*parts.open,
                                         .notices = &parts.notices,
                                         .order = &order,
                                         .errors = &outcome.errors,
                                         .messages = &outcome.messages,
                                         .view_errors = &parts.view_errors});
}

void Setup::MakeCalls() {
  CallParts& parts = with_.call;
  OutcomeParts& outcome = with_.outcome;
  FragmentRunner& runner = *with_.issue.runner;
  parts.barrier.emplace(CallBarrier::Parts{.calls = &with_.calls,
                                           .communicators = &with_.communicators,
                                           .streams = &with_.streams,
                                           .control = &*with_.control,
                                           .peers = &outcome.peers,
                                           .errors = &outcome.errors,
                                           .outcome = &*outcome.outcome,
                                           .messages = &outcome.messages});
  parts.suspension.emplace(Suspension::Parts{.inputs = &with_.inputs,
                                             .calls = &with_.calls,
                                             .communicators = &with_.communicators,
                                             .streams = &with_.streams,
                                             .plans = &with_.plans,
                                             .storage = &*with_.storage,
                                             .pools = &with_.collective_pools,
                                             .runner = &runner,
                                             .barrier = &*parts.barrier,
                                             .peers = &outcome.peers,
                                             .errors = &outcome.errors,
                                             .outcome = &*outcome.outcome});
  parts.reads.emplace(AsyncReads::Parts{.inputs = &with_.inputs,
                                        .plans = &with_.plans,
                                        .communicators = &with_.communicators,
                                        .streams = &with_.streams,
                                        .ledger = &with_.ledger,
                                        .names = &with_.updates.state_names,
                                        .state = &*with_.state,
                                        .storage = &*with_.storage,
                                        .order = &*with_.issue.order,
                                        .issuer = with_.issue.issuer.get(),
                                        .verifier = &*with_.verifier,
                                        .errors = &outcome.errors,
                                        .core = &with_.scopes.core});
  parts.state.emplace(StateCalls::Parts{.inputs = &with_.inputs,
                                        .calls = &with_.calls,
                                        .communicators = &with_.communicators,
                                        .streams = &with_.streams,
                                        .ledger = &with_.ledger,
                                        .control = &*with_.control,
                                        .progress = &with_.scopes.progress,
                                        .runner = &runner,
                                        .state = &*with_.state,
                                        .reads = &*parts.reads,
                                        .barrier = &*parts.barrier,
                                        .suspension = &*parts.suspension,
                                        .errors = &outcome.errors,
                                        .outcome = &*outcome.outcome});
  parts.steps.emplace(Steps::Parts{.inputs = &with_.inputs,
                                   .calls = &with_.calls,
                                   .plans = &with_.plans,
                                   .progress = &with_.scopes.progress,
                                   .runner = &runner,
                                   .scopes = &*with_.scopes.open,
                                   .paused = &*with_.scopes.paused,
                                   .order = &*with_.issue.order,
                                   .observers = &with_.issue.observers,
                                   .exchange = &*with_.issue.exchange,
                                   .results = &outcome,
                                   .streams = &with_.streams,
                                   .control = &*with_.control,
                                   .compute_kernels = &Kernels().Of(with_.streams.compute()),
                                   .view_errors = &with_.scopes.view_errors,
                                   .state = &*with_.state,
                                   .suspension = &*parts.suspension,
                                   .timeline = &with_.timeline,
                                   .own_optimizer_enqueues = OwnOptimizerEnqueues()});
}

}  // namespace ebb
