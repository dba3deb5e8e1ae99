// Each key of a configuration sets its field.
#include "ebb/runtime/config/config.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "ebb/runtime/config/requests_in_flight.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ebb::config_test {
namespace {

using ::testing::HasSubstr;

Config Read(const std::string& json) {
  absl::StatusOr<Config> config = Config::FromJson(json);
  EXPECT_TRUE(config.ok()) << config.status() << "\n" << json;
  return config.ok() ? *config : Config();
}

TEST(Config, EmptyObjectIsTheDefaults) {
  Config config = Read("{}");
  config.remarks.clear();
  EXPECT_EQ(config, Config());
}

TEST(Config, ReadsTheBatchTriple) {
  const Config config = Read(R"({"train_batch_size": 5e8, "train_micro_batch_size_per_gpu": 4,
                                 "gradient_accumulation_steps": 2.0})");
  EXPECT_EQ(config.train_batch_size, 500'000'000);
  EXPECT_EQ(config.micro_batch_size, 4);
  EXPECT_EQ(config.gradient_accumulation_steps, 2);
}

TEST(Config, ReadsPrecision) {
  Config config = Read(R"({"bf16": {"enabled": true, "check_grad_overflow": false},
      "communication_data_type": "FP32", "data_types": {"grad_accum_dtype": "torch.bfloat16"}})");
  EXPECT_EQ(config.compute, DType::kBFloat16);
  EXPECT_EQ(config.communication_dtype(), DType::kFloat32);
  EXPECT_EQ(config.accumulation, DType::kBFloat16);
  EXPECT_FALSE(config.bf16_check_grad_overflow);

  config = Read(R"({"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12,
      "loss_scale_window": 100, "hysteresis": 3, "consecutive_hysteresis": true,
      "min_loss_scale": 0.5}, "bf16": {"enabled": false}})");
  EXPECT_EQ(config.compute, DType::kFloat16);
  EXPECT_EQ(config.communication_dtype(), DType::kFloat16);
  EXPECT_EQ(config.accumulation, DType::kFloat32);
  const LossScaleConfig expected = {.static_scale = 0,
                                    .initial_scale_power = 12,
                                    .window = 100,
                                    .hysteresis = 3,
                                    .consecutive_hysteresis = true,
                                    .min_scale = 0.5};
  EXPECT_EQ(config.loss_scale, expected);
  EXPECT_EQ(Read(R"({"fp16": {"enabled": true, "loss_scale": 128}})").loss_scale.static_scale, 128);
  EXPECT_EQ(Read(R"({"bfloat16": {"enabled": true}})").compute, DType::kBFloat16);
  EXPECT_EQ(Read(R"({"data_types": {"param_dtype": "half"}, "fp16": {"enabled": true}})").compute,
            DType::kFloat16);
}

TEST(Config, KnowsWhenOverflowIsChecked) {
  const auto checks = [](const std::string& json) { return Read(json).checks_overflow(); };
  EXPECT_TRUE(checks("{}"));
  EXPECT_FALSE(checks(R"({"ebb": {"check_overflow": false}})"));
  EXPECT_TRUE(checks(R"({"bf16": {"enabled": true}})"));
  EXPECT_FALSE(checks(R"({"bf16": {"enabled": true, "check_grad_overflow": false}})"));
  EXPECT_FALSE(checks(R"({"bf16": {"enabled": true}, "ebb": {"check_overflow": false}})"));
  EXPECT_TRUE(checks(R"({"fp16": {"enabled": true}, "ebb": {"check_overflow": false}})"));
  EXPECT_TRUE(checks(R"({"bf16": {"check_grad_overflow": false}})")) << "bf16's switch is bf16's";
}

