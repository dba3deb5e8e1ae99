// Rows about sharding: the sharded classes, their movement, and their tiers.
#include "ebb/runtime/base/io_backend.h"
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

using enum Kind;

constexpr std::string_view kDevices = "none|cpu|nvme";

std::vector<Row> Zero() {
  using Z = ZeroConfig;
  return {
      {"stage", &Z::stage, "0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters",
       From(0, 3)},
      {"overlap_comm", &Z::overlap_comm, "whether communication runs beside compute"},
      {"reduce_bucket_size", &Z::reduce_bucket_size, "elements reduced as one group of collectives",
       kUpperLimit, From(0), IfAbsent("those of `ebb.coalesce`")},
      {"allgather_bucket_size", &Z::allgather_bucket_size,
       "elements gathered as one group of collectives", kUpperLimit, From(0),
       IfAbsent("those of `ebb.coalesce`")},
      {"stage3_prefetch_bucket_size", &Z::prefetch_bucket_size,
       "elements gathered ahead of their use, within ebb.prefetch_depth", kUpperLimit, From(0)},
      {"stage3_param_persistence_threshold", &Z::param_persistence_threshold,
       "compared with the elements of a whole unit; smaller units stay gathered", kApproximated,
       From(0), Unless("0")},
      {"stage3_model_persistence_threshold", &Z::model_persistence_threshold,
       "elements of all units together that stay gathered", kUpperLimit, From(0)},
      {"stage3_max_live_parameters", &Z::max_live_parameters,
       "limit of gathered elements, above which no unit is gathered ahead", kUpperLimit, From(0)},
      {"stage3_max_reuse_distance", &Z::max_reuse_distance,
       "below its default it only releases more units between their uses", kApproximated, From(0),
       Unless("1000000000")},
      OtherName("prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
      OtherName("param_persistence_threshold",
                "zero_optimization.stage3_param_persistence_threshold"),
      OtherName("model_persistence_threshold",
                "zero_optimization.stage3_model_persistence_threshold"),
      OtherName("max_live_parameters", "zero_optimization.stage3_max_live_parameters"),
      OtherName("max_reuse_distance", "zero_optimization.stage3_max_reuse_distance"),

      {"sub_group_size", &Z::sub_group_size,
       "elements updated as one piece, none of which crosses a unit; 0: as by default", kUpperLimit,
       From(0)},
      {"legacy_stage1", kFlag, "DeepSpeed has removed it", kUnlessFalse},
      {"zero_hpz_partition_size", &Z::hpz_partition_size,
       "ranks that together hold a second copy of all parameters (hpZ), for all gathers of a step "
       "but a unit's first; at stage 3; 0 or 1: none",
       From(0, kLargestInt)},
      {"zero_quantized_weights", kFlag, "not built: parameters gathered in int8 change results",
       kUnlessFalse},
      {"zero_quantized_nontrainable_weights", kFlag,
       "not built: parameters gathered in int8 change results", kUnlessFalse},
      {"zero_quantized_gradients", kFlag, "not built: gradients reduced in int4 change results",
       kUnlessFalse},
      {"zeropp_loco_param", kAnything, "not built: it belongs to gradients reduced in int4",
       RefusedUnless("")},
      {"mics_shard_size", &Z::mics_shard_size,
       "ebb.shard_group by DeepSpeed's name; below 1: the world", From(-1, kLargestInt)},
  };
}

std::vector<Row> Offload() {
  using P = OffloadParamConfig;
  using O = OffloadOptimizerConfig;
  constexpr auto kPath = IfAbsent("required for nvme"), kNewForm = IfAbsent("the new form");
  return {
      {"offload_param", kBlock, "where parameters live; at stage 3"},
      {"offload_param.device", Choice(&P::device, kDevices),
       "tier of the parameters; none: the device"},
      {"offload_param.nvme_path", &P::nvme_paths,
       "folder of the swap files, or several, which are striped", kPath},
      {"offload_param.buffer_count", &P::buffer_count,
       "staging buffers between the disk and the device", kUpperLimit, From(1, kLargestInt)},
      {"offload_param.buffer_size", &P::buffer_size, "elements of a staging buffer", kUpperLimit,
       From(1), IfAbsent("1e8, or what the largest unit needs")},
      {"offload_param.max_in_cpu", &P::max_in_cpu,
       "elements that stay in RAM when the others are on NVMe", From(0)},
      {"offload_param.pin_memory", &P::pin_memory, "whether host memory is page-locked"},
      {"offload_optimizer", kBlock, "where masters and optimizer states live; from stage 1"},
      {"offload_optimizer.device", Choice(&O::device, kDevices),
       "tier of masters and optimizer states; none: the device"},
      {"offload_optimizer.nvme_path", &O::nvme_paths,
       "folder of the swap files, or several, which are striped", kPath},
      {"offload_optimizer.buffer_count", &O::buffer_count,
       "staging buffers of a piece that is read, updated and written", kUpperLimit,
       From(1, kLargestInt)},
      {"offload_optimizer.pin_memory", &O::pin_memory, "whether host memory is page-locked"},
      {"offload_optimizer.ratio", OrAuto(&O::ratio, &O::measures_ratio),
       "share of the optimizer states that is offloaded; the rest stays on the device; auto: "
       "measured, so that the updates of both take equally long, and the rest fits",
       From(0, 1), Default("1.0")},
      {"cpu_offload", kFlag, "old form of zero_optimization.offload_optimizer.device: cpu",
       kNewForm},
      {"cpu_offload_param", kFlag, "old form of zero_optimization.offload_param.device: cpu",
       kNewForm},
      {"zenflow", kAnything, "not built: every gradient is in the step it belongs to",
       RefusedUnless("")},
  };
}

std::vector<Row> Aio() {
  using A = AioConfig;
  return {
      {"aio", kOpenBlock, "how swap files are read and written"},
      {"aio.block_size", &A::block_size, "bytes of a request, a multiple of 4096",
       From(kDiskAlignment, 1 << 30)},
      {"aio.queue_depth", &A::queue_depth,
       "requests in flight, for each of aio.intra_op_parallelism", From(1, 4096)},
      {"aio.intra_op_parallelism", &A::intra_op_parallelism,
       "queues of aio.queue_depth requests; without io_uring: threads, at least 4 if there are 4 "
       "requests",
       From(1, 64), kMayRepeat},  // DeepSpeed's own defaults have both names
      OtherName("aio.thread_count", "aio.intra_op_parallelism"),
      {"aio.single_submit", &A::single_submit, "whether requests are submitted one by one"},

      {"activation_checkpointing", kOpenBlock, "boundary activations"},
      {"activation_checkpointing.cpu_checkpointing",
       &ActivationCheckpointingConfig::cpu_checkpointing,
       "boundary activations are kept in RAM, unless ebb.offload_activations says where"},
  };
}

}  // namespace

std::vector<Section> ZeroSections() {
  return {{"", {{"zero_optimization", kBlock, "sharding over the ranks"}}},
          {"zero_optimization.", Zero()},
          {"zero_optimization.", Offload()},
          {"", Aio()}};
}

}  // namespace ebb::config
