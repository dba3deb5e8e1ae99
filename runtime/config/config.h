// One JSON file in DeepSpeed's vocabulary, as one validated struct.
//
// FromFile and FromJson read, check and complete a configuration. They do not know the world size,
// so ForWorld completes the batch triple (Engine::Create calls it). Fields are public. A program
// may set them after reading (as `gpt --stage` does) and calls Validate() then. keys.h is the table
// of keys, ranges and meanings.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/base/io_backend.h"
#include "ebb/runtime/base/tier.h"

namespace ebb {

enum class OptimizerType {
  kAdam,
  kAdamW,
  kSgd,
  kLion,
  kAdagrad,
  kRmsprop,
  kLamb,
  kLars,
  kMuon,
};
// Whether an update first needs norms of whole parameters.
constexpr bool TakesNorms(OptimizerType type) {
  return type == OptimizerType::kLamb || type == OptimizerType::kLars;
}
// How the states of an optimizer are kept.
enum class OptimizerStates {
  kFloat32,
  kBFloat16,
  k8Bit,  // in blocks of 256 elements with one scale each (Encoding)
};
struct OptimizerConfig {
  OptimizerType type = OptimizerType::kAdamW;
  double learning_rate = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;
  bool bias_correction = true;
  // adam_w_mode. "Adam" has it too unless adam_w_mode is false, as in DeepSpeed.
  bool decoupled_weight_decay = true;
  double momentum = 0;                   // SGD, RMSprop, LARS, Muon
  double dampening = 0;                  // SGD, LARS
  bool nesterov = false;                 // SGD, LARS, Muon
  double lr_decay = 0;                   // Adagrad
  double initial_accumulator_value = 0;  // Adagrad
  double alpha = 0.99;                   // RMSprop
  bool centered = false;                 // RMSprop
  // LAMB: bounds of the ratio of a parameter's norm to its update's (max_coeff, min_coeff).
  double max_coefficient = 10, min_coefficient = 0.01;
  bool epsilon_inside_root = false;  // LAMB: eps_inside_sqrt
  double trust_coefficient = 0.001;  // LARS
  // Muon (newton_schulz.h), which updates matrices. AdamW updates all other parameters, with a rate
  // of its own and the betas and epsilon above.
  std::optional<double> adam_learning_rate = {};  // unset: learning_rate
  int64_t newton_schulz_steps = 5;
  std::array<double, 3> newton_schulz_coefficients = {3.4445, -4.7750, 2.0315};
  DType newton_schulz_dtype = DType::kBFloat16;  // fp32 or bf16
  // adjust_lr_fn: the update is scaled to the usual size of AdamW's (Liu et al. 2025, "Muon is
  // scalable for LLM training", section 2.2), or as Jordan et al. have it.
  bool matches_adamw_size = false;
  OptimizerStates states = OptimizerStates::kFloat32;
  int64_t min_8bit_size = 4096;  // smaller parameters have fp32 states beside 8-bit ones

  friend bool operator==(const OptimizerConfig&, const OptimizerConfig&) = default;
};

enum class SchedulerType { kNone, kWarmup, kWarmupDecay, kWarmupCosine, kOneCycle, kLrRangeTest };
struct SchedulerConfig {
  SchedulerType type = SchedulerType::kNone;
  // WarmupLR, WarmupDecayLR, WarmupCosineLR
  double warmup_min_lr = 0;
  // Unset: the optimizer's rate for WarmupLR, 0.001 for WarmupDecayLR.
  std::optional<double> warmup_max_lr = {};
  int64_t warmup_num_steps = 1000;
  bool warmup_log = true;  // warmup_type: log or linear
  int64_t total_num_steps = 0;
  double warmup_min_ratio = 0, cos_min_ratio = 0.0001;
  // OneCycle
  double cycle_min_lr = 0, cycle_max_lr = 0, decay_lr_rate = 0;
  int64_t cycle_first_step_size = 2000;
  std::optional<int64_t> cycle_second_step_size = {};
  int64_t cycle_first_stair_count = 0;
  std::optional<int64_t> cycle_second_stair_count = {};
  int64_t decay_step_size = 0;
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8, cycle_max_mom = 0.9, decay_mom_rate = 0;
  // LRRangeTest
  double lr_range_test_min_lr = 1e-3, lr_range_test_step_rate = 1.0;
  int64_t lr_range_test_step_size = 2000;
  bool lr_range_test_staircase = false;