TEST(Config, ReadsOptimizers) {
  const auto optimizer = [](const std::string& json) {
    return Read("{\"optimizer\": " + json + "}").optimizer;
  };
  OptimizerConfig expected = {.type = OptimizerType::kAdamW,
                              .learning_rate = 3e-4,
                              .beta1 = 0.8,
                              .beta2 = 0.95,
                              .epsilon = 1e-6,
                              .weight_decay = 0.1,
                              .bias_correction = false};
  EXPECT_EQ(optimizer(R"({"type": "adamw", "params": {"lr": 3e-4, "betas": [0.8, 0.95],
                          "eps": 1e-6, "weight_decay": 0.1, "bias_correction": false}})"),
            expected);
  expected = {.type = OptimizerType::kAdam, .decoupled_weight_decay = false};
  EXPECT_EQ(optimizer(R"({"type": "Adam", "params": {"adam_w_mode": false}})"), expected);
  EXPECT_TRUE(optimizer(R"({"type": "ADAM"})").decoupled_weight_decay);
  EXPECT_TRUE(
      optimizer(R"({"type": "AdamW", "params": {"adam_w_mode": false}})").decoupled_weight_decay);
  expected = {.type = OptimizerType::kSgd,
              .learning_rate = 0.1,
              .weight_decay = 1e-4,
              .momentum = 0.9,
              .nesterov = true};
  EXPECT_EQ(optimizer(R"({"params": {"lr": 0.1, "momentum": 0.9, "nesterov": true,
                          "weight_decay": 1e-4, "dampening": 0}, "type": "SGD"})"),
            expected);
  expected = {.type = OptimizerType::kRmsprop,
              .learning_rate = 0.1,
              .epsilon = 1e-6,
              .momentum = 0.5,
              .alpha = 0.9,
              .centered = true};
  EXPECT_EQ(optimizer(R"({"type": "RMSprop", "params": {"lr": 0.1, "alpha": 0.9, "eps": 1e-6,
                          "momentum": 0.5, "centered": true}})"),
            expected);
  expected = {.type = OptimizerType::kAdagrad,
              .learning_rate = 0.1,
              .epsilon = 1e-6,
              .weight_decay = 0.25,
              .lr_decay = 0.5,
              .initial_accumulator_value = 2};
  EXPECT_EQ(optimizer(R"({"type": "Adagrad", "params": {"lr": 0.1, "lr_decay": 0.5, "eps": 1e-6,
                          "initial_accumulator_value": 2, "weight_decay": 0.25}})"),
            expected);
  expected = {.type = OptimizerType::kLamb,
              .learning_rate = 2e-3,
              .beta1 = 0.8,
              .beta2 = 0.99,
              .epsilon = 1e-6,
              .weight_decay = 0.01,
              .bias_correction = false,
              .max_coefficient = 0.3,
              .min_coefficient = 0.02,
              .epsilon_inside_root = true};
  EXPECT_EQ(optimizer(R"({"type": "Lamb", "params": {"lr": 2e-3, "betas": [0.8, 0.99], "eps": 1e-6,
                          "weight_decay": 0.01, "bias_correction": false, "max_coeff": 0.3,
                          "min_coeff": 0.02, "eps_inside_sqrt": true, "amsgrad": false}})"),
            expected);
  expected = {.type = OptimizerType::kLars,
              .learning_rate = 4,
              .epsilon = 1e-9,
              .weight_decay = 1e-4,
              .momentum = 0.9,
              .nesterov = true,
              .trust_coefficient = 0.02};
  EXPECT_EQ(optimizer(R"({"type": "LARS", "params": {"lr": 4, "momentum": 0.9, "nesterov": true,
                          "weight_decay": 1e-4, "eps": 1e-9, "trust_coefficient": 0.02}})"),
            expected);
  expected = {.type = OptimizerType::kMuon,
              .learning_rate = 0.03,
              .beta1 = 0.8,
              .beta2 = 0.9,
              .epsilon = 1e-9,
              .weight_decay = 0.1,
              .momentum = 0.9,
              .nesterov = false,
              .adam_learning_rate = 2e-3,
              .newton_schulz_steps = 3,
              .newton_schulz_coefficients = {2, -1.5, 0.5},
              .newton_schulz_dtype = DType::kFloat32,
              .matches_adamw_size = true};
  EXPECT_EQ(optimizer(R"({"type": "Muon", "params": {"lr": 2e-3, "muon_lr": 0.03, "momentum": 0.9,
                          "nesterov": false, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-9,
                          "ns_steps": 3, "ns_coefficients": [2, -1.5, 0.5], "ns_dtype": "fp32",
                          "adjust_lr_fn": "match_rms_adamw"}})"),
            expected);
  EXPECT_EQ(
      optimizer(R"({"type": "Muon", "params": {"lr": 2e-3, "adam_lr": 0.5}})").adam_learning_rate,
      0.5);
  EXPECT_EQ(optimizer("{}"), OptimizerConfig());
  EXPECT_EQ(optimizer("null"), OptimizerConfig());
}

