// Every way in which a configuration can be wrong, and its message.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ebb/runtime/config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ebb::refusals_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Case {
  std::string json;
  std::vector<std::string> says;  // parts of the message
};

void PrintTo(const Case& test, std::ostream* out) {
  *out << test.json;
}

class Refusal : public ::testing::TestWithParam<Case> {};

TEST_P(Refusal, NamesTheErrorAndTheRemedy) {
  const absl::StatusOr<Config> config = Config::FromJson(GetParam().json);
  ASSERT_FALSE(config.ok());
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  for (const std::string& part : GetParam().says) {
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(part));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Mesh, Refusal,
    ::testing::Values(
        Case{R"({"ebb": {"mesh": {"pipeline": 2}}})",
             {"\"ebb.mesh.pipeline\" is 2, but the engine has no pipeline; set it to 1"}},
        Case{R"({"ebb": {"mesh": {"tensor": 0}}})", {"\"ebb.mesh.tensor\" is 0"}}));

INSTANTIATE_TEST_SUITE_P(
    UnknownKeys, Refusal,
    ::testing::Values(
        Case{R"({"train_batchsize": 1})",
             {"\"train_batchsize\" is not a key; the nearest is \"train_batch_size\""}},
        Case{R"({"zero_optimization": {"stag": 1}})",
             {"\"zero_optimization.stag\" is not a key", "\"zero_optimization.stage\""}},
        Case{R"({"zero_optimization": {"aio": {"block_size": 1048576}}})",
             {"\"zero_optimization.aio\" is not a key; \"aio\" is: move it to the top level"}},
        Case{R"({"zero_optimization": {"Gradient_Clipping": 1}})",
             {"\"gradient_clipping\" is: move it to the top level"}},
        Case{R"({"zero_optimization": {"nvme_path": "/nvme"}})",
             {"\"zero_optimization.nvme_path\" is not a key; "
              "\"zero_optimization.offload_param.nvme_path\" and "
              "\"zero_optimization.offload_optimizer.nvme_path\" are: move it to where it is "
              "meant"}},
        Case{R"({"bfloat16": {"enable": true}})",
             {"\"bfloat16.enable\" is not a key; the nearest is \"bfloat16.enabled\""}},
        Case{R"({"ebb": {"parameter_groups": {"g": {"lr_facto": 1}}}})",
             {"\"ebb.parameter_groups.g.lr_facto\"", "\"ebb.parameter_groups.g.lr_factor\""}},
        Case{R"({"ebb": {"parameter_groups": {"g": {"optimizer": {"type": "SGD",
                 "params": {"moment": 1}}}}}})",
             {"\"ebb.parameter_groups.g.optimizer.params.moment\"",
              "\"ebb.parameter_groups.g.optimizer.params.momentum\""}},
        Case{R"({"ebb": {"parameter_groups": {"g": 1}}})",
             {"\"ebb.parameter_groups.g\" is 1; allowed: an object"}},
        Case{R"({"ebb": {"parameter_groups": {"_g": {"lr": 1}}}})",
             {"\"ebb.parameter_groups._g.lr\" is not a key"}},
        Case{R"({"tensorboard": {"path": "x"}})", {"\"tensorboard.path\" is not a key"}},
        Case{R"({"fp16.enabled": true})",
             {"\"fp16.enabled\" is one name with a dot in it; write nested objects instead"}}));

