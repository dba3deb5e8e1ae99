// A key that is not taken literally gets one remark, and a harmless key is not refused.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ebb::remarks_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Sets keys for which the defaults would cause remarks.
constexpr char kQuiet[] = R"("gradient_clipping": 1, "optimizer": {"type": "AdamW"})";

Config Read(const std::string& json, const ReadOptions& options = {}) {
  const absl::StatusOr<Config> config = Config::FromJson(json, options);
  EXPECT_TRUE(config.ok()) << config.status() << "\n" << json;
  return config.value_or(Config());
}
std::vector<std::string> RemarksOn(const std::string& keys) {
  return Read(absl::StrCat("{", kQuiet, keys, "}")).remarks;
}

TEST(Remarks, AreSilentOnKeysThatAreTakenLiterally) {
  EXPECT_THAT(RemarksOn(R"(, "train_batch_size": 8, "zero_optimization": {"stage": 3,
      "overlap_comm": true}, "ebb": {"prefetch_depth": 2}, "communication_data_type": "fp32")"),
              ElementsAre());
}

TEST(Remarks, NameUnexpectedDefaults) {
  const Config config = Read(R"({"bf16": {"enabled": true}})");
  EXPECT_THAT(config.remarks,
              ElementsAre("gradients are clipped to a global norm of 1.0, DeepSpeed's default; "
                          "\"gradient_clipping\": 0 turns it off",
                          HasSubstr("no \"optimizer\": AdamW, a learning rate of 0.001"),
                          HasSubstr("gradients are accumulated in fp32")));
}

TEST(Remarks, NameUpperLimitsAndApproximations) {
  EXPECT_THAT(
      RemarksOn(R"(, "zero_optimization": {"reduce_bucket_size": 5e8,
                             "stage3_param_persistence_threshold": 10})"),
      ElementsAre("\"zero_optimization.reduce_bucket_size\" 500000000 is an upper limit: "
                  "elements reduced as one group of collectives",
                  HasSubstr("\"zero_optimization.stage3_param_persistence_threshold\" 10 is "
                            "approximated: ")));
}

TEST(Remarks, OneLineForABlockWithoutMeaning) {
  EXPECT_THAT(
      RemarksOn(R"(, "tensorboard": {"enabled": true, "output_path": "x", "job_name": "y"})"),
      ElementsAre(HasSubstr("\"tensorboard\" has no meaning here")));
  EXPECT_THAT(RemarksOn(R"(, "autotuning": {"anything": {"goes": 1}, "enabled": "perhaps"})"),
              ElementsAre(HasSubstr("\"autotuning\" has no meaning here")));
  EXPECT_THAT(RemarksOn(R"(, "timers": {"throughput": {"enabled": true}})"),
              ElementsAre(HasSubstr("\"timers\" has no meaning here")));
}

TEST(Remarks, OldFormsAndNames) {
  EXPECT_THAT(RemarksOn(R"(, "zero_optimization": true)"),
              ElementsAre("\"zero_optimization\" true is taken as {\"stage\":1}, an old form"));
  EXPECT_THAT(RemarksOn(R"(, "bfloat16": {"enabled": false})"),
              ElementsAre("\"bfloat16\" is an old name of \"bf16\""));
  EXPECT_THAT(
      RemarksOn(R"(, "zero_optimization": {"prefetch_bucket_size": 1})"),
      ElementsAre(HasSubstr("\"zero_optimization.prefetch_bucket_size\" 1 is an upper limit")));
}

