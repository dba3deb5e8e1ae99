// Rows about sharding: the sharded classes, their movement, and their tiers.
#include "ebb/runtime/config/io_backend.h"
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

using enum Taken;

constexpr Key kZeroRows[] = {
    Block("zero_optimization", kLiterally, "sharding over the ranks"),
    Integer("zero_optimization.stage", "0", kLiterally,
            "0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters")
        .From(0, 3),
    Flag("zero_optimization.overlap_comm", "true", kLiterally,
         "whether communication runs beside compute"),
    Integer("zero_optimization.reduce_bucket_size", "", kUpperLimit,
            "elements reduced as one group of collectives")
        .From(0)
        .IfAbsent("those of `ebb.coalesce`"),
    Integer("zero_optimization.allgather_bucket_size", "", kUpperLimit,
            "elements gathered as one group of collectives")
        .From(0)
        .IfAbsent("those of `ebb.coalesce`"),
    Integer("zero_optimization.stage3_prefetch_bucket_size", "50000000", kUpperLimit,
            "elements gathered ahead of their use, within ebb.prefetch_depth")
        .From(0),
    Integer("zero_optimization.stage3_param_persistence_threshold", "100000", kApproximated,
            "compared with the elements of a whole unit; smaller units stay gathered")
        .From(0)
        .Unless("0"),
    Integer("zero_optimization.stage3_model_persistence_threshold", "9223372036854775807",
            kUpperLimit, "elements of all units together that stay gathered")
        .From(0),
    Integer("zero_optimization.stage3_max_live_parameters", "1000000000", kUpperLimit,
            "limit of gathered elements, above which no unit is gathered ahead")
        .From(0),
    Integer("zero_optimization.stage3_max_reuse_distance", "1000000000", kApproximated,
            "below its default it only releases more units between their uses")
        .From(0)
        .Unless("1000000000"),
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

    Integer("zero_optimization.sub_group_size", "1000000000", kUpperLimit,
            "elements updated as one piece, none of which crosses a unit; 0: as by default")
        .From(0),
    Flag("zero_optimization.legacy_stage1", "false", kRefused, "DeepSpeed has removed it"),
    Integer("zero_optimization.zero_hpz_partition_size", "1", kLiterally,
            "ranks that together hold a second copy of all parameters (hpZ), for all gathers of a "
            "step but a unit's first; at stage 3; 0 or 1: none")
        .From(0, 2147483647),
    Flag("zero_optimization.zero_quantized_weights", "false", kRefused,
         "not built: parameters gathered in int8 change results"),
    Flag("zero_optimization.zero_quantized_nontrainable_weights", "false", kRefused,
         "not built: parameters gathered in int8 change results"),
    Flag("zero_optimization.zero_quantized_gradients", "false", kRefused,
         "not built: gradients reduced in int4 change results"),
    Anything("zero_optimization.zeropp_loco_param", kRefused,
             "not built: it belongs to gradients reduced in int4"),
    Integer("zero_optimization.mics_shard_size", "-1", kLiterally,
            "ebb.shard_group by DeepSpeed's name; below 1: the world")
        .From(-1, 2147483647),
    Block("zero_optimization.offload_param", kLiterally, "where parameters live; at stage 3"),
    Word("zero_optimization.offload_param.device", "none|cpu|nvme", "none", kLiterally,
         "tier of the parameters; none: the device"),
    Paths("zero_optimization.offload_param.nvme_path", "", kLiterally,
          "folder of the swap files, or several, which are striped")
        .IfAbsent("required for nvme"),
    Integer("zero_optimization.offload_param.buffer_count", "5", kUpperLimit,
            "staging buffers between the disk and the device")
        .From(1, 2147483647),
    Integer("zero_optimization.offload_param.buffer_size", "", kUpperLimit,
            "elements of a staging buffer")
        .From(1)
        .IfAbsent("1e8, or what the largest unit needs"),
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
          "folder of the swap files, or several, which are striped")
        .IfAbsent("required for nvme"),
    Integer("zero_optimization.offload_optimizer.buffer_count", "4", kUpperLimit,
            "staging buffers of a piece that is read, updated and written")
        .From(1, 2147483647),
    Flag("zero_optimization.offload_optimizer.pin_memory", "true", kLiterally,
         "whether host memory is page-locked"),
    Number("zero_optimization.offload_optimizer.ratio", "1.0", kLiterally,
           "share of the optimizer states that is offloaded; the rest stays on the device; auto: "
           "measured, so that the updates of both take equally long, and the rest fits")
        .From(0, 1)
        .Or("auto"),
    Flag("zero_optimization.cpu_offload", "", kLiterally,
         "old form of zero_optimization.offload_optimizer.device: cpu")
        .IfAbsent("the new form"),
    Flag("zero_optimization.cpu_offload_param", "", kLiterally,
         "old form of zero_optimization.offload_param.device: cpu")
        .IfAbsent("the new form"),
    Anything("zero_optimization.zenflow", kRefused,
             "not built: every gradient is in the step it belongs to"),

    OpenBlock("aio", kLiterally, "how swap files are read and written"),
    Integer("aio.block_size", "1048576", kLiterally, "bytes of a request, a multiple of 4096")
        .From(kDiskAlignment, 1 << 30),
    Integer("aio.queue_depth", "32", kLiterally,
            "requests in flight, for each of aio.intra_op_parallelism")
        .From(1, 4096),
    Integer("aio.intra_op_parallelism", "1", kLiterally,
            "queues of aio.queue_depth requests; without io_uring: threads, at least 4 if there "
            "are 4 requests")
        .From(1, 64)
        .MayRepeat(),  // DeepSpeed's own defaults have both names
    OtherName("aio.thread_count", "aio.intra_op_parallelism"),
    Flag("aio.single_submit", "false", kLiterally, "whether requests are submitted one by one"),

    OpenBlock("activation_checkpointing", kLiterally, "boundary activations"),
    Flag("activation_checkpointing.cpu_checkpointing", "false", kLiterally,
         "boundary activations are kept in RAM, unless ebb.offload_activations says where"),
};

}  // namespace

std::span<const Key> ZeroKeys() {
  return kZeroRows;
}

}  // namespace ebb::config
