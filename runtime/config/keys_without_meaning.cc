// DeepSpeed's keys that change nothing here.
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

constexpr std::string_view kTimeline = "the timeline (ebb.trace) shows it";
constexpr std::string_view kReport = "a program logs what Engine::Report gives it";
constexpr std::string_view kTrainersChoice = "the trainer chooses what is recomputed";
constexpr std::string_view kCheckpoints = "a trainer calls SaveCheckpoint";
constexpr std::string_view kCutElsewhere =
    "the trainer, torch or a model's own plan cuts the layers";
constexpr std::string_view kNoCompiler =
    "there is no graph to compile: the plan of a step is fixed";
constexpr std::string_view kOnePass = "the update is one fused pass";
constexpr std::string_view kOneUpdate = "every optimizer has one update, on the CPU and elsewhere";
constexpr std::string_view kWideSums =
    "sums are taken in fp32 and divided before they are rounded, which needs no prescaling";
constexpr std::string_view kFlat = "units are flat buffers, reduced where they were written";
constexpr std::string_view kFlatGather = "a unit is gathered as one flat buffer, by one all-gather";
constexpr std::string_view kKnownOrder =
    "the order of units is declared by the model, not found by tracing modules";
constexpr std::string_view kAlwaysBeside = "reads and writes always run beside the update";

constexpr std::string_view kZero = "zero_optimization.";
constexpr std::string_view kOffloadOptimizerPrefix = "zero_optimization.offload_optimizer.";
constexpr std::string_view kParameters = "optimizer.params.";