  friend bool operator==(const SchedulerConfig&, const SchedulerConfig&) = default;
};

struct LossScaleConfig {
  double static_scale = 0;  // fp16.loss_scale; 0: dynamic
  int64_t initial_scale_power = 16, window = 1000, hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_scale = 1;

  friend bool operator==(const LossScaleConfig&, const LossScaleConfig&) = default;
};

// The tier of parameters between their uses. Only at stage 3.
struct OffloadParamConfig {
  Tier device = Tier::kDevice;               // "none", "cpu", "nvme"
  std::vector<std::string> nvme_paths = {};  // folders; several are striped
  // Upper limits: the number of staging buffers between the disk and the device, and the elements
  // of one. Unset: DeepSpeed's default, and the size of a rank's slice of the largest unit.
  int64_t buffer_count = 5;
  std::optional<int64_t> buffer_size = {};
  int64_t max_in_cpu = 1'000'000'000;  // elements that stay in RAM while the others are on NVMe
  bool pin_memory = true;

  friend bool operator==(const OffloadParamConfig&, const OffloadParamConfig&) = default;
};

// The tier of masters and optimizer states, and so of the update. From stage 1 on.
struct OffloadOptimizerConfig {
  Tier device = Tier::kDevice;
  std::vector<std::string> nvme_paths = {};
  int64_t buffer_count = 4;  // upper limit, staging buffers
  bool pin_memory = true;
  double ratio = 1;  // the offloaded part of the states; the rest stays on the device
  // "auto": Create chooses the ratio and sets it. A plan without an engine uses the `ratio` given
  // here; PredictMemory uses what ebb.device_memory asks for.
  bool measures_ratio = false;

  friend bool operator==(const OffloadOptimizerConfig&, const OffloadOptimizerConfig&) = default;
};

// How swap files are read and written.
struct AioConfig {
  int64_t block_size = 1048576;      // bytes of one request, a multiple of 4096
  int64_t queue_depth = 32;          // requests in flight, per thread of I/O
  int64_t intra_op_parallelism = 1;  // threads of I/O
  bool single_submit = false;        // requests submitted one by one

  friend bool operator==(const AioConfig&, const AioConfig&) = default;
};

struct ActivationCheckpointingConfig {
  bool cpu_checkpointing = false;  // same as ebb.offload_activations "cpu", unless that is given

  friend bool operator==(const ActivationCheckpointingConfig&,
                         const ActivationCheckpointingConfig&) = default;
};

struct ZeroConfig {
  int stage = 0;
  bool overlap_comm = true;
  // Upper limits, in elements. Unset: the plan chooses.
  std::optional<int64_t> reduce_bucket_size = {}, allgather_bucket_size = {};
  int64_t prefetch_bucket_size = 50'000'000;        // stage3_prefetch_bucket_size
  int64_t param_persistence_threshold = 100'000;    // of a whole unit
  int64_t model_persistence_threshold = INT64_MAX;  // of all persistent units together
  int64_t max_live_parameters = 1'000'000'000;
  int64_t max_reuse_distance = 1'000'000'000;
  int64_t mics_shard_size = -1;  // ebb.shard_group by another name; below 1: not given
  // ZeRO++'s hpZ: consecutive ranks that together hold a second copy of each unit, for all gathers
  // of a step but the first. 1: none; ForWorld sets 1 where it would change nothing.
  int64_t hpz_partition_size = 1;  // zero_hpz_partition_size
  OffloadParamConfig offload_param = {};
  OffloadOptimizerConfig offload_optimizer = {};
  int64_t sub_group_size = 1'000'000'000;  // upper limit: elements updated as one piece

