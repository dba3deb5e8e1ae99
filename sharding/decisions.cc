#include "ebb/sharding/decisions.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/scopes.h"

namespace ebb::sharding {

std::string_view Name(UpdateTiming timing) {
  constexpr std::string_view kNames[] = {"early", "late", "off"};
  return kNames[static_cast<int>(timing)];
}

namespace {

// Without a grant in the config, small neighbours are grouped up to this: below it a collective's
// latency outweighs its bytes.
constexpr int64_t kGroupBytesDefault = int64_t{1} << 20;

// DeepSpeed's default of offload_param.buffer_size. There it is of one parameter, here of a unit's
// slice, which may well be larger.
constexpr int64_t kSlotElementsDefault = 100'000'000;

void DecideTiming(const PlanInputs& inputs, bool hold_updates, Decisions& decisions) {
  const Config& config = *inputs.config;
  if (config.ebb.asynchronous_step == AsynchronousStep::kOff) {
    decisions.timing = UpdateTiming::kOff;
    decisions.timing_reason = "ebb.asynchronous_step is off";
    return;
  }
  decisions.timing = UpdateTiming::kLate;
  if (decisions.has_norms()) {
    decisions.timing_reason = "LAMB and LARS need norms of whole parameters first";
  } else if (hold_updates) {
    decisions.timing_reason = "the step holds its updates";
  } else if (config.ebb.asynchronous_step == AsynchronousStep::kLate) {
    decisions.timing_reason = "ebb.asynchronous_step is late";
  } else if (config.gradient_clipping > 0) {
    decisions.timing_reason = "gradient_clipping needs the norm of all gradients first";
  } else if (config.checks_overflow()) {
    decisions.timing_reason = "an overflow anywhere must skip the whole step (ebb.check_overflow)";
  } else {
    decisions.timing = UpdateTiming::kEarly;
    decisions.timing_reason = "neither clipping nor overflow checks need all gradients first";
  }
}

// Carried updates and shared reads follow from the config's own steps, for every variant alike.
void DecideCarried(const PlanInputs& inputs, const ModelLayout& layout, Decisions& decisions) {
  decisions.carried.assign(layout.units.size(), false);
  if (decisions.parameter_tier != Tier::kNvme) return;
  // A carried update would have to wait for the norms of all others, and so would its gather.
  if (decisions.has_norms()) return;
  Decisions own;
  DecideTiming(inputs, /*hold_updates=*/false, own);
  if (own.timing == UpdateTiming::kOff) return;
  // A unit's last gather reads nothing where it is from secondary shards.
  decisions.shares_reads = own.timing == UpdateTiming::kEarly && !decisions.has_secondary();
  const int64_t share = own.timing == UpdateTiming::kLate ? 1 : 3;
  int64_t carried = 0, seen = 0;  // elements
  std::vector<bool> visited(layout.units.size(), false);
  for (const Visit& visit : inputs.model->forward) {
    const size_t unit = static_cast<size_t>(visit.unit);
    const int64_t elements = layout.units[unit].trainable.shard;
    // The matrices of a carried update would go between ranks while the next gathers wait.
    if (visited[unit] || elements == 0 || decisions.has_matrices(static_cast<int>(unit))) continue;
    visited[unit] = true;
    seen += elements;
    if (share * (2 * carried + elements) > 2 * seen) continue;
    decisions.carried[unit] = true;
    carried += elements;
  }
}

void DecideMatrices(const PlanInputs& inputs, const ModelLayout& layout, Decisions& decisions) {
  const std::vector<UnitSpec>& units = inputs.model->units;
  if (inputs.own_optimizer || std::none_of(units.begin(), units.end(),
                                           [](const UnitSpec& unit) { return unit.has_matrices; }))
    return;
  const auto take = [&](const OptimizerConfig& optimizer) {
    if (optimizer.type != OptimizerType::kMuon) return;
    decisions.direction = optimizer.newton_schulz_dtype;  // all have the same
    decisions.iteration_steps = std::max(decisions.iteration_steps, optimizer.newton_schulz_steps);
  };
  take(inputs.config->optimizer);
  for (const auto& [name, group] : inputs.config->ebb.parameter_groups)
    if (group.optimizer) take(*group.optimizer);
  decisions.matrices = OwnMatrices(*inputs.model, layout, decisions.exchanges_matrices());
}

OptimizerType OptimizerTypeOf(const Config& config, const std::string& group) {
  const auto named = config.ebb.parameter_groups.find(group);
  const bool own = named != config.ebb.parameter_groups.end() && named->second.optimizer;
  return own ? named->second.optimizer->type : config.optimizer.type;
}

void DecideNorms(const PlanInputs& inputs, Decisions& decisions) {
  const ModelSpec& model = *inputs.model;
  decisions.takes_norms.assign(model.parameters.size(), false);
  decisions.norm_states.assign(model.units.size(), -1);
  decisions.sets_without_norms = static_cast<int>(inputs.config->ebb.parameter_groups.size()) + 1;
  if (inputs.own_optimizer) return;
  for (size_t u = 0; u < model.units.size(); ++u) {
    for (ParameterId id : model.units[u].parameters) {
      const OptimizerType type = OptimizerTypeOf(*inputs.config, model[id].group);
      if (!model[id].trainable || !TakesNorms(type)) continue;
      decisions.takes_norms[static_cast<size_t>(id)] = true;
      int& states = decisions.norm_states[u];
      states = std::max(states, type == OptimizerType::kLamb ? 2 : 0);
    }
  }
}

void DecideKeptWhole(const PlanInputs& inputs, const ModelLayout& layout, Decisions& decisions) {
  const ZeroConfig& zero = inputs.config->zero;
  const size_t units = layout.units.size();
  // A single rank gathers from the tier below the device only.
  const bool all =
      decisions.stage < 3 || (decisions.shards == 1 && decisions.parameter_tier == Tier::kDevice);
  decisions.kept_whole.assign(units, all);
  if (all) return;
  int64_t persistent = 0;
  for (size_t u = 0; u < units; ++u) {
    const UnitSpec& unit = inputs.model->units[u];
    if (unit.keep_whole) {
      decisions.kept_whole[u] = true;
      continue;
    }
    int64_t elements = 0;
    for (ParameterId id : unit.parameters) elements += Elements((*inputs.model)[id].shape);
    if (elements > zero.param_persistence_threshold ||
        persistent + elements > zero.model_persistence_threshold)
      continue;
    decisions.kept_whole[u] = true;
    persistent += elements;
  }
}

std::string Names(const std::vector<DType>& dtypes) {
  std::string names;
  for (DType dtype : dtypes)
    absl::StrAppend(&names, names.empty() ? "" : " or ", std::string(Name(dtype)));
  return names;
}

bool Takes(const std::vector<DType>& dtypes, DType dtype) {
  return dtypes.empty() || std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}

// Gradients in fp16 need a loss scale, which an engine has only where the config's dtype is fp16.
absl::Status CheckScaled(const ModelSpec& model, const UnitSpec& unit, DType compute) {
  for (ParameterId id : unit.parameters) {
    if (!model[id].trainable) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter '", model[id].name,
        "' is fp16 (ParameterSpec::compute) and trainable, but the configuration is ",
        std::string(Name(compute)),
        ", which has no loss scale: give the parameter bf16 or fp32, set trainable to false, or "
        "set \"fp16.enabled\" to true"));
  }
  return absl::OkStatus();
}

