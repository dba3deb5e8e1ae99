#include "command_line/options.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "command_line/configuration.h"
#include "ebb/runtime/device/thread_team.h"
#include "gmock/gmock.h"
#include "scratch_files.h"

namespace ebb::gpt::options_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

CommandLine Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "gpt");
  return ParseCommandLine(static_cast<int>(arguments.size()), arguments.data());
}

// `json`: the contents of the file of --config; null: there is none.
absl::StatusOr<Config> Resolve(std::vector<const char*> arguments, const char* json = nullptr) {
  ScratchFiles files;
  const std::string path = files.Path("config.json");
  if (json != nullptr) {
    files.Write("config.json", json);
    arguments.insert(arguments.end(), {"--config", path.c_str()});
  }
  return ResolveConfig(*Parse(std::move(arguments)).options);
}

Config Resolved(const std::vector<const char*>& arguments, const char* json = nullptr) {
  const auto config = Resolve(arguments, json);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : Config();
}

// The message of the error; empty: there is none.
std::string Refusal(const std::vector<const char*>& arguments, const char* json = nullptr) {
  return std::string(Resolve(arguments, json).status().message());
}

TEST(OptionsTest, DefaultsTrainTheQuickstartsModel) {
  const CommandLine command = Parse({});
  ASSERT_TRUE(command.options.has_value());
  EXPECT_FALSE(command.options->steps_given);
  EXPECT_EQ(command.options->ranks, 2);
  const auto config = ResolveConfig(*command.options);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->zero.stage, 3);
  EXPECT_EQ(config->compute, DType::kBFloat16);
  EXPECT_EQ(config->train_batch_size, config->micro_batch_size * command.options->ranks);
}

TEST(OptionsTest, DataTakesSeveralFilesAndMayBeRepeated) {
  const CommandLine command = Parse({"--data", "a", "b", "--data", "c", "--steps", "4"});
  ASSERT_TRUE(command.options.has_value()) << command.text;
  EXPECT_THAT(command.options->data, testing::ElementsAre("a", "b", "c"));
  EXPECT_EQ(command.options->steps, 4);
  EXPECT_TRUE(command.options->steps_given);
}

TEST(OptionsTest, TheLaterOfTwoEqualOptionsCounts) {
  const CommandLine command =
      Parse({"--ranks", "2", "--dtype", "bf16", "--losses", "a", "--recompute", "--ranks", "4",
             "--dtype", "fp32", "--losses", "b", "--recompute"});
  ASSERT_TRUE(command.options.has_value()) << command.text;
  EXPECT_EQ(command.options->ranks, 4);
  EXPECT_EQ(command.options->dtype, DType::kFloat32);
  EXPECT_EQ(command.options->losses_file, "b");
  EXPECT_TRUE(command.options->recompute);
}

TEST(OptionsTest, CudaGraphsAreOnOffOrChosenAndProductsMeasuredDefaultOrLetters) {
  EXPECT_EQ(Parse({}).options->cuda_graphs, CudaGraphs::kAuto);
  EXPECT_EQ(Parse({"--cuda-graphs", "on"}).options->cuda_graphs, CudaGraphs::kOn);
  EXPECT_EQ(Parse({"--cuda-graphs", "off"}).options->cuda_graphs, CudaGraphs::kOff);
  EXPECT_EQ(Parse({"--cuda-graphs", "on", "--cuda-graphs", "auto"}).options->cuda_graphs,
            CudaGraphs::kAuto);
  EXPECT_EQ(Parse({}).options->products, kMeasuredProducts);
  for (const char* products : {"auto", "default", "aBcD"})
    EXPECT_EQ(Parse({"--products", products}).options->products, products);
}

TEST(OptionsTest, SeedsAreAllNumbersOf64Bits) {
  EXPECT_EQ(Parse({"--seed", "0"}).options->seed, 0u);
  EXPECT_EQ(Parse({"--seed", "010"}).options->seed, 10u);
  EXPECT_EQ(Parse({"--seed", "18446744073709551615"}).options->seed, ~uint64_t{0});
}