TEST(Remarks, AdamIsAdamW) {
  const auto remarks = [](const std::string& json) { return Read(json).remarks; };
  const auto about_adam = Contains(HasSubstr("\"Adam\" decouples weight decay"));
  EXPECT_THAT(remarks(R"({"optimizer": {"type": "Adam"}})"), about_adam);
  EXPECT_THAT(remarks(R"({"optimizer": {"type": "AdamW"}})"), Not(about_adam));
  EXPECT_THAT(remarks(R"({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}})"),
              Not(about_adam));
  const std::vector<std::string> twice = remarks(R"({"optimizer": {"type": "Adam"},
      "ebb": {"parameter_groups": {"g": {"optimizer": {"type": "Adam"}}}}})");
  EXPECT_EQ(std::count_if(twice.begin(), twice.end(),
                          [](const std::string& remark) {
                            return remark.find("\"Adam\" decouples") != std::string::npos;
                          }),
            1);
  EXPECT_THAT(remarks(R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}})"),
              Contains(HasSubstr("AdamW always decouples weight decay")));
}

TEST(Remarks, NameSchedulesThatHaveNoEffect) {
  EXPECT_THAT(RemarksOn(R"(, "scheduler": {"type": "WarmupDecayLR",
                             "params": {"total_num_steps": 10, "warmup_num_steps": 20}})"),
              ElementsAre(HasSubstr("total_num_steps is less than its warmup_num_steps")));
  const Config config = Read(R"({"optimizer": {"type": "SGD"},
      "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}})");
  EXPECT_THAT(config.remarks, Contains(HasSubstr("betas, but SGD has none")));
}

TEST(Remarks, SecondaryShardsAreOfStage3) {
  const auto at = [](int stage) {
    return RemarksOn(", \"zero_optimization\": {\"zero_hpz_partition_size\": 8, \"stage\": " +
                     std::to_string(stage) + "}");
  };
  EXPECT_THAT(at(3), ElementsAre());
  for (int stage = 0; stage < 3; ++stage) {
    EXPECT_THAT(at(stage), ElementsAre(HasSubstr("\"zero_optimization.zero_hpz_partition_size\" 8 "
                                                 "is ignored at \"zero_optimization.stage\"")));
  }
}

// Refused keys cause no remark if their value changes nothing. Blocks of only such keys cause none
// either.
class Harmless : public ::testing::TestWithParam<const char*> {};
TEST_P(Harmless, IsAcceptedInSilence) {
  EXPECT_THAT(RemarksOn(GetParam()), ElementsAre());
}
INSTANTIATE_TEST_SUITE_P(
    Keys, Harmless,
    ::testing::Values(
        R"(, "zero_optimization": {"offload_param": {"device": "none", "pin_memory": true}})",
        R"(, "zero_optimization": {"offload_optimizer": {"device": "NONE"}})",
        R"(, "zero_optimization": {"cpu_offload": false, "cpu_offload_param": false})",
        R"(, "zero_optimization": {"mics_shard_size": -1, "zero_hpz_partition_size": 1})",
        R"(, "zero_optimization": {"zero_quantized_weights": false, "zenflow": null})",
        R"(, "fp16": {"enabled": false, "fp16_master_weights_and_grads": false})",
        R"(, "amp": {"enabled": false}, "elasticity": {"enabled": false})",
        R"(, "gradient_allreduce_op": "mean", "sparse_gradients": false)",
        R"(, "managed_gradient_accumulation": true)",
        R"(, "activation_checkpointing": {"cpu_checkpointing": false})",
        R"(, "compression_training": {}, "sparse_attention": {})",
        R"(, "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": false}}})",
        R"(, "zero_optimization": {"stage3_param_persistence_threshold": 0,
                                   "stage3_max_reuse_distance": 1e9})",
        R"(, "fp16": {"enabled": null}, "zero_optimization": {"offload_param": {"nvme_path": ""}})",
        R"(, "elasticity": {"max_train_batch_size": 8}, "amp": {"opt_level": "O1"})",
        R"(, "ebb": {"shard_group": 0, "offload_gradients": "none", "offload_activations": "device",
             "split_master": false, "stochastic_rounding": false, "verify_swap": "off",
              "device_memory": null})"));