  friend bool operator==(const ZeroConfig&, const ZeroConfig&) = default;
};

// "ebb.parameter_groups": {"NAME": {...}}, for parameters with ParameterSpec::group NAME.
struct ParameterGroupConfig {
  double lr_factor = 1;
  std::optional<double> weight_decay = {};
  // Muon: whether matrices of this group are its; unset: by the rule of matrix_groups.h. A parameter
  // of the group is matrices one behind the other, with rows in this ratio: q, k and v, or heads.
  std::optional<bool> use_muon = {};
  std::vector<int64_t> muon_matrices = {1};
  // Replaces the top-level one, with its own learning rate.
  std::optional<OptimizerConfig> optimizer = {};

  friend bool operator==(const ParameterGroupConfig&, const ParameterGroupConfig&) = default;
};

// Default: step at stages 0 and 1, round at 2 and 3.
enum class ReduceAt { kDefault, kRound, kStep };
// Auto: early where allowed, otherwise late.
enum class AsynchronousStep { kAuto, kLate, kOff };
// Which parts of swap files are compared with a checksum when they are read back: masters and
// states, or all. Auto: all if Create measures that steps get no longer by it, otherwise states.
enum class VerifySwap { kOff, kStates, kAll, kAuto };
// Whether an unknown key is an error or a warning.
enum class UnknownKeys { kError, kWarn };

// How many ranks share a model's layers (tensor) and follow each other in it (pipeline). The other
// ranks are data ranks.
struct MeshConfig {
  int64_t pipeline = 1, tensor = 1;

  // How many of `world` ranks are data ranks.
  int DataRanks(int world) const { return static_cast<int>(world / (pipeline * tensor)); }
  friend bool operator==(const MeshConfig&, const MeshConfig&) = default;
};

struct EbbConfig {
  MeshConfig mesh = {};
  ReduceAt reduce_at = ReduceAt::kDefault;
  int64_t micro_batches_per_round = 1;  // 0: "all"
  AsynchronousStep asynchronous_step = AsynchronousStep::kAuto;
  bool check_overflow = true;
  // Whether a step must have every round, and the backward of every trainable visit.
  // StepOptions::may_leave_out allows it for one step.
  bool strict = true;
  int64_t prefetch_depth = 1;  // units gathered ahead of the one in use; "all": INT64_MAX
  // "coalesce". Unset: the smaller of DeepSpeed's bucket and 1 MiB.
  std::optional<int64_t> coalesce_bytes = {};
  // "auto": if NCCL connects the ranks, Create measures coalesce_bytes and sets it. Otherwise it
  // counts as not given.
  bool measures_coalesce = false;
  bool reshard_after_forward = true;
  int64_t reduction_group = 0;  // ranks; 0: the ranks of a host
  // HSDP, MiCS: states are cut over this many consecutive ranks, and every further group of as many
  // ranks repeats them. 0: the world.
  int64_t shard_group = 0;
  double timeout_seconds = 600;
  // Over NCCL: sums in one order, by an all-to-all and our own kernel, with the same bits as the
  // CPU's.
  bool deterministic_reduce = false;
  bool register_buffers = true;  // pools, with NCCL, to move them without copies
  std::string trace = "";        // file of the timeline; "": none
  // Unset: gradients follow the optimizer, to the cpu at most, and activations stay on the device.
  std::optional<Tier> offload_gradients = {}, offload_activations = {};
  // Bytes that the pools of a tier may take. Unset: all of the device's memory; for the host what
  // staging needs.
  std::optional<int64_t> host_memory = {}, device_memory = {};
  bool split_master = false;  // a master is its bf16 parameter plus 16 more bits
  // A master is its bf16 parameter alone, and updates round it up or down at random.
  bool stochastic_rounding = false;
  VerifySwap verify_swap = VerifySwap::kAuto;
  // Auto: ForWorld turns the environment's EBB_IO_URING=0 into kThreads. May differ between ranks.
  IoBackend io_backend = IoBackend::kAuto;
  // Unset: an error if DeepSpeed refuses the key or it looks misspelt, otherwise a warning.
  std::optional<UnknownKeys> unknown_keys = {};
  std::map<std::string, ParameterGroupConfig> parameter_groups = {};

