// Rows about training itself: batch, precision, gradients, optimizer and scheduler.
#include <array>

#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

using enum Kind;

constexpr double kLargestScalePower = 127;  // 2^127 is the largest power of two in fp32
constexpr double kLargestRate = 1e30;       // products with factors are fp32 numbers, too

// A switch that chooses the compute dtype.
Field ComputesIn(DType dtype) {
  Field field(kFlag);
  field.take = [=](const Json& value, Config& config) {
    if (value.get<bool>()) config.compute = dtype;
  };
  field.give = [=](Config& config) { return config.compute == dtype; };
  return field;
}

Field KeepsStatesInBf16() {
  Field field(kFlag);
  field.take = [](const Json& value, Config& config) {
    if (value.get<bool>()) config.optimizer.states = OptimizerStates::kBFloat16;
  };
  field.give = [](Config& config) { return config.optimizer.states == OptimizerStates::kBFloat16; };
  return field;
}

Field Betas() {
  Field field(kNumberPair);
  field.take = [](const Json& value, Config& config) {
    config.optimizer.beta1 = value[0].get<double>();
    config.optimizer.beta2 = value[1].get<double>();
  };
  field.give = [](Config& config) {
    return Json::array({config.optimizer.beta1, config.optimizer.beta2});
  };
  return field;
}

Field Coefficients() {
  Field field(kNumberTriple);
  field.take = [](const Json& value, Config& config) {
    config.optimizer.newton_schulz_coefficients = value.get<std::array<double, 3>>();
  };
  field.give = [](Config& config) { return Json(config.optimizer.newton_schulz_coefficients); };
  return field;
}

// More words, which are refused.
constexpr auto NotBuilt(std::string_view words) {
  return [=](Row& row) {
    row.taken = Taken::kRefused, row.harmless = row.words;
    row.words = Kept(Join({row.words, "|", words}));
  };
}

std::vector<Row> Top() {
  using C = Config;
  return {
      {"train_batch_size", &C::train_batch_size, "samples of one optimizer step over all ranks",
       From(1), IfAbsent("from the next two")},
      {"train_micro_batch_size_per_gpu", &C::micro_batch_size,
       "samples of one micro-batch of a rank", From(1, kLargestInt),
       IfAbsent("from `train_batch_size`")},
      {"gradient_accumulation_steps", &C::gradient_accumulation_steps,
       "micro-batches of one step of a rank", From(1, kLargestInt),
       IfAbsent("1, or from the other two")},
      {"managed_gradient_accumulation", kFlag,
       "a step lies between BeginStep and Finish; StepOptions::micro_batches sets how many "
       "micro-batches it has",
       RefusedUnless("true")},
      {"gradient_clipping", &C::gradient_clipping,
       "largest global L2 norm of the gradients; 0: off", From(0), Default("1.0")},
      {"gradient_allreduce_op", kWord,
       "gradients are divided by the world; StepOptions::gradient_divisor sets another divisor",
       Words("mean|sum"), RefusedUnless("mean")},
      {"sparse_gradients", kFlag, "not built: gradients are dense", kUnlessFalse},

      {"fp16", kBlock, "compute in fp16, with loss scaling"},
      {"fp16.enabled", ComputesIn(DType::kFloat16), "whether parameters are computed with in fp16"},
  };
}

std::vector<Row> Fp16() {
  using L = LossScaleConfig;
  return {
      {"loss_scale", &L::static_scale, "static loss scale; 0: dynamic", From(0, 0x1p127)},
      {"initial_scale_power", &L::initial_scale_power, "the dynamic scale starts at 2 to this",
       From(0, kLargestScalePower)},
      {"loss_scale_window", &L::window, "clean steps after which it doubles", From(1)},
      {"hysteresis", &L::hysteresis, "overflows until the scale is halved", From(1)},
      {"consecutive_hysteresis", &L::consecutive_hysteresis,
       "whether a clean step gives the overflows of fp16.hysteresis back"},
      {"min_loss_scale", &L::min_scale, "the dynamic scale never falls below; 0: 1",
       From(0, 0x1p127)},
      {"fp16_master_weights_and_grads", kFlag, "not built: masters are fp32", kUnlessFalse},
  };
}