INSTANTIATE_TEST_SUITE_P(
    WrongValues, Refusal,
    ::testing::Values(
        Case{R"({"zero_optimization": {"stage": 4}})",
             {"\"zero_optimization.stage\" is 4; allowed: an integer from 0 to 3"}},
        Case{R"({"zero_optimization": {"stage": true}})", {"is true; allowed: an integer"}},
        Case{R"({"zero_optimization": 3})", {"\"zero_optimization\" is 3; allowed: an object"}},
        Case{R"({"zero_optimization": "auto"})", {"is \"auto\"; allowed: an object"}},
        Case{R"({"zero_optimization": {"reduce_bucket_size": 15099494.4}})",
             {"is 15099494.4; allowed: an integer of at least 0"}},
        Case{R"({"zero_optimization": {"reduce_bucket_size": -1}})", {"is -1"}},
        Case{R"({"zero_optimization": {"sub_group_size": -1e30}})", {"an integer of at least 0"}},
        Case{R"({"zero_optimization": {"sub_group_size": 0.5}})", {"an integer of at least 0"}},
        Case{R"({"zero_optimization": {"stage": "three"}})", {"\"zero_optimization.stage\" is"}},
        Case{R"({"fp16": {"enabled": 2}})", {"is 2; allowed: true or false"}},
        Case{R"({"train_batch_size": true})", {"is true; allowed: an integer"}},
        Case{R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}})",
             {"\"scheduler.params.warmup_num_steps\" is -1; allowed: an integer of at least 0"}},
        Case{R"({"ebb": {"host_memory": 1e30}})", {"is 1e+30", "up to 9223372036854775807"}},
        Case{R"({"train_batch_size": 0})", {"allowed: an integer of at least 1"}},
        Case{R"({"train_batch_size": "8"})", {"is \"8\""}},
        Case{R"({"train_batch_size": [8]})", {"is [8]"}},
        Case{R"({"gradient_accumulation_steps": 2147483648})", {"from 1 to 2147483647"}},
        Case{R"({"gradient_clipping": -0.5})", {"\"gradient_clipping\" is -0.5"}},
        Case{R"({"communication_data_type": "fp8"})",
             {"is \"fp8\"; allowed: \"fp32\", \"bf16\" or \"fp16\""}},
        Case{R"({"communication_data_type": "int8"})", {"is \"int8\""}},
        Case{R"({"data_types": {"grad_accum_dtype": 32}})", {"is 32"}},
        Case{R"({"fp16": true})", {"\"fp16\" is true; allowed: an object"}},
        Case{R"({"fp16": {"loss_scale": -1}})", {"\"fp16.loss_scale\" is -1"}},
        Case{R"({"fp16": {"loss_scale": true}})", {"\"fp16.loss_scale\" is true"}},
        Case{R"({"fp16": {"initial_scale_power": 128}})", {"from 0 to 127"}},
        Case{R"({"fp16": {"loss_scale_window": 0}})", {"\"fp16.loss_scale_window\" is 0"}},
        Case{R"({"fp16": {"hysteresis": 0}})", {"\"fp16.hysteresis\" is 0"}},
        Case{R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1]}}})",
             {"\"optimizer.params.betas\" is [0.9,1]", "each of at least 0 and below 1"}},
        Case{R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}})", {"two numbers"}},
        Case{R"({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}})", {"two numbers"}},
        Case{R"({"optimizer": {"type": "AdamW", "params": {"lr": "auto "}}})", {"is \"auto \""}},
        Case{R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "square"}}})",
             {"allowed: \"log\" or \"linear\""}},
        Case{R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}}})",
             {"is [1,2]; allowed: a number"}},
        Case{R"({"scheduler": {"type": "CosineAnnealingLR"}})",
             {"\"scheduler.type\" is \"CosineAnnealingLR\"; allowed: \"WarmupLR\", "}},
        Case{R"({"ebb": {"reduce_at": "epoch"}})", {"allowed: \"round\" or \"step\""}},
        Case{R"({"ebb": {"micro_batches_per_round": 0}})", {"or \"all\""}},
        Case{R"({"ebb": {"prefetch_depth": "some"}})", {"an integer of at least 0 or \"all\""}},
        Case{R"({"ebb": {"asynchronous_step": "early"}})", {"\"auto\", \"late\" or \"off\""}},
        Case{R"({"ebb": {"coalesce": "4XiB"}})", {"text such as \"4MiB\""}},
        Case{R"({"ebb": {"coalesce": "9000000TiB"}})", {"is \"9000000TiB\""}},
        Case{R"({"ebb": {"coalesce": "-1MiB"}})", {"is \"-1MiB\""}},
        Case{R"({"ebb": {"coalesce": "MiB"}})", {"is \"MiB\""}},
        Case{R"({"ebb": {"coalesce": "1.5"}})", {"is \"1.5\""}},
        Case{R"({"ebb": {"coalesce": "1.MiB"}})", {"is \"1.MiB\""}},
        Case{R"({"ebb": {"coalesce": "1.2.3MiB"}})", {"is \"1.2.3MiB\""}},
        Case{R"({"ebb": {"coalesce": "1.1234567MiB"}})", {"is \"1.1234567MiB\""}},
        Case{R"({"ebb": {"coalesce": -1}})", {"is -1"}},
        Case{R"({"ebb": {"timeout_seconds": 0}})", {"a number above 0"}},
        Case{R"({"ebb": {"trace": 1}})", {"is 1; allowed: text"}},
        Case{R"({"ebb": {"reduction_group": 0}})", {"an integer from 1"}},
        Case{R"({"ebb": {"parameter_groups": []}})", {"is []; allowed: an object"}},
        Case{R"({"ebb": {"parameter_groups": {"g": 1}}})", {"\"ebb.parameter_groups.g\" is 1"}},
        Case{R"({"ebb": {"parameter_groups": {"g": {"lr_factor": -1}}}})", {"is -1"}},
        Case{"{\"zero_optimization\": {\"stage\": \"" + std::string(5000, 's') + "\"}}",
             {"sss...; allowed: an integer from 0 to 3"}}));

