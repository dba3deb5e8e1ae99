// Rows about what DeepSpeed does beside the state of training: logs, profiles, checkpoints,
// launching, other kinds of parallelism, compression, data.
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

using enum Taken;

constexpr std::string_view kTimeline = "the timeline (ebb.trace) shows it";
constexpr std::string_view kLedger = "every run prints its memory table";
constexpr std::string_view kReport = "a program logs what Engine::Report gives it";
constexpr std::string_view kTrainersData = "the data are the trainer's";
constexpr std::string_view kCheckpoints = "checkpoints are not written by the engine";
constexpr std::string_view kOneKind = "not built: every rank is data-parallel";
constexpr std::string_view kNoCompiler =
    "there is no graph to compile: the plan of a step is fixed";

constexpr Key kRows[] = {
    Number("steps_per_print", "", kNoMeaning, kReport).From(0),
    Flag("wall_clock_breakdown", "false", kNoMeaning, kTimeline),
    Flag("memory_breakdown", "false", kNoMeaning, kLedger),
    Flag("dump_state", "false", kNoMeaning, "Config::ToJson gives all of it"),
    Text("log_level", "", kNoMeaning, "logging is the program's"),
    Flag("dataloader_drop_last", "false", kNoMeaning, kTrainersData),
    Flag("graph_harvesting", "false", kNoMeaning, kNoCompiler),
    Integer("vocabulary_size", "", kNoMeaning, "the model is the trainer's").From(0),
    Flag("use_data_before_expert_parallelism", "false", kNoMeaning, "every rank is data-parallel"),

    Block("timers", kNoMeaning, kTimeline),
    Block("timers.throughput", kNoMeaning, kTimeline),
    Flag("timers.throughput.enabled", "true", kNoMeaning, kTimeline),
    Flag("timers.throughput.synchronized", "true", kNoMeaning, kTimeline),

    Block("flops_profiler", kNoMeaning, kTimeline),
    Flag("flops_profiler.enabled", "false", kNoMeaning, "whether it runs"),
    Integer("flops_profiler.profile_step", "1", kNoMeaning, "the step it looks at"),
    Integer("flops_profiler.module_depth", "-1", kNoMeaning, "how deep it looks"),
    Integer("flops_profiler.top_modules", "1", kNoMeaning, "how many it prints"),
    Flag("flops_profiler.detailed", "true", kNoMeaning, "how much it prints"),
    Text("flops_profiler.output_file", "", kNoMeaning, "where it prints"),
    Number("flops_profiler.recompute_fwd_factor", "0.0", kNoMeaning, "share of recomputed forward"),

    Block("comms_logger", kNoMeaning, kTimeline),
    Flag("comms_logger.enabled", "false", kNoMeaning, "whether it runs"),
    Flag("comms_logger.verbose", "false", kNoMeaning, "how much it prints"),
    Flag("comms_logger.prof_all", "true", kNoMeaning, "whether it looks at all operations"),
    Flag("comms_logger.debug", "false", kNoMeaning, "whether it names callers"),
    Texts("comms_logger.prof_ops", "", kNoMeaning, "the operations it looks at"),

    Block("tensorboard", kNoMeaning, kReport),
    Flag("tensorboard.enabled", "false", kNoMeaning, "whether it is written"),
    Text("tensorboard.output_path", "", kNoMeaning, "where"),
    Text("tensorboard.job_name", "DeepSpeedJobName", kNoMeaning, "under what name"),
    Block("csv_monitor", kNoMeaning, kReport),
    Flag("csv_monitor.enabled", "false", kNoMeaning, "whether it is written"),
    Text("csv_monitor.output_path", "", kNoMeaning, "where"),
    Text("csv_monitor.job_name", "DeepSpeedJobName", kNoMeaning, "under what name"),
    Block("wandb", kNoMeaning, kReport),
    Flag("wandb.enabled", "false", kNoMeaning, "whether it is written"),
    Text("wandb.group", "", kNoMeaning, "group of runs"),
    Text("wandb.team", "", kNoMeaning, "team"),
    Text("wandb.project", "deepspeed", kNoMeaning, "project"),
    OpenBlock("comet", kNoMeaning, kReport),
    Flag("comet.enabled", "false", kNoMeaning, "whether it is written"),
    Integer("comet.samples_log_interval", "100", kNoMeaning, "how often"),

    Block("checkpoint", kNoMeaning, kCheckpoints),
    Word("checkpoint.tag_validation", "Ignore|Warn|Fail", "Warn", kNoMeaning, "tags over ranks"),
    Flag("checkpoint.load_universal", "false", kNoMeaning, "a converted checkpoint"),
    Flag("checkpoint.use_node_local_storage", "false", kNoMeaning, "each node its own"),
    Flag("checkpoint.checkpoint_serialization", "true", kNoMeaning, "how it is written"),
    Block("checkpoint.parallel_write", kNoMeaning, kCheckpoints),
    Flag("checkpoint.parallel_write.pipeline_stage", "false", kNoMeaning, "by stages"),
    Block("checkpoint.writer", kNoMeaning, kCheckpoints),
    Word("checkpoint.writer.type", "FAST|MOCK|PYTHON", "FAST", kNoMeaning, "which one"),
    Bytes("checkpoint.writer.io_buffer_size", "67108864", kNoMeaning, "bytes of its buffer"),
    Flag("checkpoint.writer.io_buffer_double", "true", kNoMeaning, "two buffers"),
    Integer("checkpoint.writer.io_multiplier", "1", kNoMeaning, "writers a rank"),
    Flag("checkpoint.writer.show_statistics", "false", kNoMeaning, "prints its speed"),
    Word("checkpoint.writer.data_parallel", "REPLICA|SOCKET|MACHINE", "", kNoMeaning, "who writes"),
    Flag("checkpoint.writer.decoupled", "false", kNoMeaning, "beside training"),
    OpenBlock("nebula", kNoMeaning, kCheckpoints),
    OpenBlock("datastates", kNoMeaning, kCheckpoints),

    Block("elasticity", kNoMeaning, "it is off, and the batch is what \"train_batch_size\" says"),
    Flag("elasticity.enabled", "false", kRefused,
         "not built: set the batch sizes and the number of ranks"),
    Integer("elasticity.max_train_batch_size", "2000", kNoMeaning, "largest batch").From(1),
    Anything("elasticity.micro_batch_sizes", kNoMeaning, "micro-batches it may choose from"),
    Integer("elasticity.min_gpus", "1", kNoMeaning, "fewest ranks"),
    Integer("elasticity.max_gpus", "10000", kNoMeaning, "most ranks"),
    Integer("elasticity.min_time", "0", kNoMeaning, "minutes between changes"),
    Flag("elasticity.prefer_larger_batch", "true", kNoMeaning, "its preference"),
    Integer("elasticity.model_parallel_size", "1", kNoMeaning, "ranks of one model"),
    Integer("elasticity.num_gpus_per_node", "1", kNoMeaning, "ranks of one host"),
    Number("elasticity.version", "0.2", kNoMeaning, "its version"),
    Flag("elasticity.ignore_non_elastic_batch_info", "false", kNoMeaning, "which sizes hold"),
    OpenBlock("autotuning", kNoMeaning, "it belongs to DeepSpeed's launcher"),

    Block("compile", kNoMeaning, kNoCompiler),
    Flag("compile.deepcompile", "false", kNoMeaning, "whether it runs"),
    Flag("compile.free_activation", "false", kNoMeaning, "frees activations early"),
    Bytes("compile.free_activation_threshold", "10485760", kNoMeaning, "from this size"),
    Flag("compile.offload_activation", "false", kRefused,
         "there is no graph to compile; set \"ebb.offload_activations\""),
    Flag("compile.offload_activation_pin_memory", "true", kNoMeaning, "pinned"),
    Flag("compile.offload_opt_states", "false", kRefused,
         "there is no graph to compile; set \"zero_optimization.offload_optimizer\""),
    Flag("compile.offload_parameters", "false", kRefused,
         "there is no graph to compile; set \"zero_optimization.offload_param\""),
    Flag("compile.double_buffer", "true", kNoMeaning, "two buffers"),
    Flag("compile.symmetric_memory", "false", kNoMeaning, "kind of buffer"),
    Flag("compile.debug_log", "false", kNoMeaning, "prints graphs"),
    Flag("compile.sync_before_reduce", "false", kNoMeaning, "waits"),
    Flag("compile.sync_after_reduce", "false", kNoMeaning, "waits"),
    Flag("compile.sync_before_allgather", "false", kNoMeaning, "waits"),
    Flag("compile.sync_after_allgather", "false", kNoMeaning, "waits"),
    Flag("compile.keep_int_input_tensors", "true", kNoMeaning, "keeps inputs"),
    Flag("compile.keep_all_input_tensors", "false", kNoMeaning, "keeps inputs"),
    Texts("compile.passes", "", kNoMeaning, "its passes"),

    Block("pipeline", kNoMeaning, "there are no pipeline stages"),
    Anything("pipeline.stages", kNoMeaning, "how many"),
    Text("pipeline.partition", "best", kNoMeaning, "how layers are spread"),
    Flag("pipeline.seed_layers", "false", kNoMeaning, "a seed for each layer"),
    Integer("pipeline.activation_checkpoint_interval", "0", kNoMeaning, "layers between two"),
    Flag("pipeline.pipe_partitioned", "true", kNoMeaning, "splits activations"),
    Flag("pipeline.grad_partitioned", "true", kNoMeaning, "splits gradients"),

    OpenBlock("tensor_parallel", kNoMeaning, "every rank is data-parallel"),
    Integer("tensor_parallel.autotp_size", "0", kRefused, kOneKind).From(0).Unless("<=1"),
    Integer("tensor_parallel.tp_size", "1", kRefused, kOneKind).From(0).Unless("<=1"),
    OpenBlock("expert_parallel", kNoMeaning, "every rank is data-parallel"),
    Flag("expert_parallel.enabled", "false", kRefused, kOneKind),
    OpenBlock("hybrid_engine", kNoMeaning, "it is off"),
    Flag("hybrid_engine.enabled", "false", kRefused, "not built: evaluate with an Evaluation"),

    OpenBlock("compression_training", kRefused, "not built: parameters are trained as they are"),
    OpenBlock("weight_quantization", kRefused, "not built: parameters are trained as they are"),
    OpenBlock("sparse_attention", kRefused, "attention is a kernel, and kernels are the trainer's"),
    OpenBlock("eigenvalue", kNoMeaning, "it is off"),
    Flag("eigenvalue.enabled", "false", kRefused, "not built"),
    OpenBlock("progressive_layer_drop", kNoMeaning, "it is off"),
    Flag("progressive_layer_drop.enabled", "false", kRefused, "which layers run is the trainer's"),
    OpenBlock("curriculum_learning", kNoMeaning, kTrainersData),
    Flag("curriculum_learning.enabled", "false", kRefused, kTrainersData),
    OpenBlock("data_efficiency", kNoMeaning, kTrainersData),
    Flag("data_efficiency.enabled", "false", kRefused, kTrainersData),
};

}  // namespace

std::span<const Key> SurroundingsKeys() {
  return kRows;
}

}  // namespace ebb::config