// bf16, and the dtypes that follow the compute dtype: a difference of two files names that first.
std::vector<Row> Bf16AndOtherDTypes() {
  return {
      {"bf16", kBlock, "compute in bf16"},
      {"bfloat16", kAnything, "an old name of a key", SameAs("bf16"), kDeprecated},
      {"bf16.enabled", ComputesIn(DType::kBFloat16),
       "whether parameters are computed with in bf16"},
      {"bf16.check_grad_overflow", &Config::bf16_check_grad_overflow,
       "whether a step with inf or nan in a gradient is skipped"},
      {"bf16.bf16_master_weights_and_grads", kFlag, "not built: masters are fp32", kUnlessFalse},
      {"bf16.bf16_optimizer_states", KeepsStatesInBf16(),
       "whether optimizer states are kept in bf16: `optimizer.params.states` \"bf16\""},

      {"communication_data_type", &Config::communication, "dtype in which gradients are reduced",
       IfAbsent("the compute dtype")},

      {"data_types", kOpenBlock, "dtypes apart from the compute dtype"},
      {"data_types.grad_accum_dtype", &Config::accumulation,
       "dtype in which reduced gradients are accumulated"},
      {"data_types.param_dtype", kDType, "the compute dtype again; both must agree",
       IfAbsent("the compute dtype")},
  };
}

std::vector<Row> Optimizer() {
  using O = OptimizerConfig;
  return {
      {"optimizer", kOpenBlock, "the update rule; AdamW with its defaults when not given"},
      {"optimizer.type", Choice(&O::type, "Adam|AdamW|SGD|Lion|Adagrad|RMSprop|Lamb|Lars|Muon"),
       "not built, but you can write your own (EngineOptions::optimizer, an OptimizerSpec)",
       NotBuilt("OneBitAdam|ZeroOneAdam|OneBitLamb|MuAdam|MuAdamW|MuSGD|Adadelta|Adafactor|"
                "Adamax|ASGD|LBFGS|NAdam|RAdam|Rprop|SparseAdam")},
      {"optimizer.params", kBlock, "parameters of the optimizer"},
  };
}