INSTANTIATE_TEST_SUITE_P(
    Contradictions, Refusal,
    ::testing::Values(
        Case{R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})",
             {"\"fp16.enabled\" and \"bf16.enabled\" are both true"}},
        Case{R"({"bf16": {"enabled": true}, "bfloat16": {"enabled": true}})",
             {"\"bf16\" and \"bfloat16\" are two names of one key"}},
        Case{
            R"({"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 1}})",
            {"\"zero_optimization.max_live_parameters\" and "
             "\"zero_optimization.stage3_max_live_parameters\" are two names"}},
        Case{R"({"data_types": {"param_dtype": "bf16"}})",
             {"\"data_types.param_dtype\" is \"bf16\"", "say fp32"}},
        Case{R"({"fp16": {"enabled": true, "initial_scale_power": 2, "min_loss_scale": 8}})",
             {"\"fp16.min_loss_scale\" 8 is above", "= 4"}},
        Case{R"({"optimizer": {"type": "SGD", "params": {"nesterov": true}}})",
             {"\"optimizer.params.nesterov\" needs \"momentum\" above 0 and \"dampening\" 0"}},
        Case{R"({"optimizer": {"type": "SGD",
                 "params": {"nesterov": true, "momentum": 0.9, "dampening": 0.1}}})",
             {"nesterov"}},
        Case{R"({"bf16": {"enabled": true, "bf16_optimizer_states": true},
                 "optimizer": {"type": "AdamW", "params": {"states": "8bit"}}})",
             {"bf16_optimizer_states", "optimizer.params.states"}},
        Case{
            R"({"optimizer": {"type": "AdamW", "params": {"states": "8bit"}}, "ebb": {"parameter_groups": {
                 "norms": {"optimizer": {"type": "AdamW", "params": {"states": "fp32"}}}}}})",
            {"norms", "all groups"}},
        Case{R"({"optimizer": {"type": "Lars", "params": {"nesterov": true}}})", {"nesterov"}},
        Case{R"({"optimizer": {"type": "Lamb", "params": {"eps": 0}}})",
             {"\"optimizer.params.eps\" is 0 as an fp32 number; Lamb divides by it"}},
        Case{R"({"optimizer": {"type": "Lamb", "params": {"min_coeff": 11}}})",
             {"\"optimizer.params.min_coeff\" 11 is above \"max_coeff\" 10"}},
        Case{R"({"optimizer": {"type": "AdamW", "params": {"max_coeff": 1}}})",
             {"\"optimizer.params.max_coeff\" is not a parameter of AdamW"}},
        Case{R"({"optimizer": {"params": {"lr": 1}}})",
             {"\"optimizer\" has no \"type\"; allowed: \"Adam\", \"AdamW\", \"SGD\", \"Lion\", "
              "\"Adagrad\", \"RMSprop\", \"Lamb\", \"Lars\" or \"Muon\""}},
        Case{R"({"scheduler": {"params": {}}})", {"\"scheduler\" has no \"type\""}},
        Case{R"({"scheduler": {"type": "auto"}})", {"\"scheduler\" has no \"type\""}},
        Case{R"({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}})",
             {"\"optimizer.params.momentum\" is not a parameter of AdamW, which has: \"lr\", "}},
        Case{R"({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}})",
             {"\"optimizer.params.betas\" is not a parameter of SGD"}},
        Case{R"({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}}})",
             {"\"scheduler.params.total_num_steps\" is not a parameter of WarmupLR, which has: "
              "\"warmup_min_lr\", \"warmup_max_lr\", \"warmup_num_steps\" or \"warmup_type\""}},
        Case{R"({"scheduler": {"type": "WarmupDecayLR"}})",
             {"WarmupDecayLR needs \"scheduler.params.total_num_steps\""}},
        Case{R"({"scheduler": {"type": "WarmupCosineLR", "params": {}}})",
             {"WarmupCosineLR needs \"scheduler.params.total_num_steps\""}},
        Case{R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}})",
             {"OneCycle needs \"scheduler.params.cycle_max_lr\""}},
        Case{R"({"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1}}})",
             {"OneCycle needs \"scheduler.params.cycle_min_lr\""}},
        Case{R"({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})",
             {"\"scheduler.params.total_num_steps\" is \"auto\"", "(steps of the whole run)",
              "give an integer of at least 1 instead"}},
        Case{R"({"ebb": {"parameter_groups": {"": {}}}})", {"a group without a name"}},
        Case{R"({"ebb": {"parameter_groups": {"g": {"optimizer": {"type": "SGD",
                 "params": {"eps": 1}}}}}})",
             {"\"ebb.parameter_groups.g.optimizer.params.eps\" is not a parameter of SGD"}},
        Case{R"({"ebb": {"parameter_groups": {"g": {"optimizer": {"params": {"lr": 1}}}}}})",
             {"\"ebb.parameter_groups.g.optimizer\" has no \"type\""}},
        Case{
            R"({"ebb": {"parameter_groups": {"g": {"weight_decay": 1, "optimizer": {"type": "SGD"}}}}})",
            {"\"ebb.parameter_groups.g\" has \"weight_decay\" and an \"optimizer\" of its own"}}));

