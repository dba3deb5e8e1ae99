// Rows of our own keys, under "ebb".
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

using enum Kind;
using E = EbbConfig;

std::vector<Row> Steps() {
  return {
      {"reduce_at", Choice(&E::reduce_at, "round|step", ReduceAt::kRound),
       "gradients are reduced each round or once a step",
       IfAbsent("`round` at stages 2 and 3, `step` at 0 and 1")},
      {"micro_batches_per_round", OrAll(&E::micro_batches_per_round, 0),
       "micro-batches that one walk through the model serves", From(1, kLargestInt)},
      {"asynchronous_step", Choice(&E::asynchronous_step, "auto|late|off"),
       "when updates run; auto: beside backward if allowed, late: beside the next forward, off: in "
       "the step"},
      {"check_overflow", &E::check_overflow,
       "whether a step with inf or nan in a gradient is skipped; fp16 always checks"},
      {"strict", &E::strict,
       "whether a step that leaves out a trainable unit's backward, or a round, is an error"},
      {"prefetch_depth", OrAll(&E::prefetch_depth, INT64_MAX),
       "units gathered ahead of the one in use", From(0)},
      {"coalesce", OrAuto(&E::coalesce_bytes, &E::measures_coalesce),
       "bytes grouped in one call of a collective; auto: measured if NCCL connects the ranks",
       kInBytes, From(0), IfAbsent("`1MiB`, or the buckets if they are smaller")},
      {"reshard_after_forward", &E::reshard_after_forward,
       "whether a unit is released after its forward and gathered again in backward"},
      {"reduction_group", &E::reduction_group, "ranks that sum their gradients first",
       From(1, kLargestInt), IfAbsent("the ranks of a host")},
      {"shard_group", &E::shard_group, "ranks that states are cut over (HSDP); 0: the world",
       From(0, kLargestInt)},
      {"timeout_seconds", &E::timeout_seconds, "longest wait for another rank", Above(0, 1e9)},
      {"trace", &E::trace, "file of the timeline", IfAbsent("no timeline")},
      {"deterministic_reduce", &E::deterministic_reduce,
       "whether NCCL sums in the CPU's order, in every version; other backends always do"},
      {"register_buffers", &E::register_buffers,
       "whether NCCL moves the pools' memory without its own copies, if it can"},
      {"unknown_keys", Choice(&E::unknown_keys, "error|warn"),
       "whether an unknown key is an error or a warning",
       IfAbsent("an error if DeepSpeed refuses it or it looks like a misspelling, else a warning")},
  };
}

std::vector<Row> OfMesh() {
  using M = MeshConfig;
  return {
      {"mesh", kBlock, "ranks by axis; the others are data ranks"},
      {"mesh.pipeline", &M::pipeline, "ranks that follow each other in the model; 1, or an error",
       From(1, kLargestInt)},
      {"mesh.tensor", &M::tensor, "ranks that share each layer, as ParameterSpec::split says",
       From(1, kLargestInt), kMustAgree},
  };
}

std::vector<Row> Groups() {
  using G = ParameterGroupConfig;
  return {
      {"parameter_groups", kBlock, "by ParameterSpec::group"},
      {"parameter_groups.*", kBlock, "one group"},
      {"parameter_groups.*.lr_factor", &G::lr_factor, "times the learning rate", From(0)},
      {"parameter_groups.*.weight_decay", &G::weight_decay, "weight decay of the group", From(0),
       IfAbsent("the optimizer's")},
      {"parameter_groups.*.use_muon", &G::use_muon,
       "whether Muon updates the matrices of the group", IfAbsent("by their names")},
      {"parameter_groups.*.muon_matrices", &G::muon_matrices,
       "into how many matrices Muon divides the rows of a parameter of the group, equally or in a "
       "ratio: 3 for q, k and v in one, [4, 1, 1] where q has four times the heads",
       From(1, 65536), IfAbsent("one")},
      OtherName("parameter_groups.*.optimizer", "optimizer"),
  };
}

// The tier of gradients or activations. "none" is DeepSpeed's word for the device.
Field TierOf(std::optional<Tier> E::*member) {
  Field field = Choice(member, "device|cpu|nvme");
  field.words = "none|" + field.words;
  field.take = [take = field.take](const Json& word, Config& config) {
    take(FindWord("none", word.get<std::string>()).empty() ? word : Json("device"), config);
  };
  return field;
}

std::vector<Row> Tiers() {
  return {
      {"device_memory", &E::device_memory, "bytes that the pools of a rank on the device may take",
       kInBytes, Above(0), IfAbsent("no limit")},
      {"host_memory", &E::host_memory, "bytes that the pools of a rank in the host's RAM may take",
       kInBytes, Above(0), IfAbsent("no limit")},
      {"offload_gradients", TierOf(&E::offload_gradients), "tier of reduced gradients",
       IfAbsent("the optimizer's, but `cpu` instead of `nvme`")},
      {"offload_activations", TierOf(&E::offload_activations), "tier of boundary activations",
       IfAbsent("the device")},
      {"split_master", &E::split_master,
       "whether a master is its bf16 parameter and the 16 bits that the cast cuts"},
      {"stochastic_rounding", &E::stochastic_rounding,
       "whether bf16 parameters are their own masters, rounded up or down at random"},
      {"verify_swap", Choice(&E::verify_swap, "off|states|all|auto"),
       "which parts of swap files have a checksum: masters and optimizer states, or all; auto: all "
       "if steps get no longer"},
      {"io_backend", Choice(&E::io_backend, "auto|io_uring|threads"),
       "how data moves to and from NVMe; auto: io_uring if it is allowed"},
  };
}

}  // namespace

std::vector<Section> EbbSections() {
  return {{"", {{"ebb", kBlock, "Ebb's own keys"}}},
          {"ebb.", OfMesh()},
          {"ebb.", Steps()},
          {"ebb.", Groups()},
          {"ebb.", Tiers()}};
}

}  // namespace ebb::config
