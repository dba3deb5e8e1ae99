// Rows about training itself: batch, precision, gradients, optimizer and scheduler.
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

using enum Taken;

constexpr double kLargestCount = 2147483647;  // micro-batches are counted in an int
constexpr double kLargestScalePower = 127;    // 2^127 is the largest power of two in fp32
constexpr double kLargestRate = 1e30;         // products with factors are fp32 numbers, too

constexpr Key kTrainingRows[] = {
    Integer("train_batch_size", "", kLiterally, "samples of one optimizer step over all ranks")
        .From(1)
        .IfAbsent("from the next two"),
    Integer("train_micro_batch_size_per_gpu", "", kLiterally,
            "samples of one micro-batch of a rank")
        .From(1, kLargestCount)
        .IfAbsent("from `train_batch_size`"),
    Integer("gradient_accumulation_steps", "", kLiterally, "micro-batches of one step of a rank")
        .From(1, kLargestCount)
        .IfAbsent("1, or from the other two"),
    Flag("managed_gradient_accumulation", "true", kRefused,
         "a step lies between BeginStep and Finish; StepOptions::micro_batches sets how many "
         "micro-batches it has"),

    Number("gradient_clipping", "1.0", kLiterally,
           "largest global L2 norm of the gradients; 0: off")
        .From(0),
    Word("gradient_allreduce_op", "mean|sum", "mean", kRefused,
         "gradients are divided by the world; StepOptions::gradient_divisor sets another divisor")
        .Unless("mean"),
    Flag("sparse_gradients", "false", kRefused, "not built: gradients are dense"),
    Type("communication_data_type", "", kLiterally, "dtype in which gradients are reduced")
        .IfAbsent("the compute dtype"),

    OpenBlock("data_types", kLiterally, "dtypes apart from the compute dtype"),
    Type("data_types.grad_accum_dtype", "fp32", kLiterally,
         "dtype in which reduced gradients are accumulated"),
    Type("data_types.param_dtype", "", kLiterally, "the compute dtype again; both must agree")
        .IfAbsent("the compute dtype"),

    Block("fp16", kLiterally, "compute in fp16, with loss scaling"),
    Flag("fp16.enabled", "false", kLiterally, "whether parameters are computed with in fp16"),
    Number("fp16.loss_scale", "0", kLiterally, "static loss scale; 0: dynamic").From(0, 0x1p127),
    Integer("fp16.initial_scale_power", "16", kLiterally, "the dynamic scale starts at 2 to this")
        .From(0, kLargestScalePower),
    Integer("fp16.loss_scale_window", "1000", kLiterally, "clean steps after which it doubles")
        .From(1),
    Integer("fp16.hysteresis", "2", kLiterally, "overflows until the scale is halved").From(1),
    Flag("fp16.consecutive_hysteresis", "false", kLiterally,
         "whether a clean step gives the overflows of fp16.hysteresis back"),
    Number("fp16.min_loss_scale", "1", kLiterally, "the dynamic scale never falls below; 0: 1")
        .From(0, 0x1p127),
    Flag("fp16.fp16_master_weights_and_grads", "false", kRefused, "not built: masters are fp32"),

    Block("bf16", kLiterally, "compute in bf16"),
    OldName("bfloat16", "bf16"),
    Flag("bf16.enabled", "false", kLiterally, "whether parameters are computed with in bf16"),
    Flag("bf16.check_grad_overflow", "true", kLiterally,
         "whether a step with inf or nan in a gradient is skipped"),
    Flag("bf16.bf16_master_weights_and_grads", "false", kRefused, "not built: masters are fp32"),
    Flag("bf16.bf16_optimizer_states", "false", kRefused, "not built: optimizer states are fp32"),

    OpenBlock("optimizer", kLiterally, "the update rule; AdamW with its defaults when not given"),
    Word("optimizer.type",
         "Adam|AdamW|SGD|Adagrad|Lion|Lamb|Lars|Muon|OneBitAdam|ZeroOneAdam|OneBitLamb|MuAdam|"
         "MuAdamW|"
         "MuSGD|Adadelta|Adafactor|Adamax|ASGD|LBFGS|NAdam|RAdam|RMSprop|Rprop|SparseAdam",
         "AdamW", kRefused,
         "not built, but you can write your own (EngineOptions::optimizer, an OptimizerSpec)")
        .Unless("Adam|AdamW|SGD|Lion|Adagrad|RMSprop|Lamb|Lars"),
    Block("optimizer.params", kLiterally, "parameters of the optimizer"),
    Number("optimizer.params.lr", "0.001", kLiterally,
           "learning rate; 0.01 when not given to Adagrad or RMSprop")
        .From(0, kLargestRate),
    NumberPair("optimizer.params.betas", "[0.9, 0.999]", kLiterally,
               "decay of the two moments; Lion: of the added and of the kept momentum")
        .Within(0, 1)
        .Of("Adam|AdamW|Lion|Lamb"),
    Number("optimizer.params.eps", "1e-8", kLiterally,
           "added to the denominator; 1e-10 when not given to Adagrad")
        .From(0)
        .Of("Adam|AdamW|Adagrad|RMSprop|Lamb|Lars"),
    Number("optimizer.params.weight_decay", "0", kLiterally, "weight decay").From(0),
    Flag("optimizer.params.bias_correction", "true", kLiterally, "whether moments are corrected")
        .Of("Adam|AdamW|Lamb"),
    Number("optimizer.params.max_coeff", "10.0", kLiterally,
           "largest factor of a parameter's update; the factor is its norm over the update's")
        .From(0, kLargestRate)
        .Of("Lamb"),
    Number("optimizer.params.min_coeff", "0.01", kLiterally, "smallest such factor")
        .From(0, kLargestRate)
        .Of("Lamb"),
    Flag("optimizer.params.eps_inside_sqrt", "false", kLiterally,
         "whether eps is added to the variance instead of its root")
        .Of("Lamb"),
    Number("optimizer.params.trust_coefficient", "0.001", kLiterally,
           "a parameter's update is scaled by this times its norm over that of its gradient")
        .From(0, kLargestRate)
        .Of("Lars"),
    Flag("optimizer.params.adam_w_mode", "true", kLiterally, "whether weight decay is decoupled")
        .Of("Adam|AdamW"),
    Flag("optimizer.params.amsgrad", "false", kRefused, "not built").Of("Adam|AdamW|Lamb"),
    Flag("optimizer.params.maximize", "false", kRefused, "not built: turn the loss's sign"),
    Number("optimizer.params.momentum", "0", kLiterally, "momentum")
        .From(0, 1)
        .Of("SGD|RMSprop|Lars"),
    Number("optimizer.params.dampening", "0", kLiterally, "dampening of the momentum")
        .From(0, 1)
        .Of("SGD|Lars"),
    Flag("optimizer.params.nesterov", "false", kLiterally, "Nesterov's momentum").Of("SGD|Lars"),
    Number("optimizer.params.lr_decay", "0", kLiterally,
           "the rate of step n is lr / (1 + (n - 1) * lr_decay)")
        .From(0)
        .Of("Adagrad"),
    Number("optimizer.params.initial_accumulator_value", "0", kLiterally,
           "initial value of the sum of squares")
        .From(0, kLargestRate)
        .Of("Adagrad"),
    Number("optimizer.params.alpha", "0.99", kLiterally, "decay of the average of squares")
        .Within(0, 1)
        .Of("RMSprop"),
    Flag("optimizer.params.centered", "false", kLiterally,
         "whether the square of the average gradient is taken from the average of squares")
        .Of("RMSprop"),
    Anything("optimizer.params.max_grad_norm", kRefused,
             "clipping is not the optimizer's: set \"gradient_clipping\""),

    OpenBlock("scheduler", kLiterally, "learning rate over applied steps; constant when not given"),
    Word("scheduler.type", "WarmupLR|WarmupDecayLR|WarmupCosineLR|OneCycle|LRRangeTest", "",
         kLiterally, "the schedule")
        .IfAbsent("a constant rate"),
    Block("scheduler.params", kLiterally, "parameters of the schedule"),
    Number("scheduler.params.warmup_min_lr", "0", kLiterally, "rate at the start")
        .From(0, kLargestRate)
        .Of("WarmupLR|WarmupDecayLR"),
    Number("scheduler.params.warmup_max_lr", "", kLiterally,
           "rate after the warm-up; \"auto\": the optimizer's")
        .From(0, kLargestRate)
        .Or("auto")
        .IfAbsent("the optimizer's; for WarmupDecayLR `0.001`")
        .Of("WarmupLR|WarmupDecayLR"),
    Integer("scheduler.params.warmup_num_steps", "1000", kLiterally, "steps of the warm-up")
        .From(0)
        .Of("WarmupLR|WarmupDecayLR|WarmupCosineLR"),
    Word("scheduler.params.warmup_type", "log|linear", "log", kLiterally, "shape of the warm-up")
        .Of("WarmupLR|WarmupDecayLR|WarmupCosineLR"),
    Integer("scheduler.params.total_num_steps", "", kLiterally, "steps of the whole run")
        .From(1)
        .Of("WarmupDecayLR|WarmupCosineLR")
        .RequiredBy("WarmupDecayLR|WarmupCosineLR"),
    Number("scheduler.params.warmup_min_ratio", "0", kLiterally, "of the rate, at the start")
        .From(0)
        .Of("WarmupCosineLR"),
    Number("scheduler.params.cos_min_ratio", "0.0001", kLiterally, "of the rate, at the end")
        .From(0)
        .Of("WarmupCosineLR"),
    Number("scheduler.params.cycle_min_lr", "", kLiterally, "lowest rate of the cycle")
        .From(0, kLargestRate)
        .Of("OneCycle")
        .RequiredBy("OneCycle"),
    Number("scheduler.params.cycle_max_lr", "", kLiterally, "highest rate of the cycle")
        .From(0, kLargestRate)
        .Of("OneCycle")
        .RequiredBy("OneCycle"),
    Number("scheduler.params.decay_lr_rate", "0", kLiterally, "decay of the rate after the cycle")
        .From(0)
        .Of("OneCycle"),
    Integer("scheduler.params.cycle_first_step_size", "2000", kLiterally, "steps of the rise")
        .From(1)
        .Of("OneCycle"),
    Integer("scheduler.params.cycle_second_step_size", "", kLiterally, "steps of the fall")
        .From(1)
        .IfAbsent("those of the rise")
        .Of("OneCycle"),
    Integer("scheduler.params.cycle_first_stair_count", "0", kLiterally, "stairs of the rise")
        .From(0)
        .Of("OneCycle"),
    Integer("scheduler.params.cycle_second_stair_count", "", kLiterally, "stairs of the fall")
        .From(0)
        .IfAbsent("those of the rise")
        .Of("OneCycle"),
    Integer("scheduler.params.decay_step_size", "0", kLiterally, "steps between decays; 0: none")
        .From(0)
        .Of("OneCycle"),
    Flag("scheduler.params.cycle_momentum", "true", kLiterally, "whether momentum cycles too")
        .Of("OneCycle"),
    Number("scheduler.params.cycle_min_mom", "0.8", kLiterally, "lowest momentum")
        .Within(0, 1)
        .Of("OneCycle"),
    Number("scheduler.params.cycle_max_mom", "0.9", kLiterally, "highest momentum")
        .Within(0, 1)
        .Of("OneCycle"),
    Number("scheduler.params.decay_mom_rate", "0", kLiterally, "decay of momentum after the cycle")
        .From(0)
        .Of("OneCycle"),
    Number("scheduler.params.lr_range_test_min_lr", "0.001", kLiterally, "rate at the start")
        .From(0, kLargestRate)
        .Of("LRRangeTest"),
    Integer("scheduler.params.lr_range_test_step_size", "2000", kLiterally, "steps of one rise")
        .From(1)
        .Of("LRRangeTest"),
    Number("scheduler.params.lr_range_test_step_rate", "1.0", kLiterally, "growth in one rise")
        .From(0)
        .Of("LRRangeTest"),
    Flag("scheduler.params.lr_range_test_staircase", "false", kLiterally,
         "whether the rate rises in steps")
        .Of("LRRangeTest"),
    Integer("scheduler.params.last_batch_iteration", "-1", kRefused,
            "schedules start with the run; applied steps are counted by the engine")
        .Unless("-1"),
};

}  // namespace

std::span<const Key> TrainingKeys() {
  return kTrainingRows;
}

}  // namespace ebb::config