INSTANTIATE_TEST_SUITE_P(
    NotBuilt, Refusal,
    ::testing::Values(
        Case{R"({"optimizer": {"type": "Muon"}, "ebb": {"parameter_groups": {"qkv": {
                 "muon_matrices": [3]}}}})",
             {"muon_matrices\" is [3]; allowed: an integer from 1 to 65536, or several in "
              "brackets"}},
        Case{R"({"optimizer": {"type": "Muon", "params": {"ns_dtype": "fp16"}}})",
             {"ns_dtype\" is \"fp16\"; allowed: \"fp32\" or \"bf16\""}},
        Case{R"({"optimizer": {"type": "Muon", "params": {"ns_coefficients": [1, 2]}}})",
             {"three numbers in brackets"}},
        Case{
            R"({"optimizer": {"type": "AdamW"}, "ebb": {"parameter_groups": {"g": {"use_muon": true}}}})",
            {"\"ebb.parameter_groups.g.use_muon\"", "the optimizer of the group is not Muon"}},
        Case{R"({"optimizer": {"type": "Muon"}, "ebb": {"parameter_groups": {"g": {"optimizer": {
                 "type": "Muon", "params": {"ns_dtype": "fp32"}}}}}})",
             {"ns_dtype\" differs from that of another optimizer that is Muon"}},
        Case{R"({"optimizer": {"type": "Adafactor"}})",
             {"\"optimizer.type\" is \"Adafactor\": not built, but you can write your own "
              "(EngineOptions::optimizer, an OptimizerSpec); allowed: \"Adam\", \"AdamW\", "}},
        Case{R"({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}})",
             {"\"optimizer.params.eps\" is not a parameter of Lion"}},
        Case{R"({"optimizer": {"type": "OneBitAdam"}})", {"not built"}},
        Case{R"({"optimizer": {"type": "Foo"}})",
             {"is \"Foo\"; allowed: \"Adam\", \"AdamW\", \"SGD\", \"Lion\", \"Adagrad\", "
              "\"RMSprop\", \"Lamb\", \"Lars\" or \"Muon\""}},
        Case{R"({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}})",
             {"amsgrad\" is true: not built"}},
        Case{R"({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}})",
             {"\"optimizer.params.max_grad_norm\" is 1", "set \"gradient_clipping\""}},
        Case{R"({"zero_optimization": {"zero_hpz_partition_size": -1}})",
             {"allowed: an integer from 0 to 2147483647"}},
        Case{R"({"zero_optimization": {"zero_quantized_weights": true}})",
             {"not built: parameters gathered in int8 change results; allowed: false"}},
        Case{R"({"zero_optimization": {"zero_quantized_gradients": true}})", {"not built"}},
        Case{R"({"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}})",
             {"\"zero_optimization.zeropp_loco_param\" is given: not built"}},
        Case{R"({"zero_optimization": {"zenflow": {}}})",
             {"\"zero_optimization.zenflow\" is given: not built: every gradient"}},
        Case{R"({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}})", {"not built"}},
        Case{R"({"zero_optimization": {"legacy_stage1": true}})", {"DeepSpeed has removed it"}},
        Case{R"({"fp16": {"fp16_master_weights_and_grads": true}})", {"masters are fp32"}},
        Case{R"({"bf16": {"bf16_master_weights_and_grads": true}})", {"masters are fp32"}},
        Case{R"({"bf16": {"bf16_optimizer_states": true}, "optimizer": {"type": "Lamb"}})",
             {"optimizer.params.states", "LAMB and LARS"}},
        Case{R"({"optimizer": {"type": "Lars", "params": {"states": "8bit"}}})",
             {"\"optimizer.params.states\" is not a parameter of Lars"}},
        Case{R"({"optimizer": {"type": "AdamW", "params": {"states": "4bit"}}})",
             {"fp32", "bf16", "8bit"}},
        Case{R"({"optimizer": {"type": "AdamW", "params": {"states": "8bit"}},
                 "ebb": {"parameter_groups": {"norms": {"optimizer": {"type": "Lamb"}}}}})",
             {"optimizer.params.states", "norms"}},
        Case{R"({"amp": {"enabled": true, "opt_level": "O1"}})",
             {"\"amp.enabled\" is true", "\"bf16\""}},
        Case{R"({"torch_autocast": {"enabled": true}})", {"\"torch_autocast.enabled\" is true"}},
        Case{R"({"sparse_gradients": true})", {"gradients are dense"}},
        Case{R"({"gradient_allreduce_op": "sum"})", {"gradient_divisor", "allowed: \"mean\""}},
        Case{R"({"managed_gradient_accumulation": false})", {"BeginStep", "allowed: true"}},
        Case{R"({"sequence_parallel_size": 2})", {"ranks are data ranks and tensor ranks"}},
        Case{R"({"elasticity": {"enabled": true}})", {"\"elasticity.enabled\" is true"}},
        Case{
            R"({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}}})",
            {"\"compression_training\" is given: parameters are trained as they are, and DeepSpeed "
             "has removed it"}},
        Case{R"({"compression_training": {"x": 1}})", {"is given"}},
        Case{R"({"sparse_attention": {"mode": "fixed"}})", {"\"sparse_attention\" is given"}},
        Case{R"({"tensor_parallel": {"tp_size": 2}})",
             {"set \"tensor_parallel.autotp_size\" instead; allowed: at most 1"}},
        Case{R"({"tensor_parallel": {"autotp_size": 2}, "ebb": {"mesh": {"tensor": 4}}})",
             {"\"ebb.mesh.tensor\" is 4", "\"tensor_parallel.autotp_size\" is 2",
              "they mean the same"}},
        Case{R"({"compile": {"offload_parameters": true}})",
             {"set \"zero_optimization.offload_param\"; allowed: false"}},
        Case{R"({"compile": {"offload_opt_states": true}})",
             {"set \"zero_optimization.offload_optimizer\""}},
        Case{R"({"compile": {"offload_activation": true}})", {"set \"ebb.offload_activations\""}},
        Case{R"({"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 5}}})",
             {"allowed: -1"}}));

