#include "ebb/runtime/engine/create/setup.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/create/measure.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/matrix_groups.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/engine/ranks/reduction_group.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/fit/budget.h"
#include "ebb/sharding/placement.h"
#include "ebb/sharding/split.h"

namespace ebb {
namespace {

struct Worlds {
  World data;
  std::optional<World> verdict;  // EngineInputs::verdict
};

absl::StatusOr<Worlds> WorldsOf(const World& given, const Config& config,
                                const EngineOptions& options) {
  if (config.ebb.mesh.tensor == 1) {
    // The engine's own ranks have their verdict already.
    if (!options.verdict.has_value() || *options.verdict == given)
      return Worlds{given, std::nullopt};
    return Worlds{given, *options.verdict};
  }
  if (options.verdict.has_value()) {
    return absl::InvalidArgumentError(
        "EngineOptions::verdict is given beside \"ebb.mesh.tensor\", with which Create finds the "
        "ranks of the verdict itself: give one of them");
  }
  const Mesh mesh = MeshOf(config, given.size());
  EBB_ASSIGN_OR_RETURN(World data,
                       given.Split(/*colour=*/mesh.coordinate(given.rank(), Axis::kTensor),
                                   /*key=*/mesh.index(given.rank(), kDataAxes),
                                   {.timeout_seconds = config.ebb.timeout_seconds}));
  return Worlds{std::move(data), given};
}

// The engine cuts a model, and adds gradients up over tensor, by a mesh of its own.
absl::Status CheckCuts(const ModelSpec& model, const EngineOptions& options) {
  if (!options.verdict.has_value()) return absl::OkStatus();
  for (const ParameterSpec& parameter : model.parameters) {
    if (!parameter.split && !parameter.sums_gradient) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter '", parameter.name, "' has ", parameter.split ? "a split" : "sums_gradient",
        ", for which the engine must know the tensor ranks: give Create the whole world and "
        "\"ebb.mesh.tensor\", instead of EngineOptions::verdict"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<EngineMembers>> MakeEngine(World world, Device device,
                                                          ModelSpec model, const Config& config,
                                                          EngineOptions options) {
  EBB_RETURN_IF_ERROR(config.Validate());
  if (options.error.ok()) EBB_RETURN_IF_ERROR(Validate(model));
  EBB_ASSIGN_OR_RETURN(Config resolved, config.ForWorld(world.size()));
  EBB_ASSIGN_OR_RETURN(const Worlds worlds, WorldsOf(world, resolved, options));
  EBB_RETURN_IF_ERROR(CheckCuts(model, options));
  const auto tensor_ranks = static_cast<int>(resolved.ebb.mesh.tensor);
  const bool cuts_model = tensor_ranks > 1 && model.has_splits();
  EBB_ASSIGN_OR_RETURN(model,
                       WithBlocks(std::move(model), world.rank() % tensor_ranks, tensor_ranks));
  EBB_ASSIGN_OR_RETURN(model,
                       WithMatrixGroups(std::move(model), resolved, options.optimizer.has_value()));
  model = Divided(std::move(model), resolved, options.optimizer ? &*options.optimizer : nullptr);
  if (options.optimizer) {
    std::string overruled = sharding::WhatOwnOptimizerOverrules(config);
    if (!overruled.empty()) resolved.remarks.push_back(std::move(overruled));
  }
  if (options.compute.native != nullptr && !HostReaches(device)) {
    EBB_ASSIGN_OR_RETURN(device, Device::Cuda(device.ordinal(), options.compute));
  }
  auto members = std::make_unique<EngineMembers>(EngineInputs{.given_world = world,
                                                              .data_world = worlds.data,
                                                              .world = worlds.data,
                                                              .verdict = worlds.verdict,
                                                              .cuts_model = cuts_model,
                                                              .device = std::move(device),
                                                              .model = std::move(model),
                                                              .config = std::move(resolved),
                                                              .options = std::move(options)});
  EBB_RETURN_IF_ERROR(Setup(*members).Make());
  members->program.emplace(members->plans.plan());
  return members;
}

absl::Status Setup::Make() {
  EngineInputs& inputs = with_.inputs;
  EBB_ASSIGN_OR_RETURN(inputs.world, inputs.data_world.On(inputs.device));
  if (inputs.verdict.has_value()) {
    EBB_ASSIGN_OR_RETURN(inputs.verdict, inputs.verdict->On(inputs.device));
  }
  EBB_ASSIGN_OR_RETURN(with_.kernels.device, optim::Kernels::For(inputs.device));
  EBB_ASSIGN_OR_RETURN(with_.kernels.host, optim::Kernels::For(Device::Cpu(1)));
  const Config given = inputs.config;  // parts may choose other values for "auto"
  Measuring measuring(with_);
  absl::Status own = inputs.options.error;
  if (own.ok()) own = CheckGroups();
  if (own.ok()) own = CheckOptimizer();
  if (own.ok() && inputs.verdict.has_value()) own = CheckOverTensor(inputs.model);
  if (own.ok()) own = CheckMatricesOverTensor(inputs.model);
  if (own.ok()) measuring.ChooseRatioByCap();
  if (own.ok()) own = with_.plans.Plan();
  if (own.ok() && !with_.plans.plan().decisions.matrices.empty())
    own = with_.kernels.device->LoadProducts();
  EBB_RETURN_IF_ERROR(with_.communicators.MakeControl(with_.ledger));
  EBB_RETURN_IF_ERROR(
      with_.streams.Make(inputs.device, with_.plans.has_plans() ? &plan() : nullptr));
  EBB_RETURN_IF_ERROR(AgreeThatVerdictIsGiven(with_.Control(), inputs.verdict));
  EBB_RETURN_IF_ERROR(with_.communicators.MakeVerdict());
  EBB_RETURN_IF_ERROR(with_.communicators.MakeTensor());
  const absl::Status planned = AgreeInPart(own);
  if (inputs.verdict.has_value() && !inputs.cuts_model) {
    EBB_ASSIGN_OR_RETURN(with_.verdict_ranks,
                         AgreeOnVerdict(with_.AllRanks(), inputs, given, planned));
  } else {
    EBB_RETURN_IF_ERROR(planned);
    const World& all = inputs.of_calls();
    with_.verdict_ranks = {.mesh = MeshOf(inputs.config, all.size()), .own = all.rank()};
    for (int r = 0; r < all.size(); ++r) with_.verdict_ranks.ranks.push_back(r);
  }
  EBB_RETURN_IF_ERROR(AmongAllRanks(MeasureInPart(measuring)));
  EBB_RETURN_IF_ERROR(
      CheckHostMemory(inputs, plan().table.bytes, with_.AllRanks(), with_.host_room));
  EBB_RETURN_IF_ERROR(AmongAllRanks(MakeInPart(measuring)));
  with_.verdict_ranks.compared = decisions().compared;
  if (inputs.verdict.has_value()) {
    EBB_RETURN_IF_ERROR(AgreeOnReplicas(with_.AllRanks(), with_.verdict_ranks, inputs.model,
                                        with_.interpreter->state.filled()));
  }
  if (inputs.of_verdict().rank() == 0) LogMade();
  return absl::OkStatus();
}

// Between calls that are among the ranks of a part alone and calls among all ranks.
absl::Status Setup::AmongAllRanks(const absl::Status& of_part) {
  return with_.inputs.verdict.has_value() ? AgreeOnStatus(with_.AllRanks(), of_part) : of_part;
}

absl::Status Setup::AgreeInPart(const absl::Status& own) {
  const EngineInputs& inputs = with_.inputs;
  EBB_RETURN_IF_ERROR(AgreeOnPlanned(with_, own));
  EBB_RETURN_IF_ERROR(AgreeOnPlans(with_.Control(), inputs, with_.plans.Fingerprint()));
  EBB_RETURN_IF_ERROR(
      AgreeOnInitialValues(with_.Control(), inputs.model, inputs.options.initial_values_of_rank_0));
  return with_.communicators.MakeGather(decisions().shards);
}

absl::Status Setup::MeasureInPart(Measuring& measuring) {
  EBB_RETURN_IF_ERROR(measuring.Measure());
  // No rank waits on its device for another rank here, because that one may be freeing memory of
  // the measurements.
  EBB_RETURN_IF_ERROR(with_.communicators.MakeSecondary(decisions().secondary_shards));
  return with_.communicators.MakeReduce(decisions().shards);
}

absl::Status Setup::MakeInPart(Measuring& measuring) {
  EBB_RETURN_IF_ERROR(AgreeOnStatus(with_.Control(), MakeMemory()));
  EBB_RETURN_IF_ERROR(with_.collective_pools.Show(*with_.storage, plan().table));
  EBB_RETURN_IF_ERROR(AgreeOnStatus(with_.Control(), with_.interpreter->state.FillSlices()));
  EBB_RETURN_IF_ERROR(with_.interpreter->state.SpreadFilled());
  return measuring.ChooseVerifySwap();
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
  const std::string apart = WhatPartsDoApart(), whole = WhoKeepsFp32States();
  if (!apart.empty()) LogWarning(absl::StrCat(name, ": ", apart));
  if (!whole.empty()) LogInfo(absl::StrCat(name, ": ", whole));
  const sharding::Decisions& decided = decisions();
  if (!decided.compared.empty() && inputs.uses_nccl() && inputs.size() > 2 &&
      !inputs.config.ebb.deterministic_reduce) {
    LogWarning(absl::StrCat(
        name, ": NCCL may add the gradients of ", inputs.size(),
        " data ranks in another order for each tensor rank. Replicas of parameters that are whole "
        "over tensor may then differ, which ends a step with an error; "
        "\"ebb.deterministic_reduce\": true gives them one order"));
  }
  const std::string unused =
      sharding::WhyNoneIsOffloaded(decided, sharding::PlacementOf(plan().table), inputs.config);
  if (!unused.empty()) LogWarning(absl::StrCat(name, ": ", unused));
  const std::string_view timing = sharding::Name(decided.timing);
  const std::string cut =
      decided.replicas() == 1 ? "" : absl::StrCat(" cut over groups of ", decided.shards, " ranks");
  const int tensor_ranks = with_.verdict_ranks.mesh.size(Axis::kTensor);
  const std::string tensor = tensor_ranks == 1 ? "" : absl::StrCat(" x tensor ", tensor_ranks);
  LogInfo(absl::StrCat(name, ": ", inputs.size(), inputs.size() == 1 ? " rank" : " ranks", tensor,
                       " on ", inputs.device.description(), ", stage ", decided.stage, cut,
                       ", reduction group ",
                       ReductionGroupInEffect(inputs.world, inputs.config, decided.shards),
                       ", reduced once a ", inputs.config.reduces_at_round() ? "round" : "step",
                       ", updates ", std::string(timing), ": ", decided.timing_reason));
}

// A trainer may divide one model over the parts of a world (World::Split). Without a verdict of all
// of them, each part clips and skips by its own gradients; the ratios of LAMB and LARS are of the
// part in any case. The part of world rank 0 says it, because there may be many parts.
std::string Setup::WhatPartsDoApart() const {
  const EngineInputs& inputs = with_.inputs;
  const std::vector<int>& of_world = inputs.world.backend()->me().world_ranks;
  if (!inputs.world.is_part() || std::find(of_world.begin(), of_world.end(), 0) == of_world.end())
    return "";
  std::vector<std::string> which;
  if (!inputs.verdict.has_value()) {
    if (inputs.config.gradient_clipping > 0) which.emplace_back("clipping (gradient_clipping)");
    if (inputs.config.compute == DType::kFloat16) {
      which.emplace_back("the loss scale (fp16)");
    } else if (inputs.config.checks_overflow()) {
      which.emplace_back("skipped steps (ebb.check_overflow)");
    }
  }
  if (decisions().has_norms() && !inputs.cuts_model)
    which.emplace_back("the ratios of LAMB or LARS (optimizer.type)");
  if (which.empty()) return "";
  return absl::StrCat(
      "its world is a part of another, with ", inputs.size(), " of ",
      inputs.world.backend()->me().whole_size,
      " ranks, and only the part's gradients decide about ", absl::StrJoin(which, ", "),
      ". If the parts hold one model, they do this differently from each other",
      inputs.verdict.has_value() ? ""
                                 : ", and StepReport::gradient_norm is of the part alone; "
                                   "EngineOptions::verdict mends it");
}

// Small parameters keep fp32 states beside 8-bit ones (StateBlocks). Empty: no state has 8 bits.
std::string Setup::WhoKeepsFp32States() const {
  const ModelSpec& model = with_.inputs.model;
  const std::vector<Encoding>& encodings = decisions().state_encodings;
  if (std::none_of(encodings.begin(), encodings.end(),
                   [](const Encoding& encoding) { return encoding.block > 0; }))
    return "";
  int64_t parameters = 0, elements = 0, whole_parameters = 0, whole_elements = 0, of_muon = 0;
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    if (!model.parameters[p].trainable) continue;
    const int64_t size = Elements(model.parameters[p].shape);
    if (model.parameters[p].matrix_update == MatrixUpdate::kYes) {
      of_muon += size;
      continue;
    }
    ++parameters;
    elements += size;
    if (decisions().state_encoding(plan().layout.parameters[p].unit, 0).block > 0) continue;
    ++whole_parameters;
    whole_elements += size;
  }
  return absl::StrCat(
      "optimizer states have 8 bits; ", whole_parameters, " of ", parameters, " parameters, with ",
      whole_elements, " of ", elements,
      " elements, are small and keep fp32 states (optimizer.params.min_8bit_size ",
      with_.inputs.config.optimizer.min_8bit_size, ")",
      of_muon == 0 ? "" : absl::StrCat("; Muon's momentum of ", of_muon, " elements has 32 bits"));
}

// With the trainer's, the one that zeroes memory, the crossings of host streams, and one of NCCL's
// for each communicator. None of CUDA's on a CPU.
int Setup::StreamsOfDevice() const {
  if (HostReaches(with_.inputs.device)) return 0;
  const bool has_nccl = with_.inputs.uses_nccl();
  const auto of_steps = static_cast<int>(with_.communicators.of_steps().size());
  return 2 + with_.streams.count() + (has_nccl ? 1 + of_steps : 0);
}

// A group that the config names and no parameter has is a misspelling.
absl::Status Setup::CheckGroups() const {
  std::string missing;
  for (const auto& [name, group] : with_.inputs.config.ebb.parameter_groups) {
    const bool used =
        std::any_of(with_.inputs.model.parameters.begin(), with_.inputs.model.parameters.end(),
                    [&](const ParameterSpec& parameter) {
                      return parameter.group == name || parameter.group == GroupBeside(name);
                    });
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
      inputs.device, plan(), inputs.config, with_.Slice(), inputs.world.local_size(),
      absl::StrCat(inputs.options.name, "-rank", inputs.of_verdict().rank()), with_.ledger,
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
      [&errors = with_.errors](absl::Status status) { errors.Fail(std::move(status)); });
  EBB_RETURN_IF_ERROR(with_.streams.MakeOffload(inputs.device, plan()));
  EBB_RETURN_IF_ERROR(with_.timeline.Make(plan()));
  with_.update_table = UpdateTable(inputs.model, inputs.config, plan(), with_.Slice(),
                                   decisions().stochastic_rounding);
  if (inputs.own_optimizer() != nullptr)
    with_.own_optimizer.emplace(*inputs.own_optimizer(), inputs.model, inputs.config, plan(),
                                with_.Slice());
  with_.state_names = OptimizerStateNames(inputs.model, inputs.config, inputs.own_optimizer());
  ControlBlock::Sizes sizes{.units = inputs.model.units.size(),
                            .ranks = static_cast<size_t>(inputs.of_verdict().size()),
                            .compared = decisions().compared.size(),
                            .sets = with_.update_table.sets().size()};
  const bool has_norms = decisions().has_norms();
  if (has_norms) {
    sizes.norm_sums = sizes.sets;
    if (const sharding::NormRecords records = sharding::NormRecordsOf(plan());
        records.exchanged()) {
      sizes.norm_record = static_cast<size_t>(records.bytes());
      sizes.norm_records = static_cast<size_t>(records.ranks);
    }
  }
  EBB_RETURN_IF_ERROR(
      ControlBlock::Create(inputs.device, sizes, with_.update_table.runs(), with_.control));
  if (has_norms)
    with_.norms.emplace(plan(), inputs.model, with_.update_table, with_.Slice(), *with_.control);
  with_.control->CopyRuns(with_.streams.update());  // before the first update on that stream
  with_.ranges.emplace(plan().unit_names);
  with_.observer = NewIssueObserver(
      {.device = &inputs.device, .storage = &*with_.storage, .control = &*with_.control});
  if (IssueTracer* const tracer = with_.timeline.tracer()) with_.observers.Add(*tracer);
  with_.observers.Add(*with_.ranges);
  if (with_.observer != nullptr) with_.observers.Add(*with_.observer);
  EBB_RETURN_IF_ERROR(with_.LinkPlan());
  with_.interpreter.emplace(with_);
  return absl::OkStatus();
}

}  // namespace ebb