// PyTorch's defaults; Lion's are DeepSpeed's.
TEST(Config, EachOptimizerHasItsOwnDefaults) {
  const auto optimizer = [](const std::string& type) {
    return Read(R"({"optimizer": {"type": ")" + type + R"("}, "ebb": {"parameter_groups": {
        "g": {"optimizer": {"type": ")" +
                type + R"("}}}}})");
  };
  const std::pair<const char*, OptimizerConfig> defaults[] = {
      {"Lion", {.type = OptimizerType::kLion, .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999}},
      {"Adagrad", {.type = OptimizerType::kAdagrad, .learning_rate = 1e-2, .epsilon = 1e-10}},
      {"RMSprop",
       {.type = OptimizerType::kRmsprop, .learning_rate = 1e-2, .epsilon = 1e-8, .alpha = 0.99}},
      {"SGD", {.type = OptimizerType::kSgd, .learning_rate = 1e-3}},
      {"Lamb",
       {.type = OptimizerType::kLamb,
        .learning_rate = 1e-3,
        .beta1 = 0.9,
        .beta2 = 0.999,
        .epsilon = 1e-8,
        .max_coefficient = 10,
        .min_coefficient = 0.01}},
      {"Lars",
       {.type = OptimizerType::kLars,
        .learning_rate = 1e-3,
        .epsilon = 1e-8,
        .trust_coefficient = 1e-3}},
      {"Muon",
       {.type = OptimizerType::kMuon,
        .learning_rate = 1e-3,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .epsilon = 1e-10,
        .momentum = 0.95,
        .nesterov = true}},
  };
  for (const auto& [type, expected] : defaults) {
    EXPECT_EQ(optimizer(type).optimizer, expected) << type;
    EXPECT_EQ(optimizer(type).ebb.parameter_groups.at("g").optimizer, expected) << type;
  }
}

// If the trainer knows no value, the key counts as missing.
TEST(Config, AutoIsEachOptimizersOwnDefault) {
  const auto read = [](const std::string& type) {
    return Read(R"({"optimizer": {"type": ")" + type +
                R"(", "params": {"lr": "auto", "eps": "auto", "weight_decay": "auto"}}})");
  };
  const Config adagrad = read("Adagrad"), rmsprop = read("RMSprop"), adam = read("AdamW");
  EXPECT_EQ(
      adagrad.optimizer,
      (OptimizerConfig{.type = OptimizerType::kAdagrad, .learning_rate = 1e-2, .epsilon = 1e-10}));
  EXPECT_EQ(rmsprop.optimizer,
            (OptimizerConfig{.type = OptimizerType::kRmsprop, .learning_rate = 1e-2}));
  EXPECT_EQ(adam.optimizer, OptimizerConfig());
  const auto says = [](const Config& config, const std::string& what) {
    return std::any_of(
        config.remarks.begin(), config.remarks.end(),
        [&](const std::string& remark) { return remark.find(what) != std::string::npos; });
  };
  EXPECT_TRUE(says(adagrad, "\"optimizer.params.lr\" 0.01")) << adagrad.remarks.front();
  EXPECT_TRUE(says(adagrad, "\"optimizer.params.eps\" 1e-10"));
  EXPECT_TRUE(says(rmsprop, "\"optimizer.params.lr\" 0.01"));
  EXPECT_TRUE(says(rmsprop, "\"optimizer.params.eps\" 1e-8"));
  EXPECT_TRUE(says(adam, "\"optimizer.params.lr\" 0.001"));
}

