// Rows about DeepSpeed's other features: other kinds of parallelism, compression, data, and more.
// None of these is built. A key that switches such a feature off changes nothing.
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

using enum Taken;

constexpr std::string_view kOneKind = "not built: every rank is data-parallel";
constexpr std::string_view kPlainParameters = "not built: parameters are trained as they are";

constexpr Key kSurroundingsRows[] = {
    Anything("amp", kRefused, "there is no Apex here; set \"fp16\" or \"bf16\" instead")
        .Unless("disabled"),
    Anything("torch_autocast", kRefused,
             "there is no autocast here; set \"fp16\" or \"bf16\" instead")
        .Unless("disabled"),
    Anything("elasticity", kRefused, "not built: set the batch sizes and the number of ranks")
        .Unless("disabled"),
    Anything("expert_parallel", kRefused, kOneKind).Unless("disabled"),
    Anything("hybrid_engine", kRefused, "not built: evaluate with an Evaluation")
        .Unless("disabled"),
    Anything("eigenvalue", kRefused, "not built").Unless("disabled"),
    Anything("progressive_layer_drop", kRefused, "the trainer decides which layers run")
        .Unless("disabled"),
    Anything("curriculum_learning", kRefused, kTrainersData).Unless("disabled"),
    Anything("data_efficiency", kRefused, kTrainersData).Unless("disabled"),
    Anything("compression_training", kRefused, kPlainParameters).Unless("off"),
    Anything("weight_quantization", kRefused, kPlainParameters).Unless("off"),
    Anything("sparse_attention", kRefused, "attention is a kernel, and kernels are the trainer's")
        .Unless("off"),
    Integer("sequence_parallel_size", "1", kRefused, kOneKind).From(1).Unless("1"),
    OpenBlock("tensor_parallel", kLiterally, "every rank is data-parallel"),
    Integer("tensor_parallel.autotp_size", "0", kRefused, kOneKind).From(0).Unless("<=1"),
    Integer("tensor_parallel.tp_size", "1", kRefused, kOneKind).From(0).Unless("<=1"),
    Block("compile", kLiterally, "there is no graph to compile: the plan of a step is fixed"),
    Flag("compile.offload_activation", "false", kRefused,
         "there is no graph to compile; set \"ebb.offload_activations\""),
    Flag("compile.offload_opt_states", "false", kRefused,
         "there is no graph to compile; set \"zero_optimization.offload_optimizer\""),
    Flag("compile.offload_parameters", "false", kRefused,
         "there is no graph to compile; set \"zero_optimization.offload_param\""),
};

}  // namespace

std::span<const Key> SurroundingsKeys() {
  return kSurroundingsRows;
}

}  // namespace ebb::config
