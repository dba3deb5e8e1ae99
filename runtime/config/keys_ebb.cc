// Rows of our own keys, under "ebb".
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

using enum Taken;

constexpr Key kEbbRows[] = {
    Block("ebb", kLiterally, "Ebb's own keys"),
    Word("ebb.reduce_at", "round|step", "", kLiterally,
         "gradients are reduced each round or once a step")
        .IfAbsent("`round` at stages 2 and 3, `step` at 0 and 1"),
    Integer("ebb.micro_batches_per_round", "1", kLiterally,
            "micro-batches that one walk through the model serves")
        .From(1, 2147483647)
        .Or("all"),
    Word("ebb.asynchronous_step", "auto|late|off", "auto", kLiterally,
         "when updates run; auto: beside backward if allowed, late: beside the next forward, off: "
         "in the step"),
    Flag("ebb.check_overflow", "true", kLiterally,
         "whether a step with inf or nan in a gradient is skipped; fp16 always checks"),
    Flag("ebb.strict", "true", kLiterally,
         "whether a step that leaves out a trainable unit's backward, or a round, is an error"),
    Integer("ebb.prefetch_depth", "1", kLiterally, "units gathered ahead of the one in use")
        .From(0)
        .Or("all"),
    Bytes("ebb.coalesce", "", kLiterally,
          "bytes grouped in one call of a collective; auto: measured if NCCL connects the ranks")
        .Or("auto")
        .IfAbsent("`1MiB`, or the buckets if they are smaller"),
    Flag("ebb.reshard_after_forward", "true", kLiterally,
         "whether a unit is released after its forward and gathered again in backward"),
    Integer("ebb.reduction_group", "", kLiterally, "ranks that sum their gradients first")
        .From(1, 2147483647)
        .IfAbsent("the ranks of a host"),
    Integer("ebb.shard_group", "0", kLiterally,
            "ranks that states are cut over (HSDP); 0: the world")
        .From(0, 2147483647),
    Number("ebb.timeout_seconds", "600", kLiterally, "longest wait for another rank").Above(0, 1e9),
    Text("ebb.trace", "", kLiterally, "file of the timeline").IfAbsent("no timeline"),
    Flag("ebb.deterministic_reduce", "false", kLiterally,
         "whether NCCL sums in the CPU's order, in every version; other backends always do"),
    Flag("ebb.register_buffers", "true", kLiterally,
         "whether NCCL moves the pools' memory without its own copies, if it can"),

    Word("ebb.unknown_keys", "error|warn", "", kLiterally,
         "whether an unknown key is an error or a warning")
        .IfAbsent(
            "an error if DeepSpeed refuses it or it looks like a misspelling, else a warning"),

    Block("ebb.parameter_groups", kLiterally, "by ParameterSpec::group"),
    Block("ebb.parameter_groups.*", kLiterally, "one group"),
    Number("ebb.parameter_groups.*.lr_factor", "1", kLiterally, "times the learning rate").From(0),
    Number("ebb.parameter_groups.*.weight_decay", "", kLiterally, "weight decay of the group")
        .From(0)
        .IfAbsent("the optimizer's"),
    OtherName("ebb.parameter_groups.*.optimizer", "optimizer"),

    Bytes("ebb.device_memory", "", kLiterally,
          "bytes that the pools of a rank on the device may take")
        .Above(0)
        .IfAbsent("no limit"),
    Bytes("ebb.host_memory", "", kLiterally,
          "bytes that the pools of a rank in the host's RAM may take")
        .Above(0)
        .IfAbsent("no limit"),
    Word("ebb.offload_gradients", "none|device|cpu|nvme", "", kLiterally,
         "tier of reduced gradients")
        .IfAbsent("the optimizer's, but `cpu` instead of `nvme`"),
    Word("ebb.offload_activations", "none|device|cpu|nvme", "", kLiterally,
         "tier of boundary activations")
        .IfAbsent("the device"),
    Flag("ebb.split_master", "false", kLiterally,
         "whether a master is its bf16 parameter and the 16 bits that the cast cuts"),
    Flag("ebb.stochastic_rounding", "false", kLiterally,
         "whether bf16 parameters are their own masters, rounded up or down at random"),
    Word("ebb.verify_swap", "off|states|all|auto", "auto", kLiterally,
         "which parts of swap files have a checksum: masters and optimizer states, or all; auto: "
         "all if steps get no longer"),
    Word("ebb.io_backend", "auto|io_uring|threads", "auto", kLiterally,
         "how data moves to and from NVMe; auto: io_uring if it is allowed"),
};

}  // namespace

std::span<const Key> EbbKeys() {
  return kEbbRows;
}

}  // namespace ebb::config