TEST(Remarks, TiersAreTakenLiterally) {
  EXPECT_THAT(RemarksOn(R"(, "zero_optimization": {"stage": 3,
      "offload_param": {"device": "nvme", "nvme_path": "/x", "max_in_cpu": 0, "pin_memory": false},
      "offload_optimizer": {"device": "nvme", "nvme_path": ["/x", "/y"], "ratio": 0.5}},
      "aio": {"block_size": 4096, "queue_depth": 1, "thread_count": 2, "single_submit": true},
      "activation_checkpointing": {"cpu_checkpointing": true},
      "ebb": {"offload_gradients": "cpu", "host_memory": "1GiB", "verify_swap": "all",
              "io_backend": "threads"})"),
              ElementsAre());
  EXPECT_THAT(RemarksOn(R"(, "zero_optimization": {"stage": 1,
      "offload_optimizer": {"device": "cpu", "ratio": "auto"}})"),
              ElementsAre());
}

TEST(Remarks, MoreInFlightThanThereMayBe) {
  EXPECT_THAT(RemarksOn(R"(, "aio": {"queue_depth": 4096, "intra_op_parallelism": 1})"),
              ElementsAre());
  EXPECT_THAT(RemarksOn(R"(, "aio": {"queue_depth": 64, "thread_count": 64})"), ElementsAre());
  EXPECT_THAT(
      RemarksOn(R"(, "aio": {"queue_depth": 1024, "thread_count": 5})"),
      ElementsAre("\"aio.queue_depth\" 1024 for each of \"aio.intra_op_parallelism\" 5 is more "
                  "than 4096 requests in flight for each folder: taken as that"));
}

TEST(Remarks, PoolSizesOfTiersAreUpperLimits) {
  EXPECT_THAT(
      RemarksOn(R"(, "zero_optimization": {"sub_group_size": 1e9,
          "offload_param": {"buffer_count": 5, "buffer_size": 1e8},
          "offload_optimizer": {"buffer_count": 4}})"),
      ElementsAre(
          HasSubstr("\"zero_optimization.sub_group_size\" 1000000000 is an upper limit: elements "
                    "updated as one piece, none of which crosses a unit"),
          HasSubstr("\"zero_optimization.offload_param.buffer_count\" 5 is an upper limit"),
          HasSubstr("\"zero_optimization.offload_param.buffer_size\" 100000000 is an upper"),
          HasSubstr("\"zero_optimization.offload_optimizer.buffer_count\" 4 is an upper")));
}

// Keys that DeepSpeed takes and that change nothing here: one remark each.
class TakenWithARemark : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};
TEST_P(TakenWithARemark, IsAccepted) {
  EXPECT_THAT(RemarksOn(GetParam().first), ElementsAre(HasSubstr(GetParam().second)));
}
INSTANTIATE_TEST_SUITE_P(
    Keys, TakenWithARemark,
    ::testing::Values(
        std::pair(R"(, "prescale_gradients": true)", "needs no prescaling"),
        std::pair(R"(, "gradient_predivide_factor": 8.0)", "needs no prescaling"),
        std::pair(
            R"(, "wall_clock_breakdown": "yes")",
            "\"wall_clock_breakdown\" has no meaning here: the timeline (ebb.trace) shows it"),
        std::pair(R"(, "aio": {"use_gds": true})", "go through host memory"),
        std::pair(R"(, "aio": {"overlap_events": false})", "\"aio.overlap_events\" has no meaning"),
        std::pair(R"(, "aio": {"thread_count": 2, "intra_op_parallelism": 3})",
                  "\"aio.thread_count\" is not read beside \"aio.intra_op_parallelism\""),
        std::pair(R"(, "aio": {"intra_op_parallelism": 2, "thread_count": "auto"})",
                  "\"aio.thread_count\" is not read"),
        std::pair(R"(, "zero_optimization": {"sub_group_size": 1e30})",
                  "sub_group_size\" 9223372036854775807 is an upper limit"),
        std::pair(R"(, "zero_optimization": {"stage3_gather_fp16_weights_on_model_save": true})",
                  "Engine::Gather gives any parameter"),
        std::pair(R"(, "zero_optimization": {"leaf_module": {"classes": ["a"]}})",
                  "\"zero_optimization.leaf_module\" has no meaning here"),
        std::pair(
            R"(, "zero_optimization": {"offload_optimizer": {"pipeline_read": true}})",
            "\"zero_optimization.offload_optimizer.pipeline_read\" has no meaning here: reads "
            "and writes always run beside the update"),
        std::pair(R"(, "activation_checkpointing": {"number_checkpoints": null, "profile": true})",
                  "\"activation_checkpointing.profile\" has no meaning here"),
        std::pair(R"(, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}})",
                  "\"zero_optimization.offload_param.device\" \"cpu\" is ignored at "
                  "\"zero_optimization.stage\" 2, as in DeepSpeed"),
        std::pair(R"(, "zero_optimization": {"offload_optimizer": {"device": "cpu"}})",
                  "\"zero_optimization.offload_optimizer.device\" \"cpu\" is ignored at "
                  "\"zero_optimization.stage\" 0"),
        std::pair(R"(, "zero_optimization": {"stage": "3"})",
                  "\"zero_optimization.stage\" \"3\" is taken as 3, as DeepSpeed does"),
        std::pair(R"(, "fp16": {"enabled": "False"})", "is taken as false"),
        std::pair(R"(, "zero_optimization": {"overlap_comm": 1})", "is taken as true"),
        std::pair(R"(, "zero_optimization": {"offload_optimizer": {"device": "none",
                       "ratio": "1.0"}})",
                  "is taken as 1, as")));

