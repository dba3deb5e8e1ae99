// Rows about what is sharded, when it is moved, and where it lives.
#include "ebb/runtime/config/io_backend.h"
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

using enum Taken;

constexpr std::string_view kFlat = "units are flat buffers, reduced where they were written";
constexpr std::string_view kKnownOrder =
    "the order of units is declared by the model, not found by tracing modules";
constexpr std::string_view kOneUpdate = "every optimizer has one update, on the CPU and elsewhere";
constexpr std::string_view kTrainersChoice = "what is recomputed is the trainer's choice";

constexpr Key kRows[] = {
    Block("zero_optimization", kLiterally, "what is sharded over the ranks"),
    Integer("zero_optimization.stage", "0", kLiterally,
            "0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters")
        .From(0, 3),
    Flag("zero_optimization.overlap_comm", "true", kLiterally,
         "whether communication runs beside compute"),
    Integer("zero_optimization.reduce_bucket_size", "", kUpperLimit,
            "elements reduced as one group of collectives")
        .From(0),
    Integer("zero_optimization.allgather_bucket_size", "", kUpperLimit,
            "elements gathered as one group of collectives")
        .From(0),
    Integer("zero_optimization.stage3_prefetch_bucket_size", "50000000", kUpperLimit,
            "elements gathered ahead of their use, within ebb.prefetch_depth")
        .From(0),
    Integer("zero_optimization.stage3_param_persistence_threshold", "100000", kApproximated,
            "compared with the elements of a whole unit, which then stays gathered")
        .From(0),
    Integer("zero_optimization.stage3_model_persistence_threshold", "9223372036854775807",
            kUpperLimit, "elements of all units together that stay gathered")
        .From(0),
    Integer("zero_optimization.stage3_max_live_parameters", "1000000000", kUpperLimit,
            "gathered elements beyond which nothing is gathered ahead")
        .From(0),
    Integer("zero_optimization.stage3_max_reuse_distance", "1000000000", kApproximated,
            "below its default it only releases more units between their uses")
        .From(0),
    OtherName("zero_optimization.prefetch_bucket_size",
              "zero_optimization.stage3_prefetch_bucket_size"),
    OtherName("zero_optimization.param_persistence_threshold",
              "zero_optimization.stage3_param_persistence_threshold"),
    OtherName("zero_optimization.model_persistence_threshold",
              "zero_optimization.stage3_model_persistence_threshold"),
    OtherName("zero_optimization.max_live_parameters",
              "zero_optimization.stage3_max_live_parameters"),
    OtherName("zero_optimization.max_reuse_distance",
              "zero_optimization.stage3_max_reuse_distance"),

    Flag("zero_optimization.contiguous_gradients", "true", kNoMeaning, kFlat),
    Flag("zero_optimization.reduce_scatter", "true", kNoMeaning,
         "every stage reduces with the same reduce-scatter"),
    Flag("zero_optimization.use_multi_rank_bucket_allreduce", "true", kNoMeaning, kFlat),
    Flag("zero_optimization.allgather_partitions", "true", kNoMeaning, kFlat),
    Flag("zero_optimization.round_robin_gradients", "false", kNoMeaning, kFlat),
    Flag("zero_optimization.grad_hooks", "true", kNoMeaning, "gradients are given to scopes"),
    Flag("zero_optimization.load_from_fp32_weights", "true", kNoMeaning,
         "masters always start from fp32 values"),
    Flag("zero_optimization.elastic_checkpoint", "false", kNoMeaning,
         "state is kept by parameter and interval, for any number of ranks"),
    Integer("zero_optimization.sub_group_size", "1000000000", kUpperLimit,
            "elements updated as one piece, none of which crosses a unit")
        .From(1),
    Flag("zero_optimization.stage3_gather_16bit_weights_on_model_save", "false", kNoMeaning,
         "Engine::Gather gives any parameter whole at any time"),
    OtherName("zero_optimization.gather_16bit_weights_on_model_save",
              "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    OldName("zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    Integer("zero_optimization.stage3_module_granularity_threshold", "0", kNoMeaning, kKnownOrder),
    OtherName("zero_optimization.module_granularity_threshold",
              "zero_optimization.stage3_module_granularity_threshold"),
    Flag("zero_optimization.stage3_use_all_reduce_for_fetch_params", "false", kNoMeaning,
         "units are gathered with all-gather"),
    OtherName("zero_optimization.use_all_reduce_for_fetch_params",
              "zero_optimization.stage3_use_all_reduce_for_fetch_params"),
    Flag("zero_optimization.stage3_allgather_sequential", "false", kNoMeaning,
         "a unit is gathered as one flat buffer"),
    OtherName("zero_optimization.allgather_sequential",
              "zero_optimization.stage3_allgather_sequential"),
    Flag("zero_optimization.ignore_unused_parameters", "true", kNoMeaning,
         "the gradient of a parameter that was not used is zero"),
    Flag("zero_optimization.memory_efficient_linear", "true", kNoMeaning,
         "kernels belong to the trainer"),
    Flag("zero_optimization.pipeline_loading_checkpoint", "false", kNoMeaning,
         "every rank reads its own slices only"),
    Flag("zero_optimization.override_module_apply", "true", kNoMeaning, kKnownOrder),
    Block("zero_optimization.leaf_module", kNoMeaning, kKnownOrder),
    Texts("zero_optimization.leaf_module.classes", "", kNoMeaning, kKnownOrder),
    Texts("zero_optimization.leaf_module.names", "", kNoMeaning, kKnownOrder),
    Texts("zero_optimization.leaf_module.name_suffixes", "", kNoMeaning, kKnownOrder),
    Flag("zero_optimization.log_trace_cache_warnings", "false", kNoMeaning, kKnownOrder),
    Flag("zero_optimization.enable_sanity_checks", "false", kNoMeaning,
         "ranks compare a hash of what they did at every step"),
    Flag("zero_optimization.save_muon_momentum_buffer_in_memory", "false", kNoMeaning,
         "there is no Muon"),
    Integer("allgather_size", "", kNoMeaning,
            "zero_optimization.allgather_bucket_size is in its place")
        .From(0),
    Flag("disable_allgather", "false", kNoMeaning, "DeepSpeed does not read it either"),

    Flag("zero_optimization.legacy_stage1", "false", kRefused, "DeepSpeed has removed it"),
    Integer("zero_optimization.zero_hpz_partition_size", "1", kRefused,
            "not built: parameters are sharded once, over the world")
        .From(0)
        .Unless("<=1"),
    Flag("zero_optimization.zero_quantized_weights", "false", kRefused, "not built"),
    Flag("zero_optimization.zero_quantized_nontrainable_weights", "false", kRefused, "not built"),
    Flag("zero_optimization.zero_quantized_gradients", "false", kRefused, "not built"),
    OpenBlock("zero_optimization.zeropp_loco_param", kRefused, "not built"),
    Integer("zero_optimization.mics_shard_size", "-1", kLiterally,
            "ebb.shard_group by DeepSpeed's name; below 1: the world")
        .From(-1, 2147483647),
    Flag("zero_optimization.mics_hierarchical_params_gather", "false", kNoMeaning,
         "a gather is one collective of the shard group"),

    Block("zero_optimization.offload_param", kLiterally, "where parameters live; at stage 3"),
    Word("zero_optimization.offload_param.device", "none|cpu|nvme", "none", kLiterally,
         "tier of the parameters; none: the device"),
    Paths("zero_optimization.offload_param.nvme_path", "", kLiterally,
          "folder of the swap files, or several, which are striped"),
    Integer("zero_optimization.offload_param.buffer_count", "5", kUpperLimit,
            "staging buffers between the disk and the device")
        .From(1, 2147483647),
    Integer("zero_optimization.offload_param.buffer_size", "", kUpperLimit,
            "elements of a staging buffer; not given: 1e8, or what the largest unit needs")
        .From(1),
    Integer("zero_optimization.offload_param.max_in_cpu", "1000000000", kLiterally,
            "elements that stay in RAM when the others are on NVMe")
        .From(0),
    Flag("zero_optimization.offload_param.pin_memory", "true", kLiterally,
         "whether host memory is page-locked"),
    Block("zero_optimization.offload_optimizer", kLiterally,
          "where masters and optimizer states live; from stage 1"),
    Word("zero_optimization.offload_optimizer.device", "none|cpu|nvme", "none", kLiterally,
         "tier of masters and optimizer states; none: the device"),
    Paths("zero_optimization.offload_optimizer.nvme_path", "", kLiterally,
          "folder of the swap files, or several, which are striped"),
    Integer("zero_optimization.offload_optimizer.buffer_count", "4", kUpperLimit,
            "staging buffers of a piece that is read, updated and written")
        .From(1, 2147483647),
    Flag("zero_optimization.offload_optimizer.pin_memory", "true", kLiterally,
         "whether host memory is page-locked"),
    Flag("zero_optimization.offload_optimizer.pipeline_read", "false", kNoMeaning,
         "reads always run beside the update"),
    Flag("zero_optimization.offload_optimizer.pipeline_write", "false", kNoMeaning,
         "writes always run beside the update"),
    Flag("zero_optimization.offload_optimizer.fast_init", "false", kNoMeaning,
         "initial states are always streamed"),
    Number("zero_optimization.offload_optimizer.ratio", "1.0", kLiterally,
           "share of the optimizer states that is offloaded; the rest stays on the device; auto: "
           "what balances the updates of both as measured, and at least what fits")
        .From(0, 1)
        .Or("auto"),
    Flag("zero_optimization.offload_optimizer.super_offload", "false", kNoMeaning, kOneUpdate),
    Number("zero_optimization.offload_optimizer.cpuadam_cores_perc", "0.8", kNoMeaning, kOneUpdate)
        .From(0, 1),
    Flag("zero_optimization.cpu_offload", "", kLiterally,
         "old form of zero_optimization.offload_optimizer.device: cpu"),
    Flag("zero_optimization.cpu_offload_param", "", kLiterally,
         "old form of zero_optimization.offload_param.device: cpu"),
    Flag("zero_optimization.cpu_offload_use_pin_memory", "false", kNoMeaning,
         "pin_memory of each tier is in its place"),

    Block("zero_optimization.zenflow", kRefused,
          "not built: every gradient is in the step it belongs to"),
    Number("zero_optimization.zenflow.topk_ratio", "0.1", kNoMeaning, "share of columns")
        .From(0, 1),
    Word("zero_optimization.zenflow.select_strategy", "auto|step|epoch", "auto", kNoMeaning,
         "when columns are chosen"),
    Integer("zero_optimization.zenflow.select_interval", "auto", kNoMeaning, "how often")
        .Or("auto"),
    Integer("zero_optimization.zenflow.update_interval", "auto", kNoMeaning, "how often")
        .Or("auto"),
    Flag("zero_optimization.zenflow.overlap_step", "false", kNoMeaning, "update beside compute"),
    Flag("zero_optimization.zenflow.offload", "false", kNoMeaning, "states on the CPU"),
    Number("zero_optimization.zenflow.auto_ratio", "0.99", kNoMeaning, "threshold").From(0, 1),
    Integer("zero_optimization.zenflow.full_warm_up_rounds", "0", kNoMeaning, "rounds before it"),
    Number("zero_optimization.zenflow.pt_reserved_cores_perc", "0.5", kNoMeaning, "share of cores")
        .From(0, 1),
    Integer("zero_optimization.zenflow.steps_per_epoch", "", kNoMeaning, "steps of an epoch"),

    Flag("zero_allow_untested_optimizer", "false", kNoMeaning,
         "any element-wise optimizer is right at every stage"),
    Flag("zero_force_ds_cpu_optimizer", "true", kNoMeaning, kOneUpdate),

    Block("aio", kLiterally, "how swap files are read and written"),
    Integer("aio.block_size", "1048576", kLiterally, "bytes of a request, a multiple of 4096")
        .From(kDiskAlignment, 1 << 30),
    Integer("aio.queue_depth", "8", kLiterally,
            "requests in flight, for each of aio.intra_op_parallelism")
        .From(1, 4096),
    Integer("aio.intra_op_parallelism", "1", kLiterally,
            "queues of aio.queue_depth requests; without io_uring threads, at least 4 if there are "
            "as many requests")
        .From(1, 64)
        .MayRepeat(),  // DeepSpeed's own defaults have both names
    OtherName("aio.thread_count", "aio.intra_op_parallelism"),
    Flag("aio.single_submit", "false", kLiterally, "whether requests are submitted one by one"),
    Flag("aio.overlap_events", "true", kNoMeaning,
         "requests are always submitted while others complete"),
    Flag("aio.use_gds", "false", kRefused,
         "not built: what is read from disk passes through host memory"),

    Block("activation_checkpointing", kLiterally, "boundary activations"),
    Flag("activation_checkpointing.cpu_checkpointing", "false", kLiterally,
         "boundary activations are kept in RAM, unless ebb.offload_activations says where"),
    Flag("activation_checkpointing.partition_activations", "false", kNoMeaning,
         "it splits what model-parallel ranks share, and every rank is data-parallel"),
    Flag("activation_checkpointing.contiguous_memory_optimization", "false", kNoMeaning,
         "boundaries always have one slot each in one pool"),
    Integer("activation_checkpointing.number_checkpoints", "", kNoMeaning, kTrainersChoice).From(1),
    Flag("activation_checkpointing.synchronize_checkpoint_boundary", "false", kNoMeaning,
         kTrainersChoice),
    Flag("activation_checkpointing.profile", "false", kNoMeaning,
         "the timeline (ebb.trace) shows it"),
};

}  // namespace

std::span<const Key> ZeroKeys() {
  return kRows;
}

}  // namespace ebb::config