// Whether the trainer supports the dtypes that follow from a parameter's own dtype, and the config
// can train it.
absl::Status CheckOwnDTypes(const ModelSpec& model, const Decisions& decisions) {
  for (size_t u = 0; u < decisions.own_compute.size(); ++u) {
    const ParameterSpec& first = model[model.units[u].parameters.front()];
    const DType dtype = decisions.own_compute[u],
                gradient = decisions.gradient_of(static_cast<int>(u));
    if (dtype == decisions.compute || dtype == DType::kInt8) continue;
    if (dtype == DType::kFloat16)
      EBB_RETURN_IF_ERROR(CheckScaled(model, model.units[u], decisions.compute));
    const bool takes_it = Takes(model.compute_dtypes, dtype);
    if (takes_it &&
        (!IsTrainable(model, static_cast<UnitId>(u)) || Takes(model.gradient_dtypes, gradient)))
      continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter '", first.name, "' is ", std::string(Name(dtype)), " (ParameterSpec::compute)",
        takes_it ? absl::StrCat(" and its gradient ", std::string(Name(gradient))) : "",
        ", but the trainer takes ", Names(takes_it ? model.gradient_dtypes : model.compute_dtypes),
        takes_it ? " (ModelSpec::gradient_dtypes)" : " (ModelSpec::compute_dtypes)",
        ": give it another dtype"));
  }
  return absl::OkStatus();
}