TEST(OptionsTest, FlagsOverrideTheConfiguration) {
  const char* const json = R"({
    "train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
    "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}})";
  const Config from_file = Resolved({}, json);
  EXPECT_EQ(from_file.zero.stage, 1);
  EXPECT_EQ(from_file.compute, DType::kFloat16);

  const Config overridden =
      Resolved({"--stage", "2", "--dtype", "fp32", "--batch", "5", "--ranks", "4"}, json);
  EXPECT_EQ(overridden.zero.stage, 2);
  EXPECT_EQ(overridden.compute, DType::kFloat32);
  EXPECT_EQ(overridden.micro_batch_size, 5);
  EXPECT_EQ(overridden.gradient_accumulation_steps, 3);
  EXPECT_EQ(overridden.train_batch_size, 5 * 3 * 4);
}

TEST(OptionsTest, OffloadFlagsOverrideTheConfiguration) {
  const char* const json = R"({
    "train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
    "bf16": {"enabled": true},
    "zero_optimization": {"stage": 3,
      "offload_param": {"device": "cpu", "nvme_path": "/a", "max_in_cpu": 7},
      "offload_optimizer": {"device": "nvme", "nvme_path": "/b", "ratio": 0.5}},
    "ebb": {"device_memory": "1GiB"}})";
  const Config plain = Resolved({}, json);
  EXPECT_EQ(plain.zero.offload_param.device, Tier::kCpu);
  EXPECT_EQ(plain.zero.offload_optimizer.device, Tier::kNvme);
  EXPECT_EQ(plain.ebb.device_memory, int64_t{1} << 30);
  EXPECT_FALSE(plain.ebb.host_memory.has_value());

  const Config flags =
      Resolved({"--offload-param", "nvme", "--offload-optimizer", "cpu", "--nvme-path", "/c,/d",
                "--nvme-path", "/e", "--device-memory", "64MiB", "--host-memory", "1.5GiB",
                "--split-master", "--accumulate", "4", "--micro-batches-per-round", "2"},
               json);
  EXPECT_EQ(flags.zero.offload_param.device, Tier::kNvme);
  EXPECT_EQ(flags.zero.offload_param.max_in_cpu, 7);
  EXPECT_THAT(flags.zero.offload_param.nvme_paths, testing::ElementsAre("/c", "/d", "/e"));
  EXPECT_EQ(flags.zero.offload_optimizer.device, Tier::kCpu);
  EXPECT_EQ(flags.zero.offload_optimizer.nvme_paths, flags.zero.offload_param.nvme_paths);
  EXPECT_EQ(flags.zero.offload_optimizer.ratio, 0.5);
  EXPECT_EQ(flags.ebb.device_memory, int64_t{64} << 20);
  EXPECT_EQ(flags.ebb.host_memory, int64_t{3} << 29);
  EXPECT_TRUE(flags.ebb.split_master);
  EXPECT_EQ(flags.gradient_accumulation_steps, 4);
  EXPECT_EQ(flags.micro_batch_size, 2);
  EXPECT_EQ(flags.train_batch_size, 2 * 4 * 2);
  EXPECT_EQ(flags.ebb.micro_batches_per_round, 2);

  const Config none = Resolved({"--offload-param", "none", "--offload-optimizer", "none"}, json);
  EXPECT_FALSE(none.uses_nvme());
}

TEST(OptionsTest, WithoutAConfigurationOffloadedParametersAreAllOnNvme) {
  const Config config = Resolved({"--offload-param", "nvme", "--nvme-path", "/a", "--accumulate",
                                  "3", "--micro-batches-per-round", "all"});
  EXPECT_EQ(config.zero.offload_param.max_in_cpu, 0);
  EXPECT_EQ(config.gradient_accumulation_steps, 3);
  EXPECT_EQ(config.ebb.micro_batches_per_round, 3);
}

TEST(OptionsTest, StochasticRoundingIsAskedForInBf16) {
  const Config config = Resolved({"--stochastic-rounding", "--dtype", "bf16"});
  EXPECT_TRUE(config.ebb.stochastic_rounding);
  EXPECT_FALSE(config.ebb.split_master);
}