INSTANTIATE_TEST_SUITE_P(
    TierValues, Refusal,
    ::testing::Values(
        Case{R"({"zero_optimization": {"offload_param": {"device": "disk"}}})",
             {"\"zero_optimization.offload_param.device\" is \"disk\"; allowed: \"none\", "
              "\"cpu\" or \"nvme\""}},
        Case{R"({"zero_optimization": {"offload_optimizer": {"device": "device"}}})",
             {"allowed: \"none\", \"cpu\" or \"nvme\""}},
        Case{R"({"zero_optimization": {"offload_param": "cpu"}})", {"allowed: an object"}},
        Case{R"({"zero_optimization": {"offload_optimizer": {"nvme_path": []}}})",
             {"\"zero_optimization.offload_optimizer.nvme_path\" is []; allowed: a path"}},
        Case{R"({"zero_optimization": {"offload_optimizer": {"nvme_path": ["/a", ""]}}})",
             {"is [\"/a\",\"\"]; allowed: a path"}},
        Case{R"({"zero_optimization": {"offload_optimizer": {"nvme_path": ["/a", 1]}}})",
             {"allowed: a path"}},
        Case{R"({"zero_optimization": {"offload_param": {"nvme_path": "/a\u0000b"}}})",
             {"allowed: a path"}},
        Case{R"({"zero_optimization": {"offload_param": {"buffer_count": 0}}})",
             {"\"zero_optimization.offload_param.buffer_count\" is 0; allowed: an integer from 1"}},
        Case{R"({"zero_optimization": {"offload_param": {"buffer_size": 0}}})",
             {"allowed: an integer of at least 1"}},
        Case{R"({"zero_optimization": {"offload_param": {"max_in_cpu": -1}}})",
             {"allowed: an integer of at least 0"}},
        Case{R"({"zero_optimization": {"offload_param": {"path": "/x"}}})",
             {"\"zero_optimization.offload_param.path\" is not a key"}},
        Case{R"({"zero_optimization": {"offload_optimizer": {"buffer_count": 0}}})",
             {"\"zero_optimization.offload_optimizer.buffer_count\" is 0"}},
        Case{R"({"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}})",
             {"\"zero_optimization.offload_optimizer.ratio\" is 1.5; allowed: a number from 0 to "
              "1 or \"auto\""}},
        Case{R"({"zero_optimization": {"offload_optimizer": {"ratio": "most"}}})",
             {"is \"most\"; allowed: a number from 0 to 1 or \"auto\""}},
        Case{R"({"zero_optimization": {"offload_optimizer": {"ratio": -0.1}}})", {"from 0 to 1"}},
        Case{R"({"aio": {"block_size": 4095}})",
             {"\"aio.block_size\" is 4095; allowed: an integer from 4096 to 1073741824"}},
        Case{R"({"aio": {"block_size": 1000000}})",
             {"\"aio.block_size\" is 1000000; allowed: a multiple of 4096; the nearest are 999424 "
              "and 1003520"}},
        Case{R"({"aio": {"queue_depth": 0}})", {"an integer from 1 to 4096"}},
        Case{R"({"aio": {"queue_depth": 4097}})", {"an integer from 1 to 4096"}},
        Case{R"({"aio": {"intra_op_parallelism": 65}})", {"an integer from 1 to 64"}},
        Case{R"({"aio": {"thread_count": 0}})", {"\"aio.thread_count\" is 0; allowed: an integer"}},
        Case{R"({"aio": {"blocksize": 1}})", {"the nearest is \"aio.block_size\""}},
        Case{R"({"activation_checkpointing": {"cpu_checkpointing": "cpu"}})", {"true or false"}},
        Case{R"({"ebb": {"device_memory": 0}})",
             {"\"ebb.device_memory\" is 0; allowed: bytes, as an integer above 0 or text such as "
              "\"4MiB\""}},
        Case{R"({"ebb": {"host_memory": "0 GiB"}})", {"\"ebb.host_memory\" is \"0 GiB\""}},
        Case{R"({"ebb": {"host_memory": -1}})", {"above 0"}},
        Case{R"({"ebb": {"host_memory": "much"}})", {"is \"much\"; allowed: bytes"}},
        Case{R"({"ebb": {"offload_gradients": "ram"}})",
             {"allowed: \"none\", \"device\", \"cpu\" or \"nvme\""}},
        Case{R"({"ebb": {"offload_activations": true}})", {"is true; allowed: \"none\""}},
        Case{R"({"ebb": {"split_master": 1}})", {"allowed: true or false"}},
        Case{R"({"ebb": {"stochastic_rounding": "yes"}})", {"allowed: true or false"}},
        Case{R"({"ebb": {"io_backend": "aio"}})",
             {"\"ebb.io_backend\" is \"aio\"; allowed: \"auto\", \"io_uring\" or \"threads\""}},
        Case{R"({"ebb": {"verify_swap": "on"}})",
             {"\"ebb.verify_swap\" is \"on\"; allowed: \"off\", \"states\", \"all\" or "
              "\"auto\""}}));