TEST(Remarks, ZerosThatMeanTheDefault) {
  const Config config = Read(
      R"({"zero_optimization": {"sub_group_size": 0}, "fp16": {"enabled": true,
          "min_loss_scale": 0}, "scheduler": {"type": "WarmupLR",
          "params": {"warmup_num_steps": 0}}})");
  EXPECT_EQ(config.zero.sub_group_size, 1'000'000'000);
  EXPECT_EQ(config.loss_scale.min_scale, 1);
  EXPECT_EQ(config.scheduler.warmup_num_steps, 0);
  EXPECT_THAT(config.remarks, Contains(HasSubstr("\"fp16.min_loss_scale\" 0 is taken as 1")));
  EXPECT_THAT(config.remarks, Contains(HasSubstr("sub_group_size\" 0 is taken as the default")));
}

// A name of the user's choice is a group only if its value is one.
TEST(Remarks, CommentsAreNoParameterGroups) {
  const Config config = Read(
      R"({"ebb": {"parameter_groups": {"_comment": "x", "// note": [1], "comment": null,
                                       "_group": {"lr_factor": 0.5}}}})");
  ASSERT_EQ(config.ebb.parameter_groups.size(), 1u);
  EXPECT_EQ(config.ebb.parameter_groups.at("_group").lr_factor, 0.5);
  EXPECT_THAT(config.warnings, testing::IsEmpty());
}

TEST(Remarks, CommentsAreNoKeys) {
  const Config config = Read(
      R"({"_comment": "x", "// note": [1], "Comment": {}, "$schema": "ebb-config.schema.json",
          "zero_optimization": {"_why": 1, "//": 2, "stage": 1}, "tensorboard": {"_x": 1}})");
  EXPECT_EQ(config.zero.stage, 1);
  EXPECT_THAT(config.warnings, ElementsAre());
}