TEST(Config, ReadsSchedulers) {
  const auto scheduler = [](const std::string& type, const std::string& params) {
    return Read(R"({"scheduler": {"type": ")" + type + R"(", "params": )" + params + "}}")
        .scheduler;
  };
  SchedulerConfig expected = {.type = SchedulerType::kWarmup,
                              .warmup_min_lr = 1e-5,
                              .warmup_max_lr = 1e-3,
                              .warmup_num_steps = 10,
                              .warmup_log = false};
  EXPECT_EQ(scheduler("WarmupLR", R"({"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3,
                                      "warmup_num_steps": 10, "warmup_type": "linear"})"),
            expected);
  expected = {.type = SchedulerType::kWarmupDecay, .total_num_steps = 5000};
  EXPECT_EQ(scheduler("WarmupDecayLR", R"({"total_num_steps": 5e3, "warmup_max_lr": null})"),
            expected);
  expected = {.type = SchedulerType::kWarmupCosine,
              .warmup_num_steps = 20,
              .total_num_steps = 200,
              .warmup_min_ratio = 0.1,
              .cos_min_ratio = 0.2};
  EXPECT_EQ(scheduler("WarmupCosineLR", R"({"total_num_steps": 200, "warmup_num_steps": 20,
                                            "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2})"),
            expected);
  expected = {.type = SchedulerType::kOneCycle,
              .cycle_min_lr = 1e-4,
              .cycle_max_lr = 1e-2,
              .decay_lr_rate = 0.1,
              .cycle_first_step_size = 100,
              .cycle_second_step_size = 50,
              .cycle_first_stair_count = 4,
              .cycle_second_stair_count = 2,
              .decay_step_size = 10,
              .cycle_momentum = false,
              .cycle_min_mom = 0.7,
              .cycle_max_mom = 0.95,
              .decay_mom_rate = 0.2};
  EXPECT_EQ(scheduler("OneCycle", R"({"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2,
                "decay_lr_rate": 0.1, "cycle_first_step_size": 100, "cycle_second_step_size": 50,
                "cycle_first_stair_count": 4, "cycle_second_stair_count": 2, "decay_step_size": 10,
                "cycle_momentum": false, "cycle_min_mom": 0.7, "cycle_max_mom": 0.95,
                "decay_mom_rate": 0.2})"),
            expected);
  expected = {.type = SchedulerType::kLrRangeTest,
              .lr_range_test_min_lr = 1e-6,
              .lr_range_test_step_rate = 5,
              .lr_range_test_step_size = 10,
              .lr_range_test_staircase = true};
  EXPECT_EQ(
      scheduler("LRRangeTest", R"({"lr_range_test_min_lr": 1e-6, "lr_range_test_step_size": 10,
                "lr_range_test_step_rate": 5, "lr_range_test_staircase": true,
                "last_batch_iteration": -1})"),
      expected);
}

TEST(Config, ReadsZeroOptimization) {
  const auto zero = [](const std::string& json) {
    return Read("{\"zero_optimization\": " + json + "}").zero;
  };
  ZeroConfig expected = {.stage = 3,
                         .overlap_comm = false,
                         .reduce_bucket_size = 500'000'000,
                         .allgather_bucket_size = 7,
                         .prefetch_bucket_size = 1,
                         .param_persistence_threshold = 2,
                         .model_persistence_threshold = 3,
                         .max_live_parameters = 4,
                         .max_reuse_distance = 5};
  EXPECT_EQ(zero(R"({"stage": 3, "overlap_comm": false, "reduce_bucket_size": 5e8,
                     "allgather_bucket_size": 7, "stage3_prefetch_bucket_size": 1,
                     "stage3_param_persistence_threshold": 2,
                     "stage3_model_persistence_threshold": 3, "stage3_max_live_parameters": 4,
                     "stage3_max_reuse_distance": 5})"),
            expected);
  // DeepSpeed also takes the names of its own fields.
  EXPECT_EQ(zero(R"({"stage": 3, "overlap_comm": false, "reduce_bucket_size": 5e8,
                     "allgather_bucket_size": 7, "prefetch_bucket_size": 1,
                     "param_persistence_threshold": 2, "model_persistence_threshold": 3,
                     "max_live_parameters": 4, "max_reuse_distance": 5})"),
            expected);
  EXPECT_EQ(zero("true").stage, 1);
  EXPECT_EQ(zero("false").stage, 0);
  EXPECT_EQ(zero(R"({"stage3_model_persistence_threshold": 9223372036854775807})")
                .model_persistence_threshold,
            INT64_MAX);
}