INSTANTIATE_TEST_SUITE_P(
    TiersThatDoNotFit, Refusal,
    ::testing::Values(
        Case{R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})",
             {"\"zero_optimization.offload_param.device\" is \"nvme\", but "
              "\"zero_optimization.offload_param.nvme_path\" is not given; give a folder"}},
        Case{R"({"zero_optimization": {"stage": 3, "offload_param": {"nvme_path": "/x"},
                 "offload_optimizer": {"device": "nvme", "nvme_path": "auto"}}})",
             {"\"zero_optimization.offload_optimizer.nvme_path\" is not given"}},
        Case{R"({"zero_optimization": {"stage": 0}, "ebb": {"offload_gradients": "cpu"}})",
             {"\"ebb.offload_gradients\" is \"cpu\", but at \"zero_optimization.stage\" 0 every "
              "rank keeps all gradients; remove it or use stage 1, 2 or 3"}},
        Case{R"({"ebb": {"offload_gradients": "nvme"}})",
             {"\"ebb.offload_gradients\" is \"nvme\"", "use stage 1, 2 or 3"}},
        Case{R"({"zero_optimization": {"stage": 1}, "ebb": {"offload_gradients": "nvme"}})",
             {"\"ebb.offload_gradients\" is \"nvme\", but no folder is given; set "
              "\"zero_optimization.offload_optimizer.nvme_path\" or "
              "\"zero_optimization.offload_param.nvme_path\""}},
        Case{R"({"ebb": {"offload_activations": "nvme"}})",
             {"\"ebb.offload_activations\" is \"nvme\", but no folder is given"}},
        Case{R"({"ebb": {"split_master": true}})",
             {"\"ebb.split_master\" is true, but the compute dtype is fp32",
              "set \"bf16\": {\"enabled\": true}"}},
        Case{R"({"fp16": {"enabled": true}, "ebb": {"split_master": true}})", {"dtype is fp16"}},
        Case{R"({"ebb": {"stochastic_rounding": true}})",
             {"\"ebb.stochastic_rounding\" is true, but the compute dtype is fp32",
              "set \"bf16\": {\"enabled\": true}"}},
        Case{R"({"fp16": {"enabled": true}, "ebb": {"stochastic_rounding": true}})",
             {"dtype is fp16"}},
        Case{R"({"bf16": {"enabled": true},
                 "ebb": {"stochastic_rounding": true, "split_master": true}})",
             {"\"ebb.stochastic_rounding\" and \"ebb.split_master\" are both true", "remove one"}},
        Case{R"({"zero_optimization": {"stage": 3, "cpu_offload": true,
                 "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}})",
             {"\"zero_optimization.cpu_offload\" is an old form of "
              "\"zero_optimization.offload_optimizer.device\", which is given, too"}},
        Case{R"({"zero_optimization": {"stage": 3, "cpu_offload_param": true,
                 "offload_param": {"device": "cpu"}}})",
             {"\"zero_optimization.cpu_offload_param\" is an old form of"}},
        Case{R"({"aio": {"thread_count": 65, "intra_op_parallelism": 65}})",
             {"\"aio.thread_count\" is 65; allowed: an integer from 1 to 64"}}));