// Each unit's dtype, where some unit has another than the config's.
absl::Status DecideDTypes(const PlanInputs& inputs, Decisions& decisions) {
  const ModelSpec& model = *inputs.model;
  std::vector<DType> own;
  for (const UnitSpec& unit : model.units) {
    const auto of = [&](ParameterId id) { return model[id].compute.value_or(decisions.compute); };
    own.push_back(of(unit.parameters.front()));
    for (ParameterId id : unit.parameters) {
      if (of(id) == own.back()) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "unit '", unit.name, "' has '", model[unit.parameters.front()].name, "' in ",
          std::string(Name(own.back())), " and '", model[id].name, "' in ",
          std::string(Name(of(id))), ": a plan's units have one dtype each (DivideByDType)"));
    }
  }
  if (std::any_of(own.begin(), own.end(), [&](DType one) { return one != decisions.compute; }))
    decisions.own_compute = std::move(own);
  return CheckOwnDTypes(model, decisions);
}

// Whether the trainer supports the dtypes that follow from the config. The error says in full which
// dtype follows from which key, because the dtype of gradients depends on several.
absl::Status CheckDTypes(const PlanInputs& inputs, const Decisions& decisions) {
  const Config& config = *inputs.config;
  const ModelSpec& model = *inputs.model;
  const auto name = [](DType dtype) { return std::string(Name(dtype)); };
  if (!Takes(model.compute_dtypes, decisions.compute)) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameters are ", name(decisions.compute), " (\"",
                     decisions.compute == DType::kFloat32
                         ? "bf16.enabled\" and \"fp16.enabled\" are false"
                         : absl::StrCat(name(decisions.compute), ".enabled\" is true"),
                     "), but the trainer takes ", Names(model.compute_dtypes),
                     " (ModelSpec::compute_dtypes): change \"bf16.enabled\" or \"fp16.enabled\""));
  }
  const bool has_gradients = FirstTrainableVisit(model) < static_cast<int>(model.forward.size());
  if (!has_gradients || Takes(model.gradient_dtypes, decisions.gradient)) return absl::OkStatus();
  const bool sums = decisions.keeps_step_gradients || decisions.micro_batches_per_round > 1;
  const std::string from =
      sums ? absl::StrCat("\"data_types.grad_accum_dtype\", as backward adds up ",
                          decisions.keeps_step_gradients
                              ? absl::StrCat("the step's ", config.gradient_accumulation_steps)
                              : absl::StrCat(decisions.micro_batches_per_round),
                          " micro-batches before a reduction (\"ebb.reduce_at\", "
                          "\"ebb.micro_batches_per_round\")")
           : absl::StrCat(
                 "\"communication_data_type\", by default the dtype of parameters, as every "
                 "micro-batch is reduced (\"ebb.reduce_at\", "
                 "\"ebb.micro_batches_per_round\")");
  return absl::InvalidArgumentError(absl::StrCat(
      "gradients are ", name(decisions.gradient), ", which is ", from, ", but the trainer takes ",
      Names(model.gradient_dtypes), " (ModelSpec::gradient_dtypes): set ",
      sums ? "\"data_types.grad_accum_dtype\"" : "\"communication_data_type\"", " to \"",
      name(model.gradient_dtypes.front()), "\""));
}

}  // namespace