TEST(Config, ReadsOwnKeys) {
  const EbbConfig ebb = Read(R"({"ebb": {"reduce_at": "step", "micro_batches_per_round": "all",
      "asynchronous_step": "late", "check_overflow": false, "prefetch_depth": "all",
      "coalesce": "4MiB", "reshard_after_forward": false, "reduction_group": 2,
      "timeout_seconds": 0.5, "trace": "run.json", "deterministic_reduce": true,
      "register_buffers": false,
      "parameter_groups": {"head": {"lr_factor": 0.5, "weight_decay": 0},
                           "a.b": {"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}},
                           "rest": {}}}})")
                            .ebb;
  EXPECT_EQ(ebb.reduce_at, ReduceAt::kStep);
  EXPECT_EQ(ebb.micro_batches_per_round, 0);
  EXPECT_EQ(ebb.asynchronous_step, AsynchronousStep::kLate);
  EXPECT_FALSE(ebb.check_overflow);
  EXPECT_EQ(ebb.prefetch_depth, INT64_MAX);
  EXPECT_EQ(ebb.coalesce_bytes, 4 << 20);
  EXPECT_FALSE(ebb.reshard_after_forward);
  EXPECT_EQ(ebb.reduction_group, 2);
  EXPECT_EQ(ebb.timeout_seconds, 0.5);
  EXPECT_EQ(ebb.trace, "run.json");
  EXPECT_TRUE(ebb.deterministic_reduce);
  EXPECT_FALSE(ebb.register_buffers);
  ASSERT_EQ(ebb.parameter_groups.size(), 3u);
  EXPECT_EQ(ebb.parameter_groups.at("head"),
            (ParameterGroupConfig{.lr_factor = 0.5, .weight_decay = 0}));
  EXPECT_EQ(ebb.parameter_groups.at("a.b").optimizer,
            (OptimizerConfig{.type = OptimizerType::kSgd, .momentum = 0.5}));
  EXPECT_EQ(ebb.parameter_groups.at("rest"), ParameterGroupConfig());
}

TEST(Config, ReadsTiers) {
  const Config config = Read(R"({"bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
      "sub_group_size": 1e8,
      "offload_param": {"device": "NVMe", "nvme_path": "/disk", "buffer_count": 2,
                        "buffer_size": 1e6, "max_in_cpu": 0, "pin_memory": false},
      "offload_optimizer": {"device": "cpu", "nvme_path": ["/a", "/b"], "buffer_count": 3,
                            "pin_memory": false, "pipeline_read": true, "pipeline_write": true,
                            "fast_init": true, "ratio": 0.25}},
      "aio": {"block_size": 65536, "queue_depth": 32, "thread_count": 4, "single_submit": true,
              "overlap_events": false},
      "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true},
      "ebb": {"offload_gradients": "none", "offload_activations": "nvme", "host_memory": "64MiB",
              "device_memory": "2 GB", "split_master": true, "verify_swap": "all",
              "io_backend": "io_uring"}})");
  EXPECT_EQ(config.zero.sub_group_size, 100'000'000);
  EXPECT_EQ(config.zero.offload_param, (OffloadParamConfig{.device = Tier::kNvme,
                                                           .nvme_paths = {"/disk"},
                                                           .buffer_count = 2,
                                                           .buffer_size = 1'000'000,
                                                           .max_in_cpu = 0,
                                                           .pin_memory = false}));
  EXPECT_EQ(config.zero.offload_optimizer, (OffloadOptimizerConfig{.device = Tier::kCpu,
                                                                   .nvme_paths = {"/a", "/b"},
                                                                   .buffer_count = 3,
                                                                   .pin_memory = false,
                                                                   .ratio = 0.25}));
  EXPECT_EQ(config.aio, (AioConfig{.block_size = 65536,
                                   .queue_depth = 32,
                                   .intra_op_parallelism = 4,
                                   .single_submit = true}));
  EXPECT_TRUE(config.activation_checkpointing.cpu_checkpointing);
  EXPECT_EQ(config.ebb.offload_gradients, Tier::kDevice);
  EXPECT_EQ(config.ebb.offload_activations, Tier::kNvme);
  EXPECT_EQ(config.ebb.host_memory, 64 << 20);
  EXPECT_EQ(config.ebb.device_memory, 2'000'000'000);
  EXPECT_TRUE(config.ebb.split_master);
  EXPECT_FALSE(config.ebb.stochastic_rounding);
  EXPECT_TRUE(Read(R"({"bf16": {"enabled": true}, "ebb": {"stochastic_rounding": true}})")
                  .ebb.stochastic_rounding);
  EXPECT_EQ(config.ebb.verify_swap, VerifySwap::kAll);
  EXPECT_EQ(config.ebb.io_backend, IoBackend::kUring);
  EXPECT_EQ(Read(R"({"aio": {"intra_op_parallelism": 3}})").aio.intra_op_parallelism, 3);
  for (const char* both : {R"({"aio": {"thread_count": 3, "intra_op_parallelism": 3}})",
                           R"({"aio": {"intra_op_parallelism": 3, "thread_count": 3}})"})
    EXPECT_EQ(Read(both).aio.intra_op_parallelism, 3);
  EXPECT_EQ(Read(R"({"aio": {"thread_count": "auto", "intra_op_parallelism": "auto"}})").aio,
            AioConfig());
  EXPECT_EQ(RequestsInFlight(Read("{}").aio), 32);
  EXPECT_EQ(RequestsInFlight(Read(R"({"aio": {"queue_depth": 16, "thread_count": 3}})").aio), 48);
  EXPECT_EQ(RequestsInFlight(Read(R"({"aio": {"queue_depth": 4096, "thread_count": 64}})").aio),
            4096);
}