  friend bool operator==(const EbbConfig&, const EbbConfig&) = default;
};

// Values that a trainer supplies. A file leaves a value to the trainer with "auto", as it does to
// Hugging Face's Trainer, or by leaving out a key that training needs.
struct TrainerValues {
  std::optional<int64_t> micro_batch_size = {}, gradient_accumulation_steps = {};
  std::optional<int64_t> total_steps = {}, warmup_steps = {};
  std::optional<double> learning_rate = {}, beta1 = {}, beta2 = {}, epsilon = {};
  std::optional<double> weight_decay = {}, gradient_clipping = {};
  std::optional<DType> compute = {};
};

struct Config;
struct ReadOptions {
  TrainerValues trainer = {};
  std::optional<UnknownKeys> unknown_keys = {};  // if set, replaces ebb.unknown_keys
  // Called after reading, before the keys are checked together. So a value that the program
  // overrides causes no error in the file.
  std::function<void(Config&)> overrides = {};
  // The number of ranks, if the program knows it by now. Errors of ForWorld are then reported
  // together with the file's other errors.
  std::function<int(const Config&)> world = {};
};

struct Config {
  // The batch triple; 0: not given. ForWorld completes it.
  int64_t train_batch_size = 0, micro_batch_size = 0, gradient_accumulation_steps = 0;
  DType compute = DType::kFloat32;
  std::optional<DType> communication = {};  // communication_data_type; unset: compute
  DType accumulation = DType::kFloat32;     // data_types.grad_accum_dtype
  double gradient_clipping = 1.0;           // global L2 norm; 0: off
  bool bf16_check_grad_overflow = true;
  OptimizerConfig optimizer = {};
  SchedulerConfig scheduler = {};
  LossScaleConfig loss_scale = {};
  ZeroConfig zero = {};
  AioConfig aio = {};
  ActivationCheckpointingConfig activation_checkpointing = {};
  EbbConfig ebb = {};
  // Remarks about values that were not taken literally, a sentence each: keys without meaning here,
  // upper limits, approximations, defaults that may surprise users of other runtimes. Logged once
  // at Create, on rank 0.
  std::vector<std::string> remarks = {};
  // Unknown keys that were ignored. Logged once as warnings.
  std::vector<std::string> warnings = {};

  // If a file is wrong in several ways, the error lists all of them, each with its line and column.
  static absl::StatusOr<Config> FromFile(const std::string& path, const ReadOptions& options = {});
  static absl::StatusOr<Config> FromJson(std::string_view json, const ReadOptions& options = {});

  // How each key of a file was taken and what its default is, as a table.
  static absl::StatusOr<std::string> ExplainFile(const std::string& path,
                                                 const ReadOptions& options = {});

  // The configuration for `world` ranks, of all axes of ebb.mesh: the batch triple completed (train
  // = micro * accumulation * data ranks), micro_batches_per_round, reduce_at and communication
  // resolved, and io_backend as the environment has it. offload_optimizer takes the nvme_paths of offload_param if only those are
  // given and gradients or activations are on NVMe. An error names all numbers, which of them were
  // not given, and the nearest choices that work.
  absl::StatusOr<Config> ForWorld(int world) const;

  // The number of ranks for which the batch triple fits: `preferred`, or else the number that the
  // three sizes imply, or the largest below `preferred` that divides them. `preferred` if none
  // fits.
  int FittingWorld(int preferred) const;

  // Checks the fields together, after a program changed them.
  absl::Status Validate() const;

  // All fields, resolved, as JSON with DeepSpeed's keys. FromJson reads the same Config from it,
  // but without the remarks. Parameters of other types of optimizers and schedulers are left out.
  std::string ToJson() const;

  // Derived values, in one place, so that the plan, the engine and a table agree.
  DType communication_dtype() const { return communication.value_or(compute); }
  bool checks_overflow() const;   // fp16: always; bf16: unless either switch is off; fp32: by ebb's
  bool reduces_at_round() const;  // resolved reduce_at
  Tier parameter_tier() const;    // below stage 3: the device
  Tier optimizer_tier() const;    // also of masters; at stage 0: the device
  Tier gradient_tier() const;     // of reduced gradients; not given: cpu if the optimizer is not on
                                  // the device, otherwise the device
  Tier activation_tier() const;   // of boundary activations
  bool uses_nvme() const;         // whether any of the four tiers is nvme

  friend bool operator==(const Config&, const Config&) = default;
};

}  // namespace ebb