// Keys that DeepSpeed ignores silently.
TEST(Warnings, NameKeysThatAreNone) {
  const auto warnings = [](const std::string& json) { return Read(json).warnings; };
  EXPECT_THAT(warnings(R"({"job": 1})"),
              ElementsAre("\"job\" is not a key; it is ignored, as in DeepSpeed"));
  EXPECT_THAT(warnings(R"({"stage": 3})"),
              ElementsAre(HasSubstr("\"stage\" is not a key; \"zero_optimization.stage\" is: move "
                                    "it into \"zero_optimization\"; it is ignored")));
  EXPECT_THAT(warnings(R"({"split_master": true})"),
              ElementsAre(HasSubstr("\"ebb.split_master\" is: move it into \"ebb\"")));
  EXPECT_THAT(warnings(R"({"optimizer": {"type": "AdamW", "note": 1}, "aio": {"files": 3}})"),
              ElementsAre(HasSubstr("\"optimizer.note\""), HasSubstr("\"aio.files\"")));
  EXPECT_THAT(
      warnings(R"({"a\u0007b": 1, "*": 1, "": 1})"),
      ElementsAre(HasSubstr(R"("a\x07b" is not a key)"), HasSubstr("\"*\""), HasSubstr("\"\"")));
  EXPECT_THAT(warnings(R"({"optimizer": {"type": "AdamW", "weight_decay": 0.1}})"),
              ElementsAre(HasSubstr("\"optimizer.params.weight_decay\" is: move it into "
                                    "\"optimizer.params\"")));
  EXPECT_LT(warnings("{\"" + std::string(5000, 'k') + "\": 1}")[0].size(), 400u);
}

// A value that is overridden later causes no error.
TEST(Overrides, ComeBeforeTheCheck) {
  const std::string json =
      R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
                               "ebb": {"split_master": true}})";
  EXPECT_FALSE(Config::FromJson(json).ok());
  const Config config = Read(json, {.overrides = [](Config& read) {
                               read.zero.offload_param.nvme_paths = {"/disk"};
                               read.compute = DType::kBFloat16;
                             }});
  EXPECT_EQ(config.compute, DType::kBFloat16);
}

TEST(Remarks, OldFormsOfOffload) {
  EXPECT_THAT(RemarksOn(R"(, "zero_optimization": {"stage": 3, "cpu_offload": true,
                           "cpu_offload_param": true})"),
              ElementsAre("\"zero_optimization.cpu_offload\" is an old form: taken as "
                          "\"zero_optimization.offload_optimizer.device\" \"cpu\"",
                          "\"zero_optimization.cpu_offload_param\" is an old form: taken as "
                          "\"zero_optimization.offload_param.device\" \"cpu\""));
}

TEST(Remarks, NameKeysThatAnotherKeyOverrules) {
  EXPECT_THAT(RemarksOn(R"(, "zero_optimization": {"offload_optimizer": {"ratio": 0.5}})"),
              ElementsAre(HasSubstr("\"zero_optimization.offload_optimizer.ratio\" 0.5 has no "
                                    "meaning while")));
  EXPECT_THAT(RemarksOn(R"(, "zero_optimization": {"offload_optimizer": {"ratio": "auto"}})"),
              ElementsAre(HasSubstr("\"zero_optimization.offload_optimizer.ratio\" \"auto\" has no "
                                    "meaning while")));
  EXPECT_THAT(RemarksOn(R"(, "activation_checkpointing": {"cpu_checkpointing": true},
                           "ebb": {"offload_activations": "none"})"),
              ElementsAre("\"activation_checkpointing.cpu_checkpointing\" is true, but "
                          "\"ebb.offload_activations\" is given and decides: \"device\""));
}

TEST(Auto, TakesTheDefaultAndSaysSo) {
  EXPECT_THAT(RemarksOn(R"(, "zero_optimization": {"stage3_prefetch_bucket_size": "auto",
                             "reduce_bucket_size": "auto"}, "fp16": {"enabled": "auto"})"),
              ElementsAre("\"auto\" taken as the default: \"fp16.enabled\" false, "
                          "\"zero_optimization.reduce_bucket_size\" not given, "
                          "\"zero_optimization.stage3_prefetch_bucket_size\" 50000000"));
}

TEST(Auto, TheWarmUpRisesToTheOptimizersRate) {
  const Config config = Read(R"({
      "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
      "scheduler": {"type": "WarmupDecayLR",
                    "params": {"warmup_max_lr": "auto", "total_num_steps": 2000}}})");
  EXPECT_EQ(config.scheduler.warmup_max_lr, 0.02);
  EXPECT_THAT(config.remarks, Contains(HasSubstr("taken as the optimizer's rate")));
}