constexpr WithoutMeaning kList[] = {
    {"", "steps_per_print", kReport},
    {"", "tensorboard|csv_monitor", kReport, "enabled|output_path|job_name"},
    {"", "wandb", kReport, "enabled|group|team|project"},
    {"", "comet", kReport,
     "enabled|samples_log_interval|project|workspace|api_key|experiment_name|experiment_key|online|"
     "mode"},
    {"", "wall_clock_breakdown|timers|flops_profiler", kTimeline},
    {"", "comms_logger", kTimeline, "enabled|prof_all|prof_ops|verbose|debug"},
    {"", "memory_breakdown", "Engine::memory has its table"},
    {"", "dump_state", "Config::ToJson gives all of it"},
    {"", "log_level", "logging is the program's"},
    {"", "dataloader_drop_last", kTrainersData},
    {"", "vocabulary_size", "the model is the trainer's"},
    {"", "checkpoint|nebula|datastates", kCheckpoints},
    {"", "autotuning", "it belongs to DeepSpeed's launcher"},
    {"", "pipeline", "there are no pipeline stages"},
    {"", "use_data_before_expert_parallelism|data_parallel_size",
     "data ranks are the ranks divided by ebb.mesh.tensor, and there are no expert ranks"},
    {"", "seq_parallel_communication_data_type", "there is no sequence parallelism"},
    {"tensor_parallel.",
     "dtype|tp_overlap_comm|tp|tensor_parallel|injection_policy_tuple|partition_config|preset_"
     "model|keep_module_on_host|replace_with_kernel_inject|kernel_inject|tp_grain_size|mpu|tp_"
     "group",
     kCutElsewhere},
    {"", "graph_harvesting", kNoCompiler},
    {"compile.", "enabled|disable|backend|kwargs", kNoCompiler},  // in files for earlier releases
    {"compile.",
     "deepcompile|free_activation|free_activation_threshold|offload_activation_pin_memory|double_"
     "buffer|symmetric_memory|debug_log|sync_before_reduce|sync_after_reduce|sync_before_allgather|"
     "sync_after_allgather|keep_int_input_tensors|keep_all_input_tensors|passes",
     kNoCompiler},

    {"", "prescale_gradients|gradient_predivide_factor", kWideSums},
    {"", "disable_allgather", "DeepSpeed does not read it either"},
    {"", "allgather_size", "zero_optimization.allgather_bucket_size replaces it"},
    {"", "zero_allow_untested_optimizer", "any element-wise optimizer is right at every stage"},
    {"", "zero_force_ds_cpu_optimizer", kOneUpdate},
    {"data_types.", "buffer_dtype", "buffers belong to the trainer"},
    {"fp16.", "auto_cast", "inputs are the trainer's"},
    {"fp16.", "opt_level", "it belongs to Apex"},
    // Releases of DeepSpeed before June 2025 read no more than "enabled" and
    // "immediate_grad_update", so files have a copy of "fp16" here.
    {"bf16.", "auto_cast", "inputs are the trainer's"},
    {"bf16.", "loss_scale|initial_scale_power|loss_scale_window|hysteresis|min_loss_scale",
     "losses are not scaled in bf16"},
    {"bf16.", "immediate_grad_update", "gradients are accumulated as soon as they are reduced"},
    {"optimizer.", "legacy_fusion", kOnePass},
    {kParameters, "torch_adam|fused|foreach|capturable|differentiable|fp32_optimizer_states",
     kOnePass},
    {kParameters, "set_grad_none", "gradients are the engine's"},
    {kParameters, "ns_method", "one form of the iteration is built, which gives the same matrices"},

    {kZero,
     "contiguous_gradients|use_multi_rank_bucket_allreduce|allgather_partitions|round_robin_"
     "gradients",
     kFlat},
    {kZero, "reduce_scatter", "every stage reduces with the same reduce-scatter"},
    {kZero, "grad_hooks", "gradients are given to scopes"},
    {kZero, "load_from_fp32_weights", "masters always start from fp32 values"},
    {kZero, "elastic_checkpoint|pipeline_loading_checkpoint",
     "state is kept by parameter and interval, for any number of ranks"},
    {kZero,
     "stage3_gather_16bit_weights_on_model_save|gather_16bit_weights_on_model_save|stage3_gather_"
     "fp16_weights_on_model_save",
     "Engine::Gather gives any parameter whole at any time"},
    {kZero,
     "stage3_module_granularity_threshold|module_granularity_threshold|override_module_apply|log_"
     "trace_cache_warnings",
     kKnownOrder},
    {kZero, "leaf_module", kKnownOrder, "classes|names|name_suffixes"},
    {kZero,
     "stage3_use_all_reduce_for_fetch_params|use_all_reduce_for_fetch_params|stage3_allgather_"
     "sequential|allgather_sequential|mics_hierarchical_params_gather",
     kFlatGather},
    {kZero, "ignore_unused_parameters", "the gradient of a parameter that was not used is zero"},
    {kZero, "memory_efficient_linear", "kernels belong to the trainer"},
    {kZero, "enable_sanity_checks", "ranks compare a hash of their scopes at every step"},
    {kZero, "save_muon_momentum_buffer_in_memory", "Muon's momentum is where all states are"},
    {kZero, "cpu_offload_use_pin_memory", "pin_memory of each tier replaces it"},
    {kOffloadOptimizerPrefix, "pipeline_read|pipeline_write|pipeline", kAlwaysBeside},
    {kOffloadOptimizerPrefix, "fast_init", "initial states are always streamed"},
    {kOffloadOptimizerPrefix, "super_offload|cpuadam_cores_perc", kOneUpdate},

    {"aio.", "overlap_events", "requests are always submitted while others complete"},
    {"aio.", "use_gds", "reads from the disk go through host memory"},
    {"activation_checkpointing.", "partition_activations",
     "the trainer decides what its tensor ranks keep"},
    {"activation_checkpointing.", "contiguous_memory_optimization",
     "boundaries always have one slot each in one pool"},
    {"activation_checkpointing.", "number_checkpoints|synchronize_checkpoint_boundary",
     kTrainersChoice},
    {"activation_checkpointing.", "profile", kTimeline},
};

}  // namespace

std::span<const WithoutMeaning> KeysWithoutMeaning() {
  return kList;
}

}  // namespace ebb::config