TEST(OptionsTest, APlanIsShownInTablesOrWithItsOperations) {
  EXPECT_EQ(Parse({}).options->show_plan, ShowPlan::kNo);
  EXPECT_FALSE(Parse({}).options->PlansOnly());
  for (const auto& [given, shown] : {std::pair("--show-plan", ShowPlan::kTables),
                                     std::pair("--show-plan=tables", ShowPlan::kTables),
                                     std::pair("--show-plan=operations", ShowPlan::kOperations)}) {
    const CommandLine command = Parse({given, "--ranks", "3"});
    ASSERT_TRUE(command.options.has_value()) << command.text;
    EXPECT_EQ(command.options->show_plan, shown) << given;
    EXPECT_EQ(command.options->ranks, 3);
    EXPECT_TRUE(command.options->PlansOnly());
    EXPECT_FALSE(Parse({given, "--steps", "3"}).options->PlansOnly());
  }
  EXPECT_TRUE(Parse({"--predict", "--steps", "3"}).options->PlansOnly());
  // Files that are not written need no folder.
  EXPECT_EQ(Refusal({"--show-plan", "--offload-param", "nvme"}), "");
}

TEST(OptionsTest, TheVersionIsPrinted) {
  const CommandLine command = Parse({"--version"});
  EXPECT_FALSE(command.options.has_value());
  EXPECT_EQ(command.exit_code, 0);
  EXPECT_THAT(command.text, testing::MatchesRegex("gpt [0-9]+\\.[0-9]+\\.[0-9]+ \\(Ebb\\)\n"));
}

TEST(OptionsTest, HelpExitsWithZero) {
  const CommandLine command = Parse({"--help"});
  EXPECT_FALSE(command.options.has_value());
  EXPECT_EQ(command.exit_code, 0);
  for (const std::string& flag : std::vector<std::string>(absl::StrSplit(
           "--config --data --layers --heads --width --context --vocabulary --steps --lr "
           "--warmup --version --predict --seed --stage --ranks --losses --trace --show-plan "
           "--summary --accumulate --micro-batches-per-round --offload-param --offload-optimizer "
           "--nvme-path --device-memory --host-memory --split-master",
           ' ')))
    EXPECT_THAT(command.text, HasSubstr(flag));
  for (const char* fallback : {"(default: 400)", "(default: 0.0008, or the configuration's)",
                               "(default: 3, or the configuration's)", "Without --config, and"})
    EXPECT_THAT(command.text, HasSubstr(fallback));
}