TEST(Auto, TakesTheDefaultsOfTierKeys) {
  EXPECT_THAT(RemarksOn(R"(, "zero_optimization": {"stage": 3, "sub_group_size": "auto",
                  "offload_param": {"device": "auto", "nvme_path": "auto"}},
                  "ebb": {"offload_gradients": "auto", "host_memory": "auto"})"),
              ElementsAre("\"auto\" taken as the default: \"ebb.host_memory\" not given, "
                          "\"ebb.offload_gradients\" not given, "
                          "\"zero_optimization.offload_param.device\" none, "
                          "\"zero_optimization.offload_param.nvme_path\" not given, "
                          "\"zero_optimization.sub_group_size\" 1000000000"));
}

// The file of Hugging Face's users: every number is left to the Trainer.
constexpr char kHuggingFace[] = R"({
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
             "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                              "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                 "warmup_num_steps": "auto"}},
    "zero_optimization": {
      "stage": 3,
      "offload_optimizer": {"device": "none", "pin_memory": true},
      "offload_param": {"device": "none", "pin_memory": true},
      "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
      "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
      "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
      "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false})";

TEST(Auto, ReadsHuggingFacesZero3File) {
  const Config config = Read(kHuggingFace);
  EXPECT_EQ(config.zero.stage, 3);
  EXPECT_EQ(config.optimizer, OptimizerConfig());
  EXPECT_EQ(config.scheduler.type, SchedulerType::kWarmup);
  EXPECT_EQ(config.scheduler.warmup_max_lr, 0.001);
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_THAT(config.remarks, Contains(AllOf(HasSubstr("\"auto\" taken as the default: "),
                                             HasSubstr("\"optimizer.params.eps\" 1e-8"),
                                             HasSubstr("\"gradient_clipping\" 1.0"))));
  EXPECT_THAT(config.remarks, Not(Contains(HasSubstr("by the trainer"))));
  // The batch size is unknown until the program sets it.
  EXPECT_THAT(std::string(config.ForWorld(2).status().message()),
              HasSubstr("in Python transformers'"));
  Config completed = config;
  completed.micro_batch_size = 4;
  EXPECT_EQ(completed.ForWorld(2)->train_batch_size, 8);
}

// Schedules that scale each group's own rate cause no remark.
TEST(Remarks, NameGroupsWithRatesThatAScheduleReplaces) {
  const auto remarks = [](const char* scheduler) {
    return RemarksOn(
        absl::StrCat(R"(, "scheduler": )", scheduler, R"(, "ebb": {"parameter_groups": {
        "head": {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}},
        "same": {"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}},
        "half": {"lr_factor": 0.5},
        "tail": {"optimizer": {"type": "SGD", "params": {"lr": 0.25}}}}})"));
  };
  const char* const replacing[] = {
      R"({"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}})",
      R"({"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}})",
      R"({"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}})",
      R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}})",
      R"({"type": "LRRangeTest"})",
  };
  for (const char* scheduler : replacing) {
    EXPECT_THAT(remarks(scheduler),
                Contains(AllOf(HasSubstr("the learning rates of the parameter groups \"head\", "
                                         "\"tail\" are replaced by those of "),
                               HasSubstr("as in DeepSpeed; \"lr_factor\" scales them"))))
        << scheduler;
  }
  const char* const scaling[] = {
      R"({})",
      R"({"type": "WarmupLR"})",
      R"({"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}})",
  };
  for (const char* scheduler : scaling)
    EXPECT_THAT(remarks(scheduler), Not(Contains(HasSubstr("are replaced")))) << scheduler;
}

constexpr TrainerValues kTrainer = {.micro_batch_size = 4,
                                    .gradient_accumulation_steps = 2,
                                    .total_steps = 700,
                                    .warmup_steps = 30,
                                    .learning_rate = 3e-4,
                                    .beta1 = 0.8,
                                    .beta2 = 0.9,
                                    .epsilon = 1e-6,
                                    .weight_decay = 0.1,
                                    .gradient_clipping = 0.5,
                                    .compute = DType::kBFloat16};