// The sentences of an error, in order.
std::vector<std::string> ProblemsOf(const std::string& json, const ReadOptions& options = {}) {
  const absl::StatusOr<Config> config = Config::FromJson(json, options);
  EXPECT_FALSE(config.ok()) << json;
  return absl::StrSplit(config.status().message(), "\n  ");
}

TEST(Problems, AreReportedTogetherEachWithItsPlace) {
  EXPECT_THAT(
      ProblemsOf(R"({
  "train_batch_size": 0,
  "fp16": {"enabled": true, "enable": 1}, "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3,
    "offload_param": {"device": "nvme"}, "offload_param": {}},
  "optimizer": {"type": "SGD", "params": {"betas": [0, 0]}},
  "aio": {"block_size": 5000}
})"),
      ElementsAre("7 problems", HasSubstr("line 2, column 3: \"train_batch_size\" is 0; allowed: "),
                  HasSubstr("line 3, column 12: \"fp16.enabled\" and \"bf16.enabled\""),
                  HasSubstr("line 3, column 29: \"fp16.enable\" is not a key"),
                  HasSubstr("line 5, column 23: \"zero_optimization.offload_param.device\""),
                  HasSubstr("line 5, column 42: the key \"zero_optimization.offload_param\""),
                  HasSubstr("line 6, column 43: \"optimizer.params.betas\" is not"),
                  HasSubstr("line 7, column 11: \"aio.block_size\" is 5000")));
}

// One mistake is one problem.
TEST(Problems, NothingFollowsFromAWrongKey) {
  EXPECT_THAT(
      ProblemsOf(R"({"zero_optimization": {"stag": 3}, "ebb": {"offload_gradients": "cpu"}})"),
      ElementsAre(HasSubstr("\"zero_optimization.stag\" is not a key")));
  EXPECT_THAT(ProblemsOf(R"({"optimizer": {"type": "Adan", "params": {"betas": [0, 0]}}})"),
              ElementsAre(HasSubstr("\"optimizer.type\" is \"Adan\"")));
  EXPECT_THAT(ProblemsOf(R"({"optimizer": {"params": {"freeze_step": 23, "lr": "x"},
                                           "type": "OneBitAdam"}})"),
              ElementsAre(HasSubstr("\"optimizer.type\" is \"OneBitAdam\": not built")));
  EXPECT_THAT(ProblemsOf(R"({"scheduler": {"type": "WarmupDecayLR",
                                           "params": {"total_num_steps": "many"}}})"),
              ElementsAre(HasSubstr("\"scheduler.params.total_num_steps\" is \"many\"")));
  EXPECT_THAT(ProblemsOf(R"({"optimizer": {"params": {"type": "SGD", "lr": 0.1}}})"),
              ElementsAre(HasSubstr("\"optimizer.params.type\" is not a key; \"optimizer.type\"")));
  EXPECT_THAT(ProblemsOf(R"({"bf16": 1, "ebb": {"split_master": true}})"),
              ElementsAre(HasSubstr("\"bf16\" is 1; allowed: an object")));
}

TEST(Problems, AreBounded) {
  std::string keys;
  for (int i = 0; i < 500; ++i) keys += absl::StrCat(i == 0 ? "" : ",", "\"x", i, "\": 1");
  const std::vector<std::string> said = ProblemsOf("{\"ebb\": {" + keys + "}}");
  EXPECT_EQ(said.front(), "500 problems");
  EXPECT_EQ(said.back(), "and 480 more");
  EXPECT_EQ(Config::FromJson("{" + keys + "}")->warnings.size(), 101u);
  // The time does not grow with the square of the file's size: 45,000 unknown keys take 0.15 s.
  std::string groups;
  for (int i = 0; i < 90; ++i) {
    groups += absl::StrCat(i == 0 ? "" : ",", "\"g", i, "\": {\"optimizer\": {\"params\": {", keys,
                           "}, \"type\": \"SGD\"}}");
  }
  EXPECT_EQ(ProblemsOf("{\"ebb\": {\"parameter_groups\": {" + groups + "}}}").front(),
            "45000 problems");
}