TEST(Config, KnowsTheTierOfEachClass) {
  struct Tiers {
    Tier parameter{}, optimizer{}, gradient{}, activation{};
    bool uses_nvme = false;
    bool operator==(const Tiers&) const = default;
  };
  const auto tiers = [](const std::string& json) {
    const Config config = Read(json);
    return Tiers{config.parameter_tier(), config.optimizer_tier(), config.gradient_tier(),
                 config.activation_tier(), config.uses_nvme()};
  };
  using enum Tier;
  EXPECT_EQ(tiers("{}"), Tiers());
  EXPECT_EQ(tiers(R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})"),
            (Tiers{kCpu, kDevice, kDevice, kDevice}));
  EXPECT_EQ(tiers(R"({"zero_optimization": {"stage": 1, "offload_optimizer":
                      {"device": "nvme", "nvme_path": "/x"}}})"),
            (Tiers{kDevice, kNvme, kCpu, kDevice, true}));
  EXPECT_EQ(tiers(R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                      "ebb": {"offload_gradients": "device"}})"),
            (Tiers{kDevice, kCpu, kDevice, kDevice}));
  EXPECT_EQ(tiers(R"({"zero_optimization": {"stage": 2, "offload_param": {"nvme_path": "/x"}},
                      "ebb": {"offload_gradients": "nvme"}})"),
            (Tiers{kDevice, kDevice, kNvme, kDevice, true}));
  EXPECT_EQ(tiers(R"({"activation_checkpointing": {"cpu_checkpointing": true}})"),
            (Tiers{kDevice, kDevice, kDevice, kCpu}));
  EXPECT_EQ(tiers(R"({"activation_checkpointing": {"cpu_checkpointing": true},
                      "zero_optimization": {"offload_optimizer": {"nvme_path": "/x"}},
                      "ebb": {"offload_activations": "nvme"}})"),
            (Tiers{kDevice, kDevice, kDevice, kNvme, true}));
  EXPECT_EQ(tiers(R"({"zero_optimization": {"stage": 3, "cpu_offload": true,
                      "cpu_offload_param": true}})"),
            (Tiers{kCpu, kCpu, kCpu, kDevice}));
  // A program set it without validating: the stage decides, as in the plan.
  Config config;
  config.zero.offload_param.device = config.zero.offload_optimizer.device = kNvme;
  EXPECT_EQ(config.parameter_tier(), kDevice);
  EXPECT_EQ(config.optimizer_tier(), kDevice);
  EXPECT_FALSE(config.uses_nvme());
}