// The words of wrong command lines, and of those that their configuration refuses.
TEST(OptionsTest, MistakesAreNamed) {
  const auto expect = [](const std::vector<const char*>& arguments, const std::string& named) {
    const CommandLine command = Parse(arguments);
    EXPECT_FALSE(command.options.has_value()) << named;
    EXPECT_EQ(command.exit_code, 2);
    EXPECT_THAT(command.text, HasSubstr(named));
  };
  // Each begins with the option that is wrong.
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(
           "--stpes 3,--steps many,--steps -1,--stage 4,--ranks 0,--dtype fp8,--seed -1,--seed 1.5,"
           "--seed 18446744073709551616,--batch 0,--heads 5,--vocabulary 100,--layers 0,--data,"
           "--accumulate 0,--micro-batches-per-round 0,--micro-batches-per-round some,"
           "--offload-param disk,--offload-optimizer device,--device-memory 64MiBs,"
           "--device-memory 0,--host-memory -1GiB,--host-memory much,--show-plan=all,--lr fast,"
           "--lr -1,--lr nan,--warmup -1,--warmup 1.5,--nvme-path,--nvme-path=,"
           "--nvme-path= --offload-optimizer nvme,--cuda-graphs yes,--products abx,--products fast",
           ','))) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    std::vector<const char*> arguments;
    for (const std::string& word : words) arguments.push_back(word.c_str());
    expect(arguments, line.substr(0, line.find_first_of(" =")));
  }
  expect({"--products", ""}, "--products");
  expect({"--nvme-path", "", "--offload-optimizer", "nvme"}, "--nvme-path");
  expect({"--nvme-path", "/nvme/\xff", "--offload-optimizer", "nvme"}, "is not in UTF-8");

  struct Refused {
    std::vector<const char*> arguments;
    const char *named, *json = nullptr;
  };
  const char* const empty = "{}";  // stage 0, as in DeepSpeed
  for (const Refused& r : std::vector<Refused>{
           {{"--offload-param", "nvme"}, "--nvme-path"},
           {{"--offload-optimizer", "nvme"}, "--nvme-path"},
           {{"--offload-param", "cpu", "--stage", "2"}, "--offload-param cpu"},
           {{"--offload-param", "cpu", "--stage", "2"}, "from stage 3", empty},
           {{"--offload-param", "nvme"}, "--stage 3", empty},
           {{"--offload-optimizer", "cpu", "--stage", "0"}, "--offload-optimizer cpu"},
           {{"--offload-optimizer", "nvme"}, "from stage 1", empty},
           {{"--split-master", "--dtype", "fp32"}, "split_master"},
           {{"--stochastic-rounding", "--dtype", "fp16"}, "stochastic_rounding"},
           {{"--stochastic-rounding", "--split-master", "--dtype", "bf16"}, "are both true"},
           {{"--ranks", "3"}, "train_batch_size", R"({"train_batch_size": 8})"}})
    EXPECT_THAT(Refusal(r.arguments, r.json), HasSubstr(r.named));
  EXPECT_NE(Refusal({"--config", "/absent"}), "");
}

// The file of Hugging Face's users.
TEST(OptionsTest, OptionsFillInTheAutoValuesOfAFile) {
  const char* const json = R"({"train_batch_size": "auto",
      "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
      "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
      "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                "weight_decay": "auto"}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
          "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
      "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}})";
  const Config config = Resolved({"--steps", "50"}, json);
  const Config plain = Resolved({"--steps", "50"});
  EXPECT_EQ(config.optimizer, plain.optimizer);
  EXPECT_EQ(config.compute, DType::kBFloat16);
  EXPECT_EQ(config.micro_batch_size, plain.micro_batch_size);
  EXPECT_EQ(config.train_batch_size, plain.train_batch_size);
  EXPECT_EQ(config.scheduler.total_num_steps, 50);
  EXPECT_EQ(config.scheduler.warmup_num_steps, Recipe::Warmup(50));
  EXPECT_EQ(config.scheduler.warmup_max_lr, plain.optimizer.learning_rate);

  const Config asked = Resolved({"--batch", "3", "--accumulate", "2", "--dtype", "fp16"}, json);
  EXPECT_EQ(asked.train_batch_size, 3 * 2 * 2);
  EXPECT_EQ(asked.compute, DType::kFloat16);
}

// A value that an option overrides causes no error.
TEST(OptionsTest, OptionsOverrideTheFileBeforeItIsChecked) {
  const char* const json = R"({"bf16": {"enabled": true},
      "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"},
                            "offload_optimizer": {"device": "nvme"}},
      "ebb": {"split_master": true}})";
  EXPECT_THAT(Refusal({}, json), AllOf(HasSubstr("offload_param.nvme_path\" is not given"),
                                       HasSubstr("gpt --nvme-path FOLDER")));
  const Config config = Resolved({"--nvme-path", "/disk"}, json);
  EXPECT_THAT(config.zero.offload_optimizer.nvme_paths, testing::ElementsAre("/disk"));
  const Config lower = Resolved({"--stage", "2", "--offload-optimizer", "cpu"}, json);
  EXPECT_EQ(lower.zero.offload_param.device, Tier::kDevice) << "ignored, as in DeepSpeed";
  EXPECT_NE(Refusal({"--nvme-path", "/disk", "--dtype", "fp32"}, json), "");
}

