#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ebb/runtime/config/convert.h"
#include "ebb/runtime/config/fields.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/reader.h"
#include "ebb/runtime/config/requests_in_flight.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/config/trainer_values.h"

namespace ebb::config {
namespace {

// Sets the fields of the given keys. The values have passed the table.
class FieldReader {
 public:
  explicit FieldReader(const Values& values) : values_(values) {}

  template <class Field>
  void operator()(std::string_view path, Field&& field) const {
    if (const Json* value = values_.Value(path)) Take(*value, field);
  }

 private:
  static void Take(const Json& value, bool& field) { field = value.get<bool>(); }
  static void Take(const Json& value, int& field) { field = static_cast<int>(*ToInteger(value)); }
  static void Take(const Json& value, int64_t& field) { field = *ToInteger(value); }
  static void Take(const Json& value, double& field) { field = value.get<double>(); }
  static void Take(const Json& value, std::string& field) { field = value.get<std::string>(); }
  static void Take(const Json& value, std::vector<std::string>& field) {
    field = value.is_string() ? std::vector<std::string>{value.get<std::string>()}
                              : value.get<std::vector<std::string>>();
  }
  static void Take(const Json& value, DType& field) { field = *ToDType(value.get<std::string>()); }
  static void Take(const Json& value, std::optional<DType>& field) {
    field = ToDType(value.get<std::string>());
  }
  // The code that completes the block handles "auto".
  static void Take(const Json& value, std::optional<double>& field) {
    if (value.is_number()) field = value.get<double>();
  }
  // Also takes bytes; "auto" leaves the field unset.
  static void Take(const Json& value, std::optional<int64_t>& field) { field = ToBytes(value); }
  static void Take(const Json& value, NotZero field) { field.value = *ToInteger(value); }
  static void Take(const Json& value, OrAll field) {
    field.value = value.is_string() ? field.all : *ToInteger(value);
  }
  static void Take(const Json& value, OrAuto<std::optional<int64_t>> field) {
    Take(value, field.value);
    field.is_auto = !field.value.has_value();
  }
  static void Take(const Json& value, OrAuto<double> field) {
    field.is_auto = value.is_string();
    if (!field.is_auto) Take(value, field.value);
  }
  static void Take(const Json& value, Pair field) {
    field.first = value[0].get<double>();
    field.second = value[1].get<double>();
  }
  static void Take(const Json& value, IsType field) {
    if (value.get<bool>()) field.value = field.type;
  }
  static void Take(const Json& value, Switch field) {
    field.value = !FindWord(field.word_if_true, value.get<std::string>()).empty();
  }
  template <class Enum>
  static void Take(const Json& value, Choice<Enum> field) {
    for (const Spelling<Enum>& spelling : field.spellings) {
      if (!FindWord(spelling.word, value.get<std::string>()).empty()) field.value = spelling.value;
    }
  }
  template <class Enum>
  static void Take(const Json& value, OptionalChoice<Enum> field) {
    Take(value, Choice<Enum>{field.value.emplace(), field.spellings});
  }