TEST(Config, GroupsWithNamesLikePathsStayApart) {
  const EbbConfig ebb = Read(R"({"ebb": {"parameter_groups": {
      "x": {"optimizer": {"type": "SGD", "params": {"weight_decay": 0.5}}},
      "x.optimizer.params": {"weight_decay": 0.25}, "*": {"weight_decay": 0.125}}}})")
                            .ebb;
  EXPECT_EQ(ebb.parameter_groups.at("x").optimizer->weight_decay, 0.5);
  EXPECT_EQ(ebb.parameter_groups.at("x.optimizer.params").weight_decay, 0.25);
  EXPECT_EQ(ebb.parameter_groups.at("*").weight_decay, 0.125);
}

TEST(Config, ReadsBytesWithUnits) {
  const auto coalesce = [](const std::string& json) {
    return Read("{\"ebb\": {\"coalesce\": " + json + "}}").ebb.coalesce_bytes;
  };
  EXPECT_EQ(coalesce("1048576"), 1 << 20);
  EXPECT_EQ(coalesce("1e6"), 1'000'000);
  EXPECT_EQ(coalesce("0"), 0);
  EXPECT_EQ(coalesce(R"("64 KiB")"), 65536);
  EXPECT_EQ(coalesce(R"("1.5GiB")"), int64_t{3} << 29);
  EXPECT_EQ(coalesce(R"("0.25 MB")"), 250000);
  EXPECT_EQ(coalesce(R"("0.0001 kb")"), 0);
  EXPECT_EQ(coalesce(R"("2gib")"), int64_t{2} << 30);
  EXPECT_EQ(coalesce(R"("3MB")"), 3'000'000);
  EXPECT_EQ(coalesce(R"("512")"), 512);
  EXPECT_EQ(coalesce(R"("512 B")"), 512);
  EXPECT_EQ(coalesce(R"("auto")"), std::nullopt);
  EXPECT_TRUE(Read(R"({"ebb": {"coalesce": "auto"}})").ebb.measures_coalesce);
  EXPECT_FALSE(Read(R"({"ebb": {"coalesce": "0"}})").ebb.measures_coalesce);
  EXPECT_FALSE(Read("{}").ebb.measures_coalesce);
}

TEST(Config, TheRatioIsANumberOrAuto) {
  const auto ratio = [](const std::string& json) {
    return Read(R"({"zero_optimization": {"stage": 1, "offload_optimizer":
                 {"device": "cpu", "ratio": )" +
                json + "}}}")
        .zero.offload_optimizer;
  };
  EXPECT_TRUE(ratio(R"("auto")").measures_ratio);
  EXPECT_TRUE(ratio(R"("AUTO")").measures_ratio);
  EXPECT_EQ(ratio(R"("auto")").ratio, 1);
  EXPECT_FALSE(ratio("0.25").measures_ratio);
  EXPECT_EQ(ratio("0.25").ratio, 0.25);
  EXPECT_FALSE(ratio("null").measures_ratio);
  EXPECT_EQ(ratio("null").ratio, 1);
}

TEST(Config, NullCountsAsNotGiven) {
  Config config = Read(R"({"train_batch_size": null, "zero_optimization": {"stage": null,
      "offload_param": null, "overlap_comm": null}, "scheduler": null, "communication_data_type": null,
      "ebb": {"parameter_groups": {"g": null}}})");
  config.remarks.clear();
  EXPECT_EQ(config, Config());
}

TEST(Config, TensorRanksHaveDeepSpeedsNameToo) {
  const auto tensor = [](const std::string& json) { return Read(json).ebb.mesh.tensor; };
  EXPECT_EQ(tensor(R"({"tensor_parallel": {"autotp_size": 2}})"), 2);
  EXPECT_EQ(tensor(R"({"tensor_parallel": {"autotp_size": 0}})"), 1);
  EXPECT_EQ(tensor(R"({"tensor_parallel": {"autotp_size": 2}, "ebb": {"mesh": {"tensor": 2}}})"),
            2);
}

}  // namespace
}  // namespace ebb::config_test