TEST(OptionsTest, WithoutRanksThereAreAsManyAsTheFilesBatchNeeds) {
  const auto ranks = [](const char* json, const std::vector<const char*>& arguments = {}) {
    const auto config = Resolve(arguments, json);
    return config.ok() ? config->train_batch_size /
                             (config->micro_batch_size * config->gradient_accumulation_steps)
                       : -1;
  };
  const char* const of_8 = R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4,
                               "gradient_accumulation_steps": 2})";
  EXPECT_EQ(ranks(of_8), 8);
  EXPECT_EQ(ranks(of_8, {"--ranks", "8"}), 8);
  EXPECT_EQ(ranks(of_8, {"--ranks", "2"}), -1);
  EXPECT_EQ(ranks(of_8, {"--batch", "1"}), 2);
  EXPECT_EQ(ranks(R"({"train_batch_size": 12})"), 2);
  EXPECT_EQ(ranks(R"({"train_batch_size": 5})"), 1);
  EXPECT_EQ(ranks(R"({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4})"), 1);
  EXPECT_EQ(ranks(R"({"train_batch_size": 5, "train_micro_batch_size_per_gpu": 4})"), -1);
}

TEST(OptionsTest, UnknownKeysAreAsAsked) {
  const char* const json = R"({"job": 1, "fp16": {"level": "O2"}})";
  EXPECT_NE(Refusal({}, json), "");
  const Config warned = Resolved({"--unknown-keys", "warn"}, json);
  EXPECT_EQ(warned.warnings.size(), 2u);
  EXPECT_THAT(Refusal({"--unknown-keys", "error"}, json), HasSubstr("2 problems"));
}

TEST(OptionsTest, AFileIsExplained) {
  const ScratchFiles files;
  const std::string path = files.Write("config.json", R"({"gradient_clipping": "auto"})");
  const CommandLine command = Parse({"--explain-config", path.c_str()});
  ASSERT_TRUE(command.options.has_value()) << command.text;
  EXPECT_TRUE(command.options->explain_config);
  const auto text = ExplainConfig(*command.options);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(*text, HasSubstr("filled in by the trainer: 1"));
}

TEST(OptionsTest, ALaunchersProcessesAreTheRanks) {
  const Launch launch = {.launcher = "mpirun", .job = "", .rank = 1, .size = 4, .place = {}};
  Options options = *Parse({"--steps", "3"}).options;
  EXPECT_TRUE(SettleRanks(launch, options).ok());
  EXPECT_EQ(options.ranks, 4);
  options = *Parse({"--ranks", "4"}).options;
  EXPECT_TRUE(SettleRanks(launch, options).ok());
  options = *Parse({"--ranks", "2"}).options;
  EXPECT_THAT(std::string(SettleRanks(launch, options).message()),
              AllOf(HasSubstr("--ranks 2"), HasSubstr("rank 1 of 4")));
}

TEST(OptionsTest, ALaunchersOneProcessIsOneRankUnlessThreadsAreAskedFor) {
  const Launch launch = {.launcher = "srun", .job = "", .rank = 0, .size = 1, .place = {}};
  Options options = *Parse({"--steps", "3"}).options;
  EXPECT_TRUE(SettleRanks(launch, options).ok());
  EXPECT_EQ(options.ranks, 1);
  options = *Parse({"--ranks", "3"}).options;
  EXPECT_TRUE(SettleRanks(launch, options).ok());
  EXPECT_EQ(options.ranks, 3);
  options = *Parse({"--steps", "3"}).options;
  EXPECT_TRUE(SettleRanks(std::nullopt, options).ok());
  EXPECT_EQ(options.ranks, 2);
}

TEST(OptionsTest, WithoutADeviceForCudaItIsAnErrorThatNamesTheOption) {
  Options options = *Parse({"--device", "cuda", "--threads", "3"}).options;
  if (Device::FromName("cuda").ok()) GTEST_SKIP() << "this machine has a CUDA device";
  EXPECT_THAT(
      std::string(ChooseDevice(options, 0).status().message()),
      testing::AllOf(testing::HasSubstr("--device cuda: "), testing::HasSubstr("--device cpu")));
  options.device = "cpu";
  const auto cpu = ChooseDevice(options, 0);
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  EXPECT_EQ(cpu->CallerStream().team().threads(), 3);
}