  const Values& values_;
};

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
  const Given* type_given = values.Find(type_key.path);
  std::string_view type = "";
  if (type_given != nullptr) {
    type = type_given->value == nullptr
               ? type_key.default_value
               : FindWord(type_key.words, type_given->value->get<std::string>());
    // An optimizer or scheduler that is not built has no known parameters.
    if (type_key.taken == Taken::kRefused && FindWord(type_key.harmless, type).empty()) return;
  }
  if (type.empty()) {
    return problems.AddTogether(
        given->shown + ".type",
        {Quoted(given->shown), " has no \"type\"; allowed: ", Allowed(type_key)});
  }
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
  // Parameters that are neither given nor filled in by the trainer.
  const std::string_view type = Word<OptimizerType>(kOptimizerTypes, optimizer.type);
  const auto complete = [&](std::string_view path, double& value) {
    const DefaultOfType* own = FindDefault(path, type);
    if (own != nullptr && values.Value(path) == nullptr) value = own->value;
  };
  complete("optimizer.params.lr", optimizer.learning_rate);
  complete("optimizer.params.eps", optimizer.epsilon);
  const Given* mode = values.Find("optimizer.params.adam_w_mode");
  if (optimizer.type == OptimizerType::kAdam && mode == nullptr) {
    Remark(remarks,
           "\"Adam\" decouples weight decay, as \"AdamW\" does and as in DeepSpeed; "
           "\"adam_w_mode\": false makes it part of the gradient");
  }
  if (optimizer.type == OptimizerType::kAdamW && !optimizer.decoupled_weight_decay) {
    optimizer.decoupled_weight_decay = true;
    Remark(remarks, Join({Quoted(mode->shown),
                          " is false, but AdamW always decouples weight decay, as in DeepSpeed; "
                          "choose \"Adam\""}));
  }
}

void CompleteScheduler(const Values& values, Config& config) {
  SchedulerConfig& scheduler = config.scheduler;
  // Hugging Face's Trainer fills it in. Without that, WarmupDecayLR would rise to its own 0.001.
  const Given* most = values.Find("scheduler.params.warmup_max_lr");
  if (most != nullptr && most->value->is_string()) {
    scheduler.warmup_max_lr = config.optimizer.learning_rate;
    Remark(config.remarks,
           Join({Quoted(most->shown), " is \"auto\": taken as the optimizer's rate"}));
  }
  if (scheduler.total_num_steps > 0 && scheduler.total_num_steps < scheduler.warmup_num_steps) {
    Remark(config.remarks,
           "the schedule's total_num_steps is less than its warmup_num_steps: the rate never "
           "reaches its maximum");
  }
  const std::string_view type = Word<OptimizerType>(kOptimizerTypes, config.optimizer.type);
  if (scheduler.type == SchedulerType::kOneCycle && scheduler.cycle_momentum &&
      !HasWord(FindKey("optimizer.params.betas")->only_for, type)) {
    Remark(config.remarks,
           Join({"\"scheduler.params.cycle_momentum\" cycles betas, but ", type, " has none"}));
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
  Remark(remarks, Join({Quoted(old_path), " is an old form: taken as ", Quoted(path), " \"cpu\""}));
}

// DeepSpeed accepts some values that change nothing. Replaces them by the values that they amount
// to.
void TakeHarmless(Config& config) {
  ZeroConfig& zero = config.zero;
  const auto ignore = [&](std::string_view block, int least, Tier& device, std::string_view why) {
    if (device == Tier::kDevice || zero.stage >= least) return;
    Remark(config.remarks, Join({"\"zero_optimization.", block, ".device\" ", Quoted(Name(device)),
                                 " is ignored at \"zero_optimization.stage\" ",
                                 std::to_string(zero.stage), ", as in DeepSpeed: ", why}));
    device = Tier::kDevice;
  };
  ignore("offload_param", 3, zero.offload_param.device, "every rank keeps all parameters");
  ignore("offload_optimizer", 1, zero.offload_optimizer.device,
         "every rank keeps all optimizer states");
  if (zero.hpz_partition_size > 1 && zero.stage < 3) {
    Remark(config.remarks,
           Join({"\"zero_optimization.zero_hpz_partition_size\" ",
                 std::to_string(zero.hpz_partition_size),
                 " is ignored at \"zero_optimization.stage\" ", std::to_string(zero.stage),
                 ", as in DeepSpeed: only stage 3 gathers a unit more than once a step"}));
    zero.hpz_partition_size = 1;
  }
  if (zero.sub_group_size == 0) {
    zero.sub_group_size = ZeroConfig().sub_group_size;
    Remark(config.remarks, "\"zero_optimization.sub_group_size\" 0 is taken as the default");
  }
  if (config.loss_scale.min_scale == 0) {
    config.loss_scale.min_scale = LossScaleConfig().min_scale;
    Remark(config.remarks, "\"fp16.min_loss_scale\" 0 is taken as 1, the default");
  }
}

// Remarks on keys of the tiers that other keys override.
void RemarkOnTiers(Config& config) {
  const OffloadOptimizerConfig& optimizer = config.zero.offload_optimizer;
  if (optimizer.device == Tier::kDevice && (optimizer.ratio < 1 || optimizer.measures_ratio)) {
    Remark(config.remarks,
           Join({"\"zero_optimization.offload_optimizer.ratio\" ",
                 optimizer.measures_ratio ? Quoted("auto") : Shown(optimizer.ratio),
                 " has no meaning while \"zero_optimization.offload_optimizer.device\" is "
                 "\"none\": all optimizer states stay on the device"}));
  }
  const std::optional<Tier> activations = config.ebb.offload_activations;
  if (config.activation_checkpointing.cpu_checkpointing && activations.has_value() &&
      *activations != Tier::kCpu) {
    Remark(config.remarks, Join({"\"activation_checkpointing.cpu_checkpointing\" is true, but "
                                 "\"ebb.offload_activations\" is given and decides: ",
                                 Quoted(Name(*activations))}));
  }
  if (const AioConfig& aio = config.aio;
      aio.queue_depth * aio.intra_op_parallelism > kRequestsInFlightMax) {
    Remark(config.remarks, Join({"\"aio.queue_depth\" ", std::to_string(aio.queue_depth),
                                 " for each of \"aio.intra_op_parallelism\" ",
                                 std::to_string(aio.intra_op_parallelism), " is more than ",
                                 std::to_string(kRequestsInFlightMax),
                                 " requests in flight for each folder: taken as that"}));
  }
}

void CheckPrecision(const Values& values, const Config& config, Problems& problems) {
  const Json* fp16 = values.Value("fp16.enabled");
  const Json* bf16 = values.Value("bf16.enabled");
  if (fp16 != nullptr && bf16 != nullptr && fp16->get<bool>() && bf16->get<bool>()) {
    problems.AddTogether("fp16.enabled",
                         {"\"fp16.enabled\" and \"bf16.enabled\" are both true; enable one"});
  }
  const Json* parameters = values.Value("data_types.param_dtype");
  if (parameters != nullptr && ToDType(parameters->get<std::string>()) != config.compute) {
    problems.AddTogether("data_types.param_dtype",
                         {"\"data_types.param_dtype\" is ", Shown(*parameters),
                          ", but \"fp16\" and \"bf16\" say ", Name(config.compute)});
  }
}

// Remarks on defaults that may surprise users of another runtime.
void RemarkOnDefaults(const Values& values, Config& config) {
  if (values.Find("gradient_clipping") == nullptr) {
    Remark(config.remarks,
           "gradients are clipped to a global norm of 1.0, DeepSpeed's default; "
           "\"gradient_clipping\": 0 turns it off");
  }
  if (values.Find("optimizer.type") == nullptr) {
    Remark(config.remarks, Join({"no \"optimizer\": AdamW, a learning rate of ",
                                 Shown(config.optimizer.learning_rate)}));
  }
  if (values.Value("data_types.grad_accum_dtype") == nullptr && config.compute != DType::kFloat32) {
    Remark(config.remarks, Join({"gradients are accumulated in fp32, where DeepSpeed's default is "
                                 "the compute dtype; \"data_types\": {\"grad_accum_dtype\": \"",
                                 Name(config.compute), "\"} does the same"}));
  }
}

void ReadGroups(const Values& values, Config& config, Problems& problems) {
  for (const auto& [name, group_values] : values.groups) {
    CheckType(group_values, "optimizer", problems);
    ParameterGroupConfig& group = config.ebb.parameter_groups[name];
    FieldReader read(group_values);
    VisitGroup(group, read);
    if (group_values.Find("optimizer.type") != nullptr) {
      VisitOptimizer(group.optimizer.emplace(), read);
      CompleteOptimizer(group_values, *group.optimizer, config.remarks);
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
         Join({"the learning rates of the parameter groups ", groups, " are replaced by those of ",
               Word<SchedulerType>(kSchedulerTypes, scheduler.type),
               ", as in DeepSpeed; \"lr_factor\" scales them"}));
}

}  // namespace

absl::StatusOr<Config> FromDocument(Document document, const ReadOptions& options,
                                    std::vector<TakenKey>* keys) {
  Reading reading = ReadValues(document, options.unknown_keys);
  Problems& problems = document.problems;
  const Values& values = reading.values;
  TrainersShare trainer(options.trainer);
  trainer.Fill(reading, problems);

  Config config;
  config.remarks = std::move(reading.remarks);
  config.warnings = std::move(reading.warnings);
  CheckType(values, "optimizer", problems);
  CheckType(values, "scheduler", problems);
  const FieldReader read(values);
  VisitFields(config, read);
  ReadGroups(values, config, problems);
  CompleteOptimizer(values, config.optimizer, config.remarks);
  CompleteScheduler(values, config);
  TakeOldOffload(values, "zero_optimization.cpu_offload", "zero_optimization.offload_optimizer",
                 config.zero.offload_optimizer.device, config.remarks, problems);
  TakeOldOffload(values, "zero_optimization.cpu_offload_param", "zero_optimization.offload_param",
                 config.zero.offload_param.device, config.remarks, problems);
  CheckPrecision(values, config, problems);
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