absl::StatusOr<Decisions> Decide(const PlanInputs& inputs, const ModelLayout& layout, int rounds,
                                 bool hold_updates) {
  const Config& config = *inputs.config;
  const ModelSpec& model = *inputs.model;
  Decisions decisions;
  decisions.world = inputs.world;
  decisions.shards = layout.shards;
  decisions.stage = config.zero.stage;
  if (decisions.stage == 3 && config.zero.hpz_partition_size > 1)
    decisions.secondary_shards = static_cast<int>(config.zero.hpz_partition_size);
  decisions.micro_batches_per_round = config.ebb.micro_batches_per_round;
  const int64_t all_rounds =
      config.gradient_accumulation_steps / config.ebb.micro_batches_per_round;
  const int64_t events =
      static_cast<int64_t>(model.order.empty() ? 4 * model.forward.size() : model.order.size());
  if (all_rounds > std::numeric_limits<int>::max() / (events + 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a step of ", all_rounds, " rounds; at most ",
                     std::numeric_limits<int>::max() / (events + 1),
                     " are counted: raise ebb.micro_batches_per_round, or "
                     "train_micro_batch_size_per_gpu"));
  }
  const int configured = static_cast<int>(all_rounds);
  decisions.rounds = rounds == 0 ? configured : rounds;
  if (decisions.rounds > 1 && configured == 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a step of several rounds, but the pools were laid out for one: "
                     "gradient_accumulation_steps is ",
                     config.gradient_accumulation_steps, " and ebb.micro_batches_per_round ",
                     config.ebb.micro_batches_per_round,
                     "; raise gradient_accumulation_steps to the most that a step will have"));
  }
  decisions.compute = config.compute;
  decisions.communication = config.communication_dtype();
  decisions.accumulation = config.accumulation;
  decisions.reduce_at_round = config.reduces_at_round();
  decisions.sums_in_scratch =
      config.ebb.deterministic_reduce && (decisions.world > 1 || inputs.verdict_ranks > 1);
  decisions.tensor_sums_in_scratch = config.ebb.deterministic_reduce && config.ebb.mesh.tensor > 1;
  decisions.keeps_step_gradients = !decisions.reduce_at_round && configured > 1;
  decisions.sums_before_reducing =
      decisions.keeps_step_gradients || decisions.micro_batches_per_round > 1;
  decisions.gradient =
      decisions.sums_before_reducing ? decisions.accumulation : decisions.communication;
  decisions.optimizer_states = inputs.optimizer_states;
  decisions.state_encodings = inputs.state_encodings;
  for (const UnitSpec& unit : model.units) decisions.state_blocks.push_back(unit.state_block > 0);
  decisions.own_optimizer = inputs.own_optimizer;
  decisions.parameter_tier = config.parameter_tier();
  decisions.optimizer_tier = config.optimizer_tier();
  decisions.gradient_tier = decisions.stage == 0 ? Tier::kDevice : config.gradient_tier();
  const bool has_boundaries =
      std::any_of(model.forward.begin(), model.forward.end(),
                  [](const Visit& visit) { return visit.output_bytes > 0; });
  if (has_boundaries) decisions.activation_tier = config.activation_tier();
  decisions.gradients_follow = !config.ebb.offload_gradients.has_value();
  decisions.split_master = config.ebb.split_master;
  decisions.stochastic_rounding = config.ebb.stochastic_rounding;
  EBB_RETURN_IF_ERROR(DecideDTypes(inputs, decisions));
  EBB_RETURN_IF_ERROR(CheckDTypes(inputs, decisions));
  DecideNorms(inputs, decisions);
  DecideMatrices(inputs, layout, decisions);
  DecideTiming(inputs, hold_updates, decisions);
  decisions.holds = hold_updates;
  DecideCarried(inputs, layout, decisions);
  DecideKeptWhole(inputs, layout, decisions);

  const size_t units = layout.units.size();
  std::vector<int> visits(units, 0);  // visits that take its gradients
  const std::vector<bool> gradients = VisitsWithGradients(model);
  for (size_t v = 0; v < gradients.size(); ++v)
    visits[static_cast<size_t>(model.forward[v].unit)] += gradients[v] ? 1 : 0;
  decisions.verdict_ranks = std::max(inputs.verdict_ranks, inputs.world);
  decisions.trainable.resize(units);
  decisions.accumulates.resize(units);
  decisions.sums_tensor.resize(units);
  // A shard in the communication dtype is exact only if the accumulation dtype would hold the same
  // values.
  const bool gathers_gradients = decisions.stage == 0 && decisions.world > 1;
  for (size_t u = 0; u < units; ++u) {
    const bool exact = decisions.accumulation == DType::kFloat32 ||
                       decisions.accumulation == decisions.communication_of(static_cast<int>(u));
    decisions.trainable[u] = layout.units[u].trainable.shard > 0;
    const int contributions = visits[u] * (decisions.keeps_step_gradients ? 1 : configured);
    const std::vector<ParameterId>& of = model.units[u].parameters;
    decisions.sums_tensor[u] =
        decisions.tensor_ranks() > 1 && std::any_of(of.begin(), of.end(), [&](ParameterId id) {
          return model[id].trainable && model[id].sums_gradient;
        });
    decisions.accumulates[u] = decisions.trainable[u] && (contributions > 1 || gathers_gradients ||
                                                          !exact || decisions.sums_tensor[u]);
    const bool is_whole =
        model[model.units[u].parameters.front()].over_tensor == OverTensor::kWhole;
    if (inputs.verdict_ranks > inputs.world && decisions.trainable[u] && is_whole)
      decisions.compared.push_back(static_cast<int>(u));
  }
  decisions.has_blocks =
      std::any_of(model.parameters.begin(), model.parameters.end(),
                  [](const ParameterSpec& parameter) { return parameter.block.has_value(); });
  return decisions;
}