TEST(ConfigurationTest, NoTierIsAllowedAtEveryStage) {
  for (const char* stage : {"0", "1", "2", "3"}) {
    EXPECT_EQ(
        Refusal({"--stage", stage, "--offload-param", "none", "--offload-optimizer", "none"}, "{}"),
        "");
  }
}

TEST(ConfigurationTest, TheExamplesScheduleIsAsLongAsTheRun) {
  for (const char* steps : {"40", "1000"}) {
    const Config config = Resolved({"--config", EBB_EXAMPLE_CONFIG, "--steps", steps});
    const Config recipe = Resolved({"--steps", steps});
    EXPECT_EQ(config.scheduler, recipe.scheduler) << steps;
    EXPECT_EQ(config.optimizer, recipe.optimizer) << steps;
  }
}

TEST(ConfigurationTest, RatesOverrideTheRecipeAndTheConfiguration) {
  const Config recipe = Resolved({"--steps", "400"});
  EXPECT_EQ(recipe.scheduler.type, SchedulerType::kWarmupCosine);
  EXPECT_EQ(recipe.scheduler.warmup_num_steps, Recipe::Warmup(400));
  EXPECT_EQ(recipe.scheduler.total_num_steps, 400);
  EXPECT_EQ(recipe.optimizer.learning_rate, Recipe::kLearningRate);
  const Config given = Resolved({"--steps", "400", "--lr", "3e-3", "--warmup", "70"});
  EXPECT_EQ(given.optimizer.learning_rate, 3e-3);
  EXPECT_EQ(given.scheduler.warmup_num_steps, 70);
  EXPECT_EQ(Refusal({"--steps", "4", "--warmup", "70"}), "");

  const auto with = [](const std::string& scheduler) {
    return R"({"train_micro_batch_size_per_gpu": 1,
               "optimizer": {"type": "AdamW", "params": {"lr": 0.01}})" +
           scheduler + "}";
  };
  const Config constant = Resolved({"--lr", "0.5"}, with("").c_str());
  EXPECT_EQ(constant.optimizer.learning_rate, 0.5);
  EXPECT_EQ(constant.scheduler.type, SchedulerType::kNone);
  const Config warmed = Resolved({"--warmup", "9"}, with("").c_str());
  EXPECT_EQ(warmed.scheduler.type, SchedulerType::kWarmup);
  EXPECT_EQ(warmed.scheduler.warmup_num_steps, 9);
  const Config decaying =
      Resolved({"--lr", "0.5", "--warmup", "9"}, with(R"(, "scheduler": {"type": "WarmupDecayLR",
                "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5, "total_num_steps": 50}})")
                                                     .c_str());
  EXPECT_EQ(decaying.scheduler.warmup_max_lr, 0.5);
  EXPECT_EQ(decaying.scheduler.warmup_num_steps, 9);
  EXPECT_THAT(Refusal({"--lr", "0.5"}, with(R"(, "scheduler": {"type": "OneCycle",
                "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01}})")
                                           .c_str()),
              AllOf(HasSubstr("--lr"), HasSubstr("OneCycle")));
}

TEST(ConfigurationTest, RatesAreDescribedInWords) {
  const auto words = [](const std::vector<const char*>& arguments, const char* json = nullptr) {
    return RatesText(Resolved(arguments, json));
  };
  EXPECT_EQ(
      words({"--steps", "400", "--lr", "0.002", "--warmup", "30"}),
      "learning rate 0.002 after a warm-up of 30 steps, then as a cosine to 0.0001 at step 400");
  const char* const json = R"({"train_micro_batch_size_per_gpu": 1,
      "optimizer": {"type": "SGD", "params": {"lr": 0.25}}})";
  EXPECT_EQ(words({}, json), "learning rate 0.25");
  EXPECT_EQ(words({"--warmup", "7"}, json), "learning rate 0.25 after a warm-up of 7 steps");
}

}  // namespace
}  // namespace ebb::gpt::options_test
