// Rows about DeepSpeed's other features: other kinds of parallelism, compression, data, and more.
// None of these is built. A key that switches such a feature off changes nothing.
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {

std::vector<Section> SurroundingsSections() {
  using enum Kind;
  constexpr std::string_view kOneKind = "not built: ranks are data ranks and tensor ranks";
  constexpr std::string_view kPlainParameters = "not built: parameters are trained as they are";
  constexpr auto kUnlessDisabled = RefusedUnless("disabled"), kUnlessOff = RefusedUnless("off");
  constexpr auto kUnlessOne = RefusedUnless("<=1");
  return {
      {"",
       {{"amp", kAnything,
         "there is no Apex here, and DeepSpeed has removed it; set \"fp16\" or \"bf16\" instead",
         kUnlessDisabled},
        {"torch_autocast", kAnything, "there is no autocast here; set \"fp16\" or \"bf16\" instead",
         kUnlessDisabled},
        {"elasticity", kAnything,
         "DeepSpeed has removed it; set the batch sizes and the number of ranks", kUnlessDisabled},
        {"expert_parallel", kAnything, kOneKind, kUnlessDisabled},
        {"hybrid_engine", kAnything, "not built: evaluate with an Evaluation", kUnlessDisabled},
        {"eigenvalue", kAnything, "DeepSpeed has removed it", kUnlessDisabled},
        {"progressive_layer_drop", kAnything,
         "the trainer decides which layers run, and DeepSpeed has removed it", kUnlessDisabled},
        {"curriculum_learning", kAnything,
         "the data are the trainer's, and DeepSpeed has removed it", kUnlessDisabled},
        {"data_efficiency", kAnything, kTrainersData, kUnlessDisabled},
        {"compression_training", kAnything,
         "parameters are trained as they are, and DeepSpeed has removed it", kUnlessOff},
        {"quantize_training", kAnything,
         "parameters are trained as they are, and DeepSpeed has removed it", kUnlessDisabled},
        {"weight_quantization", kAnything, kPlainParameters, kUnlessOff},
        {"sparse_attention", kAnything,
         "attention is a kernel, and kernels are the trainer's; DeepSpeed has removed it",
         kUnlessOff},
        {"sequence_parallel_size", kInteger, kOneKind, From(1), RefusedUnless("1")},
        {"tensor_parallel", kOpenBlock, "ranks that share each layer"},
        OtherName("tensor_parallel.autotp_size", "ebb.mesh.tensor"),
        {"tensor_parallel.tp_size", kInteger, "set \"tensor_parallel.autotp_size\" instead",
         From(0), kUnlessOne, Default("1")},
        {"compile", kBlock, "there is no graph to compile: the plan of a step is fixed"},
        {"compile.offload_activation", kFlag,
         "there is no graph to compile; set \"ebb.offload_activations\"", kUnlessFalse},
        {"compile.offload_opt_states", kFlag,
         "there is no graph to compile; set \"zero_optimization.offload_optimizer\"", kUnlessFalse},
        {"compile.offload_parameters", kFlag,
         "there is no graph to compile; set \"zero_optimization.offload_param\"", kUnlessFalse}}}};
}

}  // namespace ebb::config