std::vector<Row> OptimizerParams() {
  using O = OptimizerConfig;
  return {
      {"lr", &O::learning_rate, "learning rate; 0.01 when not given to Adagrad or RMSprop",
       From(0, kLargestRate), DefaultFor("Adagrad|RMSprop", "0.01")},
      {"betas", Betas(),
       "decay of the two moments; Lion: of the added and of the kept momentum; Muon: AdamW's, "
       "[0.9, 0.95] when not given",
       Below(0, 1), For("Adam|AdamW|Lion|Lamb|Muon"), Default("[0.9, 0.999]"),
       DefaultFor("Muon", "[0.9, 0.95]")},
      {"eps", &O::epsilon, "added to the denominator; 1e-10 when not given to Adagrad or Muon",
       From(0), For("Adam|AdamW|Adagrad|RMSprop|Lamb|Lars|Muon"), Default("1e-8"),
       DefaultFor("Adagrad|Muon", "1e-10")},
      {"weight_decay", &O::weight_decay, "weight decay", From(0)},
      {"bias_correction", &O::bias_correction, "whether moments are corrected",
       For("Adam|AdamW|Lamb")},
      {"max_coeff", &O::max_coefficient,
       "largest factor of a parameter's update; the factor is its norm over the update's",
       From(0, kLargestRate), For("Lamb"), Default("10.0")},
      {"min_coeff", &O::min_coefficient, "smallest such factor", From(0, kLargestRate),
       For("Lamb")},
      {"eps_inside_sqrt", &O::epsilon_inside_root,
       "whether eps is added to the variance instead of its root", For("Lamb")},
      {"trust_coefficient", &O::trust_coefficient,
       "a parameter's update is scaled by this times its norm over that of its gradient",
       From(0, kLargestRate), For("Lars")},
      {"adam_w_mode", &O::decoupled_weight_decay, "whether weight decay is decoupled",
       For("Adam|AdamW")},
      {"amsgrad", kFlag, "not built", kUnlessFalse, For("Adam|AdamW|Lamb")},
      {"maximize", kFlag, "not built: turn the loss's sign", kUnlessFalse},
      {"momentum", &O::momentum, "momentum; 0.95 when not given to Muon", From(0, 1),
       For("SGD|RMSprop|Lars|Muon"), DefaultFor("Muon", "0.95")},
      {"dampening", &O::dampening, "dampening of the momentum", From(0, 1), For("SGD|Lars")},
      {"nesterov", &O::nesterov, "Nesterov's momentum; true when not given to Muon",
       For("SGD|Lars|Muon"), DefaultFor("Muon", "true")},
      {"lr_decay", &O::lr_decay, "the rate of step n is lr / (1 + (n - 1) * lr_decay)", From(0),
       For("Adagrad")},
      {"initial_accumulator_value", &O::initial_accumulator_value,
       "initial value of the sum of squares", From(0, kLargestRate), For("Adagrad")},
      {"alpha", &O::alpha, "decay of the average of squares", Below(0, 1), For("RMSprop")},
      {"centered", &O::centered,
       "whether the square of the average gradient is taken from the average of squares",
       For("RMSprop")},
      {"states", Choice(&O::states, "fp32|bf16|8bit"),
       "how the optimizer's states are kept; 8bit: a byte for each element, and a scale for each "
       "256 (bitsandbytes' and torchao's 8-bit optimizers); Muon: those of AdamW beside it",
       For("Adam|AdamW|SGD|Lion|Adagrad|RMSprop|Muon"), Default("fp32")},
      {"min_8bit_size", &O::min_8bit_size,
       "parameters with fewer elements, such as biases and norms, keep fp32 states beside 8-bit "
       "ones",
       From(0), For("Adam|AdamW|SGD|Lion|Adagrad|RMSprop|Muon")},
      {"max_grad_norm", kAnything, "clipping is not the optimizer's: set \"gradient_clipping\"",
       RefusedUnless("")},
  };
}

std::vector<Row> MuonParams() {
  using O = OptimizerConfig;
  return {
      {"muon_lr", kNumber, "learning rate of matrices, instead of `lr`", From(0, kLargestRate),
       For("Muon")},
      {"adam_lr", &O::adam_learning_rate,
       "learning rate of the parameters that AdamW updates beside Muon", From(0, kLargestRate),
       For("Muon"), IfAbsent("`lr`")},
      {"ns_steps", &O::newton_schulz_steps, "steps of Newton-Schulz's iteration", From(1, 100),
       For("Muon")},
      {"ns_coefficients", Coefficients(), "its coefficients", From(-1e3, 1e3), For("Muon")},
      {"ns_dtype", Choice(&O::newton_schulz_dtype, "fp32|bf16"),
       "the type of its matrices; bf16 is torch's and DeepSpeed's", For("Muon")},
      {"adjust_lr_fn", Choice(&O::matches_adamw_size, "original|match_rms_adamw"),
       "how an update follows from the shape of a matrix with A rows and B columns: times "
       "sqrt(max(1, A / B)), or 0.2 sqrt(max(A, B))",
       For("Muon")},
  };
}

std::vector<Row> Scheduler() {
  return {
      {"scheduler", kOpenBlock, "learning rate over applied steps; constant when not given"},
      {"scheduler.type",
       Choice(&SchedulerConfig::type, "WarmupLR|WarmupDecayLR|WarmupCosineLR|OneCycle|LRRangeTest",
              SchedulerType::kWarmup),
       "the schedule", IfAbsent("a constant rate")},
      {"scheduler.params", kBlock, "parameters of the schedule"},
  };
}

