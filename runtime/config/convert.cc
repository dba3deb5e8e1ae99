#include "ebb/runtime/config/convert.h"

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/key_rows.h"
#include "ebb/runtime/config/reader.h"
#include "ebb/runtime/config/requests_in_flight.h"

namespace ebb::config {
namespace {

// Sets the fields of the given keys, and of missing keys whose default depends on the optimizer.
void ReadFields(const Values& values, Config& config) {
  const std::string_view optimizer = values.Type("optimizer");
  for (const Row& row : Rows()) {
    if (!row.field.take) continue;
    if (const Json* value = values.Value(row.path)) {
      row.field.take(*value, config);
    } else if (HasWord(row.own_default_for, optimizer)) {
      row.field.take(Json::parse(row.own_default), config);
    }
  }
}

// "a", "b" or "c": the parameters that an optimizer or scheduler of this type has.
std::string ParametersOf(std::string_view prefix, std::string_view type) {
  std::string names;
  for (const Key& key : Keys()) {
    if (!key.path.starts_with(prefix) || key.taken == Taken::kRefused) continue;
    if (!key.only_for.empty() && !HasWord(key.only_for, type)) continue;
    names += Join({names.empty() ? "" : "|", key.path.substr(prefix.size())});
  }
  return Alternatives(names);
}

// `block` is "optimizer" or "scheduler". Its type decides which parameters are allowed and
// required.
void CheckType(const Values& values, std::string_view block, Problems& problems) {
  const Given* given = values.Find(block);
  if (given == nullptr || given->value->empty()) return;
  const Key& type_key = *FindKey(Join({block, ".type"}));
  const std::string_view type = values.Find(type_key.path) == nullptr ? "" : values.Type(block);
  if (type.empty()) {
    return problems.AddTogether(
        given->shown + ".type",
        {Quoted(given->shown), " has no \"type\"; allowed: ", Allowed(type_key)});
  }
  // An optimizer or scheduler that is not built has no known parameters.
  if (type_key.taken == Taken::kRefused && !HasWord(type_key.harmless, type)) return;
  const std::string prefix = Join({block, ".params."});
  for (const Key& key : Keys()) {
    if (!key.path.starts_with(prefix)) continue;
    const Given* parameter = values.Find(key.path);
    const std::string shown =
        parameter != nullptr ? parameter->shown
                             : Join({given->shown, ".params.", key.path.substr(prefix.size())});
    if (parameter != nullptr && !key.only_for.empty() && !HasWord(key.only_for, type)) {
      problems.Add(shown, {Quoted(shown), " is not a parameter of ", type,
                           ", which has: ", ParametersOf(prefix, type)});
    }
    if (!HasWord(key.required_for, type) || values.Value(key.path) != nullptr) continue;
    if (parameter == nullptr) {
      problems.AddTogether(shown, {type, " needs ", Quoted(shown), ": ", key.meaning});
    } else {
      problems.Add(shown, {Quoted(shown), " is \"auto\", but its value is not known (", key.meaning,
                           "); give ", Allowed(key),
                           " instead, or let the trainer set it (in C++ ReadOptions::trainer, in "
                           "Python transformers' Trainer)"});
    }
  }
}

void CompleteOptimizer(const Values& values, OptimizerConfig& optimizer,
                       std::vector<std::string>& remarks) {
  const Given* mode = values.Find("optimizer.params.adam_w_mode");
  if (optimizer.type == OptimizerType::kAdam && mode == nullptr) {
    Remark(remarks, {"\"Adam\" decouples weight decay, as \"AdamW\" does and as in DeepSpeed; "
                     "\"adam_w_mode\": false makes it part of the gradient"});
  }
  if (optimizer.type == OptimizerType::kAdamW && !optimizer.decoupled_weight_decay) {
    optimizer.decoupled_weight_decay = true;
    Remark(remarks, {Quoted(mode->shown),
                     " is false, but AdamW always decouples weight decay, as in DeepSpeed; "
                     "choose \"Adam\""});
  }
  // "lr" is then AdamW's.
  if (const Json* muon = values.Value("optimizer.params.muon_lr")) {
    if (!optimizer.adam_learning_rate) optimizer.adam_learning_rate = optimizer.learning_rate;
    optimizer.learning_rate = muon->get<double>();
  }
}

void CompleteScheduler(const Values& values, Config& config) {
  SchedulerConfig& scheduler = config.scheduler;
  // Hugging Face's Trainer fills it in. Without that, WarmupDecayLR would rise to its own 0.001.
  const Given* most = values.Find("scheduler.params.warmup_max_lr");
  if (most != nullptr && most->value->is_string()) {
    scheduler.warmup_max_lr = config.optimizer.learning_rate;
    Remark(config.remarks, {Quoted(most->shown), " is \"auto\": taken as the optimizer's rate"});
  }
  if (scheduler.total_num_steps > 0 && scheduler.total_num_steps < scheduler.warmup_num_steps) {
    Remark(config.remarks,
           {"the schedule's total_num_steps is less than its warmup_num_steps: the rate never "
            "reaches its maximum"});
  }
  const std::string_view type = values.Type("optimizer");
  if (scheduler.type == SchedulerType::kOneCycle && scheduler.cycle_momentum &&
      !HasWord(FindKey("optimizer.params.betas")->only_for, type)) {
    Remark(config.remarks,
           {"\"scheduler.params.cycle_momentum\" cycles betas, but ", type, " has none"});
  }
}

// "cpu_offload": true in early files means {"offload_optimizer": {"device": "cpu"}}.
void TakeOldOffload(const Values& values, std::string_view old_path, std::string_view block,
                    Tier& device, std::vector<std::string>& remarks, Problems& problems) {
  const Json* old = values.Value(old_path);
  if (old == nullptr || !old->get<bool>()) return;
  const std::string path = Join({block, ".device"});
  if (values.Value(path) != nullptr) {
    return problems.Add(old_path, {Quoted(old_path), " is an old form of ", Quoted(path),
                                   ", which is given, too; remove the old one"});
  }
  device = Tier::kCpu;
  Remark(remarks, {Quoted(old_path), " is an old form: taken as ", Quoted(path), " \"cpu\""});
}

// DeepSpeed accepts some values that change nothing. Replaces them by the values that they amount
// to.
void TakeHarmless(Config& config) {
  ZeroConfig& zero = config.zero;
  const auto ignore = [&](std::string_view block, int least, Tier& device, std::string_view why) {
    if (device == Tier::kDevice || zero.stage >= least) return;
    Remark(config.remarks, {"\"zero_optimization.", block, ".device\" ", Quoted(Name(device)),
                            " is ignored at \"zero_optimization.stage\" ",
                            std::to_string(zero.stage), ", as in DeepSpeed: ", why});
    device = Tier::kDevice;
  };
  ignore("offload_param", 3, zero.offload_param.device, "every rank keeps all parameters");
  ignore("offload_optimizer", 1, zero.offload_optimizer.device,
         "every rank keeps all optimizer states");
  if (zero.hpz_partition_size > 1 && zero.stage < 3) {
    Remark(
        config.remarks,
        {"\"zero_optimization.zero_hpz_partition_size\" ", std::to_string(zero.hpz_partition_size),
         " is ignored at \"zero_optimization.stage\" ", std::to_string(zero.stage),
         ", as in DeepSpeed: only stage 3 gathers a unit more than once a step"});
    zero.hpz_partition_size = 1;
  }
  if (zero.sub_group_size == 0) {
    zero.sub_group_size = ZeroConfig().sub_group_size;
    Remark(config.remarks, {"\"zero_optimization.sub_group_size\" 0 is taken as the default"});
  }
  if (config.loss_scale.min_scale == 0) {
    config.loss_scale.min_scale = LossScaleConfig().min_scale;
    Remark(config.remarks, {"\"fp16.min_loss_scale\" 0 is taken as 1, the default"});
  }
}

// Remarks on keys of the tiers that other keys override.
void RemarkOnTiers(Config& config) {
  const OffloadOptimizerConfig& optimizer = config.zero.offload_optimizer;
  if (optimizer.device == Tier::kDevice && (optimizer.ratio < 1 || optimizer.measures_ratio)) {
    Remark(config.remarks,
           {"\"zero_optimization.offload_optimizer.ratio\" ",
            optimizer.measures_ratio ? Quoted("auto") : Shown(optimizer.ratio),
            " has no meaning while \"zero_optimization.offload_optimizer.device\" is "
            "\"none\": all optimizer states stay on the device"});
  }
  const std::optional<Tier> activations = config.ebb.offload_activations;
  if (config.activation_checkpointing.cpu_checkpointing && activations.has_value() &&
      *activations != Tier::kCpu) {
    Remark(config.remarks, {"\"activation_checkpointing.cpu_checkpointing\" is true, but "
                            "\"ebb.offload_activations\" is given and decides: ",
                            Quoted(Name(*activations))});
  }
  if (const AioConfig& aio = config.aio;
      aio.queue_depth * aio.intra_op_parallelism > kRequestsInFlightMax) {
    Remark(config.remarks,
           {"\"aio.queue_depth\" ", std::to_string(aio.queue_depth),
            " for each of \"aio.intra_op_parallelism\" ", std::to_string(aio.intra_op_parallelism),
            " is more than ", std::to_string(kRequestsInFlightMax),
            " requests in flight for each folder: taken as that"});
  }
}

void CheckPrecision(const Values& values, const Config& config, Problems& problems) {
  const Json* fp16 = values.Value("fp16.enabled");
  const Json* bf16 = values.Value("bf16.enabled");
  if (fp16 != nullptr && bf16 != nullptr && fp16->get<bool>() && bf16->get<bool>()) {
    problems.AddConflict("fp16.enabled", {" and \"bf16.enabled\" are both true; enable one"});
  }
  const Json* parameters = values.Value("data_types.param_dtype");
  if (parameters != nullptr && ToDType(parameters->get<std::string>()) != config.compute) {
    problems.AddConflict(
        "data_types.param_dtype",
        {" is ", Shown(*parameters), ", but \"fp16\" and \"bf16\" say ", Name(config.compute)});
  }
}

// DeepSpeed's key and Ebb's say the same.
void CheckStates(const Values& values, const Config& config, Problems& problems) {
  const Json* bf16 = values.Value("bf16.bf16_optimizer_states");
  if (bf16 == nullptr || !bf16->get<bool>()) return;
  if (config.optimizer.states == OptimizerStates::kBFloat16) return;
  problems.AddConflict(
      "bf16.bf16_optimizer_states",
      {" is true, but \"optimizer.params.states\" is another; remove one of them"});
}

// Remarks on defaults that may surprise users of another runtime.
void RemarkOnDefaults(const Values& values, Config& config) {
  if (values.Find("gradient_clipping") == nullptr) {
    Remark(config.remarks, {"gradients are clipped to a global norm of 1.0, DeepSpeed's default; "
                            "\"gradient_clipping\": 0 turns it off"});
  }
  if (values.Find("optimizer.type") == nullptr) {
    Remark(config.remarks,
           {"no \"optimizer\": AdamW, a learning rate of ", Shown(config.optimizer.learning_rate)});
  }
  if (values.Value("data_types.grad_accum_dtype") == nullptr && config.compute != DType::kFloat32) {
    Remark(config.remarks, {"gradients are accumulated in fp32, where DeepSpeed's default is "
                            "the compute dtype; \"data_types\": {\"grad_accum_dtype\": \"",
                            Name(config.compute), "\"} does the same"});
  }
}

void ReadGroups(const Values& values, Config& config, Problems& problems) {
  for (const auto& [name, group_values] : values.groups) {
    CheckType(group_values, "optimizer", problems);
    Config alone;  // with the values of this group
    alone.optimizer.states = config.optimizer.states;
    alone.optimizer.min_8bit_size = config.optimizer.min_8bit_size;
    ReadFields(group_values, alone);
    ParameterGroupConfig& group = config.ebb.parameter_groups[name];
    group = BlockOf<ParameterGroupConfig>(alone);
    const auto check = [&](std::string_view key, bool differs) {
      const Given* given = group_values.Find(key);
      if (given == nullptr || !differs) return;
      problems.Add(given->shown, {Quoted(given->shown), " differs from ", Quoted(key),
                                  ", which is for the states of all groups; leave it out here"});
    };
    check("optimizer.params.states", alone.optimizer.states != config.optimizer.states);
    check("optimizer.params.min_8bit_size",
          alone.optimizer.min_8bit_size != config.optimizer.min_8bit_size);
    if (group_values.Find("optimizer.type") != nullptr) {
      CompleteOptimizer(group_values, alone.optimizer, config.remarks);
      group.optimizer = alone.optimizer;
    }
  }
}

// A schedule that rises to a rate of its own uses it for all parameters, like DeepSpeed's.
void RemarkOnGroupRates(Config& config) {
  const SchedulerConfig& scheduler = config.scheduler;
  const bool scales = scheduler.type == SchedulerType::kNone ||
                      scheduler.type == SchedulerType::kWarmupCosine ||
                      (scheduler.type == SchedulerType::kWarmup && !scheduler.warmup_max_lr);
  if (scales) return;
  std::string groups;
  for (const auto& [name, group] : config.ebb.parameter_groups) {
    if (!group.optimizer || group.optimizer->learning_rate == config.optimizer.learning_rate)
      continue;
    groups += Join({groups.empty() ? "" : ", ", Quoted(name)});
  }
  if (groups.empty()) return;
  Remark(config.remarks,
         {"the learning rates of the parameter groups ", groups, " are replaced by those of ",
          FindRow("scheduler.type").field.give(config).get<std::string>(),
          ", as in DeepSpeed; \"lr_factor\" scales them"});
}

// Puts the values of the rows with this prefix at their paths below the object.
void WriteFields(std::string_view prefix, Config& config, Json& object) {
  std::string type;  // of the optimizer or scheduler
  for (const Row& row : Rows()) {
    std::string_view path = row.path;
    if (!row.field.give || !path.starts_with(prefix)) continue;
    if (path.starts_with(kGroupPrefix)) {
      if (prefix.empty()) continue;
      path.remove_prefix(kGroupPrefix.size());
    }
    Json value = ValueOf(row, config);
    if (path.ends_with(".type")) type = value.is_null() ? "" : value.get<std::string>();
    if (value.is_null() || !(row.only_for.empty() || HasWord(row.only_for, type))) continue;
    Json* block = &object;
    for (size_t dot; (dot = path.find('.')) != path.npos; path.remove_prefix(dot + 1)) {
      block = &(*block)[std::string(path.substr(0, dot))];
    }
    (*block)[std::string(path)] = std::move(value);
  }
}

}  // namespace

Json ToDocument(Config config) {
  Json document = Json::object();
  WriteFields("", config, document);
  for (auto& [name, group] : config.ebb.parameter_groups) {
    Json& object = document["ebb"]["parameter_groups"][name] = Json::object();
    Config alone{.optimizer = group.optimizer.value_or(OptimizerConfig())};
    alone.optimizer.states = config.optimizer.states;
    alone.optimizer.min_8bit_size = config.optimizer.min_8bit_size;
    BlockOf<ParameterGroupConfig>(alone) = group;
    WriteFields(kGroupPrefix, alone, object);
    if (group.optimizer.has_value()) WriteFields("optimizer.", alone, object);
  }
  return document;
}

absl::StatusOr<Config> FromDocument(Document document, const ReadOptions& options,
                                    std::vector<TakenKey>* keys) {
  Reading reading = ReadValues(document, options.unknown_keys);
  Problems& problems = document.problems;
  const Values& values = reading.values;
  FillFromTrainer(options.trainer, reading, problems);

  Config config;
  config.remarks = std::move(reading.remarks);
  config.warnings = std::move(reading.warnings);
  CheckType(values, "optimizer", problems);
  CheckType(values, "scheduler", problems);
  ReadFields(values, config);
  ReadGroups(values, config, problems);
  CompleteOptimizer(values, config.optimizer, config.remarks);
  CompleteScheduler(values, config);
  TakeOldOffload(values, "zero_optimization.cpu_offload", "zero_optimization.offload_optimizer",
                 config.zero.offload_optimizer.device, config.remarks, problems);
  TakeOldOffload(values, "zero_optimization.cpu_offload_param", "zero_optimization.offload_param",
                 config.zero.offload_param.device, config.remarks, problems);
  CheckPrecision(values, config, problems);
  CheckStates(values, config, problems);
  if (options.overrides) options.overrides(config);
  TakeHarmless(config);
  CheckTogether(config, problems);
  if (options.world) {
    Config completed = config;
    CompleteForWorld(options.world(config), completed, problems);
  }
  EBB_RETURN_IF_ERROR(problems.status());
  RemarkOnDefaults(values, config);
  RemarkOnTiers(config);
  RemarkOnGroupRates(config);
  if (keys != nullptr) *keys = std::move(reading.keys);
  return config;
}

}  // namespace ebb::config
