// The one list of the field of each key, for reading, writing and validating.
//
// A visitor is called as visit(path, field). The field is plain, optional, or one of the wrappers
// below. A wrapper says which value a word or a missing key stands for.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/keys.h"

namespace ebb::config {

// Counts as not given while it is 0.
struct NotZero {
  int64_t& value;
};
// The word "all" stands for one number.
struct OrAll {
  int64_t& value;
  int64_t all;
};
// The word "auto" stands for a value that is chosen later.
template <class Value>
struct OrAuto {
  Value& value;
  bool& is_auto;
};
template <class Value>
OrAuto(Value&, bool&) -> OrAuto<Value>;
struct Pair {
  double &first, &second;
};
// A switch that chooses the dtype.
struct IsType {
  DType& value;
  DType type;
};
struct Switch {
  bool& value;
  std::string_view word_if_true, word_if_false;
};
template <class Enum>
struct Spelling {
  std::string_view word;
  Enum value;
};
// Counts as not given while its value has no spelling.
template <class Enum>
struct Choice {
  Enum& value;
  std::span<const Spelling<Enum>> spellings;
};
template <class Enum>
struct OptionalChoice {
  std::optional<Enum>& value;
  std::span<const Spelling<Enum>> spellings;
};

inline constexpr Spelling<OptimizerType> kOptimizerTypes[] = {
    {"Adam", OptimizerType::kAdam},       {"AdamW", OptimizerType::kAdamW},
    {"SGD", OptimizerType::kSgd},         {"Lion", OptimizerType::kLion},
    {"Adagrad", OptimizerType::kAdagrad}, {"RMSprop", OptimizerType::kRmsprop},
    {"Lamb", OptimizerType::kLamb},       {"Lars", OptimizerType::kLars}};
// PyTorch's defaults for these types of optimizer, if they differ from the row's default.
struct DefaultOfType {
  std::string_view path, types;
  double value;
  std::string_view text;
};
inline constexpr DefaultOfType kDefaultsOfTypes[] = {
    {"optimizer.params.lr", "Adagrad|RMSprop", 0.01, "0.01"},
    {"optimizer.params.eps", "Adagrad", 1e-10, "1e-10"}};
// Null: the row's default holds.
inline const DefaultOfType* FindDefault(std::string_view path, std::string_view type) {
  for (const DefaultOfType& each : kDefaultsOfTypes) {
    if (each.path == path && HasWord(each.types, type)) return &each;
  }
  return nullptr;
}

inline constexpr Spelling<SchedulerType> kSchedulerTypes[] = {
    {"WarmupLR", SchedulerType::kWarmup},
    {"WarmupDecayLR", SchedulerType::kWarmupDecay},
    {"WarmupCosineLR", SchedulerType::kWarmupCosine},
    {"OneCycle", SchedulerType::kOneCycle},
    {"LRRangeTest", SchedulerType::kLrRangeTest}};
inline constexpr Spelling<ReduceAt> kReduceAts[] = {{"round", ReduceAt::kRound},
                                                    {"step", ReduceAt::kStep}};
inline constexpr Spelling<AsynchronousStep> kAsynchronousSteps[] = {
    {"auto", AsynchronousStep::kAuto},
    {"late", AsynchronousStep::kLate},
    {"off", AsynchronousStep::kOff}};
inline constexpr Spelling<Tier> kOffloadDevices[] = {
    {"none", Tier::kDevice}, {"cpu", Tier::kCpu}, {"nvme", Tier::kNvme}};
inline constexpr Spelling<Tier> kTierNames[] = {
    {"device", Tier::kDevice}, {"none", Tier::kDevice}, {"cpu", Tier::kCpu}, {"nvme", Tier::kNvme}};
inline constexpr Spelling<VerifySwap> kVerifySwaps[] = {{"off", VerifySwap::kOff},
                                                        {"states", VerifySwap::kStates},
                                                        {"all", VerifySwap::kAll},
                                                        {"auto", VerifySwap::kAuto}};
inline constexpr Spelling<IoBackend> kIoBackends[] = {
    {"auto", IoBackend::kAuto}, {"io_uring", IoBackend::kUring}, {"threads", IoBackend::kThreads}};

inline constexpr Spelling<UnknownKeys> kUnknownKeys[] = {{"error", UnknownKeys::kError},
                                                         {"warn", UnknownKeys::kWarn}};

template <class Enum>
std::string_view Word(std::span<const Spelling<Enum>> spellings, Enum value) {
  for (const Spelling<Enum>& spelling : spellings) {
    if (spelling.value == value) return spelling.word;
  }
  return "";
}

// Calls `visit` only for parameters of an optimizer or scheduler of this type.
template <class Visitor>
auto ForType(std::string_view type, Visitor& visit) {
  return [type, &visit](std::string_view path, auto&& field) {
    const std::string_view types = FindKey(path)->only_for;
    if (types.empty() || HasWord(types, type)) visit(path, field);
  };
}

template <class Visitor>
void VisitOptimizer(OptimizerConfig& optimizer, Visitor& visit) {
  visit("optimizer.type", Choice<OptimizerType>{optimizer.type, kOptimizerTypes});
  auto parameter = ForType(Word<OptimizerType>(kOptimizerTypes, optimizer.type), visit);
  parameter("optimizer.params.lr", optimizer.learning_rate);
  parameter("optimizer.params.betas", Pair{optimizer.beta1, optimizer.beta2});
  parameter("optimizer.params.eps", optimizer.epsilon);
  parameter("optimizer.params.weight_decay", optimizer.weight_decay);
  parameter("optimizer.params.bias_correction", optimizer.bias_correction);
  parameter("optimizer.params.adam_w_mode", optimizer.decoupled_weight_decay);
  parameter("optimizer.params.max_coeff", optimizer.max_coefficient);
  parameter("optimizer.params.min_coeff", optimizer.min_coefficient);
  parameter("optimizer.params.eps_inside_sqrt", optimizer.epsilon_inside_root);
  parameter("optimizer.params.trust_coefficient", optimizer.trust_coefficient);
  parameter("optimizer.params.momentum", optimizer.momentum);
  parameter("optimizer.params.dampening", optimizer.dampening);
  parameter("optimizer.params.nesterov", optimizer.nesterov);
  parameter("optimizer.params.lr_decay", optimizer.lr_decay);
  parameter("optimizer.params.initial_accumulator_value", optimizer.initial_accumulator_value);
  parameter("optimizer.params.alpha", optimizer.alpha);
  parameter("optimizer.params.centered", optimizer.centered);
}

template <class Visitor>
void VisitScheduler(SchedulerConfig& scheduler, Visitor& visit) {
  visit("scheduler.type", Choice<SchedulerType>{scheduler.type, kSchedulerTypes});
  auto parameter = ForType(Word<SchedulerType>(kSchedulerTypes, scheduler.type), visit);
  parameter("scheduler.params.warmup_min_lr", scheduler.warmup_min_lr);
  parameter("scheduler.params.warmup_max_lr", scheduler.warmup_max_lr);
  parameter("scheduler.params.warmup_num_steps", scheduler.warmup_num_steps);
  parameter("scheduler.params.warmup_type", Switch{scheduler.warmup_log, "log", "linear"});
  parameter("scheduler.params.total_num_steps", scheduler.total_num_steps);
  parameter("scheduler.params.warmup_min_ratio", scheduler.warmup_min_ratio);
  parameter("scheduler.params.cos_min_ratio", scheduler.cos_min_ratio);
  parameter("scheduler.params.cycle_min_lr", scheduler.cycle_min_lr);
  parameter("scheduler.params.cycle_max_lr", scheduler.cycle_max_lr);
  parameter("scheduler.params.decay_lr_rate", scheduler.decay_lr_rate);
  parameter("scheduler.params.cycle_first_step_size", scheduler.cycle_first_step_size);
  parameter("scheduler.params.cycle_second_step_size", scheduler.cycle_second_step_size);
  parameter("scheduler.params.cycle_first_stair_count", scheduler.cycle_first_stair_count);
  parameter("scheduler.params.cycle_second_stair_count", scheduler.cycle_second_stair_count);
  parameter("scheduler.params.decay_step_size", scheduler.decay_step_size);
  parameter("scheduler.params.cycle_momentum", scheduler.cycle_momentum);
  parameter("scheduler.params.cycle_min_mom", scheduler.cycle_min_mom);
  parameter("scheduler.params.cycle_max_mom", scheduler.cycle_max_mom);
  parameter("scheduler.params.decay_mom_rate", scheduler.decay_mom_rate);
  parameter("scheduler.params.lr_range_test_min_lr", scheduler.lr_range_test_min_lr);
  parameter("scheduler.params.lr_range_test_step_size", scheduler.lr_range_test_step_size);
  parameter("scheduler.params.lr_range_test_step_rate", scheduler.lr_range_test_step_rate);
  parameter("scheduler.params.lr_range_test_staircase", scheduler.lr_range_test_staircase);
}

template <class Visitor>
void VisitPrecision(Config& config, Visitor& visit) {
  visit("fp16.enabled", IsType{config.compute, DType::kFloat16});
  visit("fp16.loss_scale", config.loss_scale.static_scale);
  visit("fp16.initial_scale_power", config.loss_scale.initial_scale_power);
  visit("fp16.loss_scale_window", config.loss_scale.window);
  visit("fp16.hysteresis", config.loss_scale.hysteresis);
  visit("fp16.consecutive_hysteresis", config.loss_scale.consecutive_hysteresis);
  visit("fp16.min_loss_scale", config.loss_scale.min_scale);
  visit("bf16.enabled", IsType{config.compute, DType::kBFloat16});
  visit("bf16.check_grad_overflow", config.bf16_check_grad_overflow);
  visit("communication_data_type", config.communication);
  visit("data_types.grad_accum_dtype", config.accumulation);
}

template <class Visitor>
void VisitOffload(OffloadParamConfig& offload, Visitor& visit) {
  visit("zero_optimization.offload_param.device", Choice<Tier>{offload.device, kOffloadDevices});
  visit("zero_optimization.offload_param.nvme_path", offload.nvme_paths);
  visit("zero_optimization.offload_param.buffer_count", offload.buffer_count);
  visit("zero_optimization.offload_param.buffer_size", offload.buffer_size);
  visit("zero_optimization.offload_param.max_in_cpu", offload.max_in_cpu);
  visit("zero_optimization.offload_param.pin_memory", offload.pin_memory);
}

template <class Visitor>
void VisitOffload(OffloadOptimizerConfig& offload, Visitor& visit) {
  visit("zero_optimization.offload_optimizer.device",
        Choice<Tier>{offload.device, kOffloadDevices});
  visit("zero_optimization.offload_optimizer.nvme_path", offload.nvme_paths);
  visit("zero_optimization.offload_optimizer.buffer_count", offload.buffer_count);
  visit("zero_optimization.offload_optimizer.pin_memory", offload.pin_memory);
  visit("zero_optimization.offload_optimizer.ratio", OrAuto{offload.ratio, offload.measures_ratio});
}

template <class Visitor>
void VisitZero(ZeroConfig& zero, Visitor& visit) {
  visit("zero_optimization.stage", zero.stage);
  visit("zero_optimization.overlap_comm", zero.overlap_comm);
  visit("zero_optimization.reduce_bucket_size", zero.reduce_bucket_size);
  visit("zero_optimization.allgather_bucket_size", zero.allgather_bucket_size);
  visit("zero_optimization.stage3_prefetch_bucket_size", zero.prefetch_bucket_size);
  visit("zero_optimization.stage3_param_persistence_threshold", zero.param_persistence_threshold);
  visit("zero_optimization.stage3_model_persistence_threshold", zero.model_persistence_threshold);
  visit("zero_optimization.stage3_max_live_parameters", zero.max_live_parameters);
  visit("zero_optimization.stage3_max_reuse_distance", zero.max_reuse_distance);
  visit("zero_optimization.mics_shard_size", zero.mics_shard_size);
  visit("zero_optimization.zero_hpz_partition_size", zero.hpz_partition_size);
  visit("zero_optimization.sub_group_size", zero.sub_group_size);
  VisitOffload(zero.offload_param, visit);
  VisitOffload(zero.offload_optimizer, visit);
}

template <class Visitor>
void VisitAio(AioConfig& aio, Visitor& visit) {
  visit("aio.block_size", aio.block_size);
  visit("aio.queue_depth", aio.queue_depth);
  visit("aio.intra_op_parallelism", aio.intra_op_parallelism);
  visit("aio.single_submit", aio.single_submit);
}

template <class Visitor>
void VisitEbb(EbbConfig& ebb, Visitor& visit) {
  visit("ebb.reduce_at", Choice<ReduceAt>{ebb.reduce_at, kReduceAts});
  visit("ebb.micro_batches_per_round", OrAll{ebb.micro_batches_per_round, 0});
  visit("ebb.asynchronous_step",
        Choice<AsynchronousStep>{ebb.asynchronous_step, kAsynchronousSteps});
  visit("ebb.check_overflow", ebb.check_overflow);
  visit("ebb.strict", ebb.strict);
  visit("ebb.prefetch_depth", OrAll{ebb.prefetch_depth, INT64_MAX});
  visit("ebb.coalesce", OrAuto{ebb.coalesce_bytes, ebb.measures_coalesce});
  visit("ebb.reshard_after_forward", ebb.reshard_after_forward);
  visit("ebb.reduction_group", NotZero{ebb.reduction_group});
  visit("ebb.shard_group", ebb.shard_group);
  visit("ebb.timeout_seconds", ebb.timeout_seconds);
  visit("ebb.deterministic_reduce", ebb.deterministic_reduce);
  visit("ebb.register_buffers", ebb.register_buffers);
  visit("ebb.trace", ebb.trace);
  visit("ebb.offload_gradients", OptionalChoice<Tier>{ebb.offload_gradients, kTierNames});
  visit("ebb.offload_activations", OptionalChoice<Tier>{ebb.offload_activations, kTierNames});
  visit("ebb.host_memory", ebb.host_memory);
  visit("ebb.device_memory", ebb.device_memory);
  visit("ebb.split_master", ebb.split_master);
  visit("ebb.stochastic_rounding", ebb.stochastic_rounding);
  visit("ebb.verify_swap", Choice<VerifySwap>{ebb.verify_swap, kVerifySwaps});
  visit("ebb.unknown_keys", OptionalChoice<UnknownKeys>{ebb.unknown_keys, kUnknownKeys});
  visit("ebb.io_backend", Choice<IoBackend>{ebb.io_backend, kIoBackends});
}

// All fields but the parameter groups.
template <class Visitor>
void VisitFields(Config& config, Visitor& visit) {
  visit("train_batch_size", NotZero{config.train_batch_size});
  visit("train_micro_batch_size_per_gpu", NotZero{config.micro_batch_size});
  visit("gradient_accumulation_steps", NotZero{config.gradient_accumulation_steps});
  visit("gradient_clipping", config.gradient_clipping);
  VisitPrecision(config, visit);
  VisitOptimizer(config.optimizer, visit);
  VisitScheduler(config.scheduler, visit);
  VisitZero(config.zero, visit);
  VisitAio(config.aio, visit);
  visit("activation_checkpointing.cpu_checkpointing",
        config.activation_checkpointing.cpu_checkpointing);
  VisitEbb(config.ebb, visit);
}

// The fields of one group, without its optimizer's.
template <class Visitor>
void VisitGroup(ParameterGroupConfig& group, Visitor& visit) {
  visit("ebb.parameter_groups.*.lr_factor", group.lr_factor);
  visit("ebb.parameter_groups.*.weight_decay", group.weight_decay);
}

}  // namespace ebb::config