TEST(UnknownKeys, AreErrorsOrWarningsAsAsked) {
  const std::string json =
      R"({"job": 1, "train_batchsize": 2, "fp16": {"level": "O2"}, "_note": 1, "ebb": {)";
  EXPECT_EQ(ProblemsOf(json + "}}").size(), 3u) << "2 of them, under a head";
  EXPECT_EQ(ProblemsOf(json + R"("unknown_keys": "error"}})").size(), 4u);
  EXPECT_EQ(ProblemsOf(json + "}}", {.unknown_keys = UnknownKeys::kError}).size(), 4u);
  for (const absl::StatusOr<Config>& config :
       {Config::FromJson(json + R"("unknown_keys": "warn"}})"),
        Config::FromJson(json + R"("unknown_keys": "error"}})",
                         {.unknown_keys = UnknownKeys::kWarn})}) {
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_THAT(config->warnings,
                ElementsAre("\"job\" is not a key; it is ignored, as in DeepSpeed",
                            "\"train_batchsize\" is not a key; the nearest is "
                            "\"train_batch_size\"; it is ignored, as in DeepSpeed",
                            "\"fp16.level\" is not a key; it is ignored"));
  }
}

TEST(Validate, AcceptsEveryConfigThatWasRead) {
  EXPECT_TRUE(Config().Validate().ok());
  EXPECT_TRUE(Config::FromJson(R"({"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}})")
                  ->Validate()
                  .ok());
}

TEST(Validate, NamesTheKeyOfAFieldThatAProgramChanged) {
  const auto error = [](auto change) {
    Config config;
    change(config);
    const absl::Status status = config.Validate();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(error([](Config& c) { c.zero.stage = 4; }),
            "\"zero_optimization.stage\" is 4; allowed: an integer from 0 to 3");
  EXPECT_EQ(error([](Config& c) { c.optimizer.learning_rate = -1; }),
            "\"optimizer.params.lr\" is -1; allowed: a number from 0 to 1e+30");
  EXPECT_EQ(error([](Config& c) { c.optimizer.learning_rate = std::nan(""); }),
            "\"optimizer.params.lr\" is nan; allowed: a number from 0 to 1e+30");
  EXPECT_EQ(error([](Config& c) { c.gradient_clipping = INFINITY; }),
            "\"gradient_clipping\" is inf; allowed: a number of at least 0");
  EXPECT_THAT(error([](Config& c) { c.train_batch_size = -8; }),
              HasSubstr("\"train_batch_size\" is -8"));
  EXPECT_THAT(error([](Config& c) { c.ebb.micro_batches_per_round = -1; }),
              HasSubstr("ebb.micro_batches_per_round"));
  EXPECT_THAT(error([](Config& c) { c.scheduler.type = SchedulerType::kWarmupDecay; }),
              HasSubstr("\"scheduler.params.total_num_steps\" is 0"));
  EXPECT_THAT(error([](Config& c) { c.communication = DType::kInt8; }),
              HasSubstr("\"communication_data_type\" is \"int8\""));
  EXPECT_THAT(error([](Config& c) { c.compute = DType::kInt8; }),
              HasSubstr("compute dtype is int8"));
  EXPECT_THAT(error([](Config& c) { c.optimizer.decoupled_weight_decay = false; }),
              HasSubstr("choose Adam"));
  EXPECT_THAT(error([](Config& c) { c.ebb.timeout_seconds = 0; }),
              HasSubstr("ebb.timeout_seconds"));
  EXPECT_THAT(error([](Config& c) {
                c.zero.offload_param.nvme_paths = {"/x", ""};
              }),
              HasSubstr("\"zero_optimization.offload_param.nvme_path\" is [\"/x\",\"\"]"));
  EXPECT_THAT(error([](Config& c) { c.zero.offload_optimizer.device = Tier::kNvme; }),
              HasSubstr("\"zero_optimization.offload_optimizer.device\" is \"nvme\""));
  EXPECT_THAT(error([](Config& c) { c.zero.offload_optimizer.ratio = std::nan(""); }),
              HasSubstr("\"zero_optimization.offload_optimizer.ratio\" is nan"));
  EXPECT_THAT(error([](Config& c) { c.aio.block_size = 4097; }),
              HasSubstr("the nearest are 4096 and 8192"));
  EXPECT_THAT(error([](Config& c) { c.ebb.host_memory = 0; }),
              HasSubstr("\"ebb.host_memory\" is 0"));
  EXPECT_THAT(error([](Config& c) { c.ebb.split_master = true; }), HasSubstr("ebb.split_master"));
  EXPECT_THAT(error([](Config& c) { c.ebb.stochastic_rounding = true; }),
              HasSubstr("ebb.stochastic_rounding"));
  EXPECT_THAT(error([](Config& c) { c.ebb.parameter_groups["g"].lr_factor = -1; }),
              HasSubstr("\"ebb.parameter_groups.g.lr_factor\" is -1"));
  EXPECT_THAT(error([](Config& c) { c.ebb.parameter_groups["g"].optimizer.emplace().beta2 = 1; }),
              HasSubstr("\"ebb.parameter_groups.g.optimizer.params.betas\""));
}

}  // namespace
}  // namespace ebb::refusals_test