TEST(Auto, TheTrainerFillsInItsValuesWithOneRemark) {
  const Config config = Read(kHuggingFace, {.trainer = kTrainer});
  EXPECT_EQ(config.compute, DType::kBFloat16);
  EXPECT_EQ(config.micro_batch_size, 4);
  EXPECT_EQ(config.gradient_accumulation_steps, 2);
  EXPECT_EQ(config.gradient_clipping, 0.5);
  EXPECT_EQ(config.optimizer.learning_rate, 3e-4);
  EXPECT_EQ(config.optimizer.beta1, 0.8);
  EXPECT_EQ(config.optimizer.beta2, 0.9);
  EXPECT_EQ(config.optimizer.epsilon, 1e-6);
  EXPECT_EQ(config.optimizer.weight_decay, 0.1);
  EXPECT_EQ(config.scheduler.warmup_num_steps, 30);
  EXPECT_EQ(config.scheduler.warmup_max_lr, 3e-4);
  EXPECT_EQ(config.ForWorld(2)->train_batch_size, 16);
  const auto filled = [](const std::string& remark) {
    return remark.starts_with("filled in by the trainer: ");
  };
  ASSERT_EQ(std::count_if(config.remarks.begin(), config.remarks.end(), filled), 1);
  EXPECT_THAT(config.remarks, Contains(AllOf(HasSubstr("\"optimizer.params.lr\" 0.0003"),
                                             HasSubstr("\"bf16.enabled\" true"),
                                             HasSubstr("\"gradient_clipping\" 0.5"))));
}

TEST(Auto, AGivenValueIsNotReplaced) {
  const Config config = Read(
      R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto",
          "gradient_accumulation_steps": "auto", "fp16": {"enabled": true},
          "bf16": {"enabled": "auto"}, "gradient_clipping": 2,
          "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}})",
      {.trainer = kTrainer});
  EXPECT_EQ(config.compute, DType::kFloat16);
  EXPECT_EQ(config.gradient_clipping, 2);
  EXPECT_EQ(config.optimizer.learning_rate, 0.5);
  EXPECT_EQ(config.optimizer.epsilon, 1e-8);
  EXPECT_EQ(config.ForWorld(2)->micro_batch_size, 12) << "DeepSpeed's arithmetic";
}

TEST(Auto, AMissingRequiredKeyIsFilledIn) {
  const Config config = Read(
      R"({"scheduler": {"type": "WarmupCosineLR", "params": {}},
          "ebb": {"parameter_groups": {"g": {"optimizer": {"type": "SGD",
                                                           "params": {"lr": "auto"}}}}}})",
      {.trainer = kTrainer});
  EXPECT_EQ(config.micro_batch_size, 4);
  EXPECT_EQ(config.scheduler.total_num_steps, 700);
  EXPECT_EQ(config.scheduler.warmup_num_steps, 1000) << "DeepSpeed's default";
  EXPECT_EQ(config.optimizer.learning_rate, 3e-4);
  EXPECT_EQ(config.optimizer.beta2, 0.9);
  EXPECT_EQ(config.ebb.parameter_groups.at("g").optimizer->learning_rate, 3e-4);
  EXPECT_EQ(config.compute, DType::kFloat32) << "neither fp16 nor bf16 is fp32 in DeepSpeed";
  EXPECT_EQ(config.gradient_clipping, 1.0);
}

TEST(Auto, TheTrainersValuesAreCheckedLikeAFile) {
  const absl::StatusOr<Config> config =
      Config::FromJson(R"({"gradient_clipping": "auto"})", {.trainer = {.gradient_clipping = -1}});
  EXPECT_THAT(std::string(config.status().message()),
              HasSubstr("\"the trainer's gradient_clipping\" is -1; allowed: a number"));
}

}  // namespace
}  // namespace ebb::remarks_test