int64_t GatherGroupElements(const Config& config, DType compute) {
  int64_t elements = config.ebb.coalesce_bytes.value_or(kGroupBytesDefault) / SizeOf(compute);
  if (!config.ebb.coalesce_bytes && config.zero.allgather_bucket_size) {
    elements = std::min(elements, *config.zero.allgather_bucket_size);
  }
  return elements;
}

int64_t ReduceGroupBytes(const Config& config) {
  int64_t bytes = config.ebb.coalesce_bytes.value_or(kGroupBytesDefault);
  if (!config.ebb.coalesce_bytes && config.zero.reduce_bucket_size) {
    const int64_t size = SizeOf(config.communication_dtype());
    bytes = std::min(bytes / size, *config.zero.reduce_bucket_size) * size;
  }
  return bytes;
}

std::vector<int64_t> SlotElements(const ModelLayout& layout, const Decisions& decisions) {
  std::vector<int64_t> elements;
  for (const UnitLayout& unit : layout.units) {
    const int64_t size = SizeOf(decisions.compute_of(static_cast<int>(elements.size())));
    elements.push_back(
        (SwapAligned(unit.trainable.shard * size) + SwapAligned(unit.frozen.shard * size)) /
        SizeOf(decisions.compute));
  }
  return elements;
}

int64_t SlotElementsMax(const Config& config, const ModelLayout& layout,
                        const Decisions& decisions) {
  if (config.zero.offload_param.buffer_size) return *config.zero.offload_param.buffer_size;
  int64_t most = kSlotElementsDefault;
  for (int64_t elements : SlotElements(layout, decisions)) most = std::max(most, elements);
  return most;
}

}  // namespace ebb::sharding