std::vector<Row> SchedulerParams() {
  using S = SchedulerConfig;
  constexpr std::string_view kWarmups = "WarmupLR|WarmupDecayLR|WarmupCosineLR";
  constexpr auto kCycle = For("OneCycle"), kTest = For("LRRangeTest");
  return {
      {"warmup_min_lr", &S::warmup_min_lr, "rate at the start", From(0, kLargestRate),
       For("WarmupLR|WarmupDecayLR")},
      {"warmup_max_lr", OrAuto(&S::warmup_max_lr),
       "rate after the warm-up; \"auto\": the optimizer's", From(0, kLargestRate),
       IfAbsent("the optimizer's; for WarmupDecayLR `0.001`"), For("WarmupLR|WarmupDecayLR")},
      {"warmup_num_steps", &S::warmup_num_steps, "steps of the warm-up", From(0), For(kWarmups)},
      {"warmup_type", Choice(&S::warmup_log, "linear|log"), "shape of the warm-up", For(kWarmups),
       Words("log|linear")},
      {"total_num_steps", &S::total_num_steps, "steps of the whole run", From(1),
       For("WarmupDecayLR|WarmupCosineLR"), RequiredBy("WarmupDecayLR|WarmupCosineLR")},
      {"warmup_min_ratio", &S::warmup_min_ratio, "of the rate, at the start", From(0),
       For("WarmupCosineLR")},
      {"cos_min_ratio", &S::cos_min_ratio, "of the rate, at the end", From(0),
       For("WarmupCosineLR")},
      {"cycle_min_lr", &S::cycle_min_lr, "lowest rate of the cycle", From(0, kLargestRate), kCycle,
       RequiredBy("OneCycle")},
      {"cycle_max_lr", &S::cycle_max_lr, "highest rate of the cycle", From(0, kLargestRate), kCycle,
       RequiredBy("OneCycle")},
      {"decay_lr_rate", &S::decay_lr_rate, "decay of the rate after the cycle", From(0), kCycle},
      {"cycle_first_step_size", &S::cycle_first_step_size, "steps of the rise", From(1), kCycle},
      {"cycle_second_step_size", &S::cycle_second_step_size, "steps of the fall", From(1), kCycle,
       IfAbsent("those of the rise")},
      {"cycle_first_stair_count", &S::cycle_first_stair_count, "stairs of the rise", From(0),
       kCycle},
      {"cycle_second_stair_count", &S::cycle_second_stair_count, "stairs of the fall", From(0),
       kCycle, IfAbsent("those of the rise")},
      {"decay_step_size", &S::decay_step_size, "steps between decays; 0: none", From(0), kCycle},
      {"cycle_momentum", &S::cycle_momentum, "whether momentum cycles too", kCycle},
      {"cycle_min_mom", &S::cycle_min_mom, "lowest momentum", Below(0, 1), kCycle},
      {"cycle_max_mom", &S::cycle_max_mom, "highest momentum", Below(0, 1), kCycle},
      {"decay_mom_rate", &S::decay_mom_rate, "decay of momentum after the cycle", From(0), kCycle},
      {"lr_range_test_min_lr", &S::lr_range_test_min_lr, "rate at the start", From(0, kLargestRate),
       kTest},
      {"lr_range_test_step_size", &S::lr_range_test_step_size, "steps of one rise", From(1), kTest},
      {"lr_range_test_step_rate", &S::lr_range_test_step_rate, "growth in one rise", From(0), kTest,
       Default("1.0")},
      {"lr_range_test_staircase", &S::lr_range_test_staircase, "whether the rate rises in steps",
       kTest},
      {"last_batch_iteration", kInteger,
       "schedules start with the run; applied steps are counted by the engine",
       RefusedUnless("-1")},
  };
}

}  // namespace

std::vector<Section> TrainingSections() {
  return {{"", Top()},
          {"fp16.", Fp16()},
          {"", Bf16AndOtherDTypes()},
          {"", Optimizer()},
          {"optimizer.params.", OptimizerParams()},
          {"optimizer.params.", MuonParams()},
          {"", Scheduler()},
          {"scheduler.params.", SchedulerParams()}};
}

}  // namespace ebb::config
