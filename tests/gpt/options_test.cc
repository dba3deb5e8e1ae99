#include "command_line/options.h"

#include <ostream>

#include "absl/strings/str_split.h"
#include "command_line/configuration.h"
#include "ebb/runtime/device/thread_team.h"
#include "gmock/gmock.h"
#include "parse.h"
#include "scratch_files.h"

namespace ebb::gpt::options_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

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

TEST(OptionsTest, CudaGraphsAreOnOffOrChosen) {
  EXPECT_EQ(Parse({}).options->cuda_graphs, CudaGraphs::kAuto);
  EXPECT_EQ(Parse({"--cuda-graphs", "on"}).options->cuda_graphs, CudaGraphs::kOn);
  EXPECT_EQ(Parse({"--cuda-graphs", "off"}).options->cuda_graphs, CudaGraphs::kOff);
  EXPECT_EQ(Parse({"--cuda-graphs", "on", "--cuda-graphs", "auto"}).options->cuda_graphs,
            CudaGraphs::kAuto);
  const CommandLine wrong = Parse({"--cuda-graphs", "yes"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.text, AllOf(HasSubstr("--cuda-graphs"), HasSubstr("auto")));
}

TEST(OptionsTest, ProductsAreMeasuredInTheDefaultWayOrAsLettersSay) {
  EXPECT_EQ(Parse({}).options->products, kMeasuredProducts);
  for (const char* products : {"auto", "default", "aBcD"})
    EXPECT_EQ(Parse({"--products", products}).options->products, products);
  for (const char* products : {"", "abx", "fast"}) {
    const CommandLine wrong = Parse({"--products", products});
    EXPECT_EQ(wrong.exit_code, 2) << products;
    EXPECT_THAT(wrong.text, HasSubstr("--products")) << products;
  }
}

TEST(OptionsTest, SeedsAreAllNumbersOf64Bits) {
  EXPECT_EQ(Parse({"--seed", "0"}).options->seed, 0u);
  EXPECT_EQ(Parse({"--seed", "010"}).options->seed, 10u);
  EXPECT_EQ(Parse({"--seed", "18446744073709551615"}).options->seed, ~uint64_t{0});
}

TEST(OptionsTest, FlagsOverrideTheConfiguration) {
  ScratchFiles files;
  const std::string path = files.Write("config.json", R"({
    "train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
    "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}})");
  const Config from_file = Resolved({"--config", path.c_str()});
  EXPECT_EQ(from_file.zero.stage, 1);
  EXPECT_EQ(from_file.compute, DType::kFloat16);

  const Config overridden = Resolved({"--config", path.c_str(), "--stage", "2", "--dtype", "fp32",
                                      "--batch", "5", "--ranks", "4"});
  EXPECT_EQ(overridden.zero.stage, 2);
  EXPECT_EQ(overridden.compute, DType::kFloat32);
  EXPECT_EQ(overridden.micro_batch_size, 5);
  EXPECT_EQ(overridden.gradient_accumulation_steps, 3);
  EXPECT_EQ(overridden.train_batch_size, 5 * 3 * 4);
}

TEST(OptionsTest, OffloadFlagsOverrideTheConfiguration) {
  ScratchFiles files;
  const std::string path = files.Write("config.json", R"({
    "train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
    "bf16": {"enabled": true},
    "zero_optimization": {"stage": 3,
      "offload_param": {"device": "cpu", "nvme_path": "/a", "max_in_cpu": 7},
      "offload_optimizer": {"device": "nvme", "nvme_path": "/b", "ratio": 0.5}},
    "ebb": {"device_memory": "1GiB"}})");
  const Config plain = Resolved({"--config", path.c_str()});
  EXPECT_EQ(plain.zero.offload_param.device, Tier::kCpu);
  EXPECT_EQ(plain.zero.offload_optimizer.device, Tier::kNvme);
  EXPECT_EQ(plain.ebb.device_memory, int64_t{1} << 30);
  EXPECT_FALSE(plain.ebb.host_memory.has_value());

  const Config flags = Resolved(
      {"--config", path.c_str(), "--offload-param", "nvme", "--offload-optimizer", "cpu",
       "--nvme-path", "/c,/d", "--nvme-path", "/e", "--device-memory", "64MiB", "--host-memory",
       "1.5GiB", "--split-master", "--accumulate", "4", "--micro-batches-per-round", "2"});
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

  const Config none = Resolved(
      {"--config", path.c_str(), "--offload-param", "none", "--offload-optimizer", "none"});
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

struct Mistake {
  std::vector<const char*> arguments;
  const char* named;
};
void PrintTo(const Mistake& mistake, std::ostream* out) {
  const char* before = "";
  for (const char* argument : mistake.arguments) {
    *out << before << argument;
    before = " ";
  }
}

class BadCommandLineTest : public testing::TestWithParam<Mistake> {};

TEST_P(BadCommandLineTest, ExitsWithTwoAndNamesTheFlag) {
  const CommandLine command = Parse(GetParam().arguments);
  EXPECT_FALSE(command.options.has_value());
  EXPECT_EQ(command.exit_code, 2);
  EXPECT_THAT(command.text, HasSubstr(GetParam().named));
}

INSTANTIATE_TEST_SUITE_P(
    Mistakes, BadCommandLineTest,
    testing::Values(
        Mistake{{"--stpes", "3"}, "--stpes"}, Mistake{{"--steps", "many"}, "--steps"},
        Mistake{{"--steps", "-1"}, "--steps"}, Mistake{{"--stage", "4"}, "--stage"},
        Mistake{{"--ranks", "0"}, "--ranks"}, Mistake{{"--dtype", "fp8"}, "--dtype"},
        Mistake{{"--seed", "-1"}, "--seed"}, Mistake{{"--seed", "1.5"}, "--seed"},
        Mistake{{"--seed", "18446744073709551616"}, "--seed"}, Mistake{{"--batch", "0"}, "--batch"},
        Mistake{{"--heads", "5"}, "--heads"}, Mistake{{"--vocabulary", "100"}, "--vocabulary"},
        Mistake{{"--layers", "0"}, "--layers"}, Mistake{{"--data"}, "--data"},
        Mistake{{"--accumulate", "0"}, "--accumulate"},
        Mistake{{"--micro-batches-per-round", "0"}, "--micro-batches-per-round"},
        Mistake{{"--micro-batches-per-round", "some"}, "--micro-batches-per-round"},
        Mistake{{"--offload-param", "disk"}, "--offload-param"},
        Mistake{{"--offload-optimizer", "device"}, "--offload-optimizer"},
        Mistake{{"--device-memory", "64MiBs"}, "--device-memory"},
        Mistake{{"--device-memory", "0"}, "--device-memory"},
        Mistake{{"--host-memory", "-1GiB"}, "--host-memory"},
        Mistake{{"--host-memory", "much"}, "--host-memory"},
        Mistake{{"--show-plan=all"}, "--show-plan"}, Mistake{{"--lr", "fast"}, "--lr"},
        Mistake{{"--lr", "-1"}, "--lr"}, Mistake{{"--lr", "nan"}, "--lr"},
        Mistake{{"--warmup", "-1"}, "--warmup"}, Mistake{{"--warmup", "1.5"}, "--warmup"},
        Mistake{{"--nvme-path"}, "--nvme-path"}, Mistake{{"--nvme-path="}, "--nvme-path"},
        Mistake{{"--nvme-path", "", "--offload-optimizer", "nvme"}, "--nvme-path"},
        Mistake{{"--nvme-path=", "--offload-optimizer", "nvme"}, "--nvme-path"},
        Mistake{{"--nvme-path", "/nvme/\xff", "--offload-optimizer", "nvme"}, "is not in UTF-8"}));

// The file of Hugging Face's users.
TEST(OptionsTest, OptionsFillInTheAutoValuesOfAFile) {
  ScratchFiles files;
  const std::string path = files.Write("config.json", R"({"train_batch_size": "auto",
      "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
      "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
      "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                "weight_decay": "auto"}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
          "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
      "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}})");
  const Config config = Resolved({"--config", path.c_str(), "--steps", "50"});
  const Config plain = Resolved({"--steps", "50"});
  EXPECT_EQ(config.optimizer, plain.optimizer);
  EXPECT_EQ(config.compute, DType::kBFloat16);
  EXPECT_EQ(config.micro_batch_size, plain.micro_batch_size);
  EXPECT_EQ(config.train_batch_size, plain.train_batch_size);
  EXPECT_EQ(config.scheduler.total_num_steps, 50);
  EXPECT_EQ(config.scheduler.warmup_num_steps, Recipe::Warmup(50));
  EXPECT_EQ(config.scheduler.warmup_max_lr, plain.optimizer.learning_rate);

  const Config asked =
      Resolved({"--config", path.c_str(), "--batch", "3", "--accumulate", "2", "--dtype", "fp16"});
  EXPECT_EQ(asked.train_batch_size, 3 * 2 * 2);
  EXPECT_EQ(asked.compute, DType::kFloat16);
}

// A value that an option overrides causes no error.
TEST(OptionsTest, OptionsOverrideTheFileBeforeItIsChecked) {
  ScratchFiles files;
  const std::string path = files.Write("config.json", R"({"bf16": {"enabled": true},
      "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"},
                            "offload_optimizer": {"device": "nvme"}},
      "ebb": {"split_master": true}})");
  EXPECT_THAT(Refusal({"--config", path.c_str()}),
              AllOf(HasSubstr("offload_param.nvme_path\" is not given"),
                    HasSubstr("gpt --nvme-path FOLDER")));
  const Config config = Resolved({"--config", path.c_str(), "--nvme-path", "/disk"});
  EXPECT_THAT(config.zero.offload_optimizer.nvme_paths, testing::ElementsAre("/disk"));
  const Config lower =
      Resolved({"--config", path.c_str(), "--stage", "2", "--offload-optimizer", "cpu"});
  EXPECT_EQ(lower.zero.offload_param.device, Tier::kDevice) << "ignored, as in DeepSpeed";
  EXPECT_NE(Refusal({"--config", path.c_str(), "--nvme-path", "/disk", "--dtype", "fp32"}), "");
}

TEST(OptionsTest, WithoutRanksThereAreAsManyAsTheFilesBatchNeeds) {
  const auto ranks = [](const char* json, std::vector<const char*> arguments = {}) {
    ScratchFiles files;
    const std::string path = files.Write("config.json", json);
    arguments.insert(arguments.end(), {"--config", path.c_str()});
    const auto config = ResolveConfig(*Parse(arguments).options);
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
  ScratchFiles files;
  const std::string path = files.Write("config.json", R"({"job": 1, "fp16": {"level": "O2"}})");
  EXPECT_NE(Refusal({"--config", path.c_str()}), "");
  const Config warned = Resolved({"--config", path.c_str(), "--unknown-keys", "warn"});
  EXPECT_EQ(warned.warnings.size(), 2u);
  EXPECT_THAT(Refusal({"--config", path.c_str(), "--unknown-keys", "error"}),
              HasSubstr("2 problems"));
}

TEST(OptionsTest, AFileIsExplained) {
  ScratchFiles files;
  const std::string path = files.Write("config.json", R"({"gradient_clipping": "auto"})");
  const CommandLine command = Parse({"--explain-config", path.c_str()});
  ASSERT_TRUE(command.options.has_value()) << command.text;
  EXPECT_TRUE(command.options->explain_config);
  const auto text = ExplainConfig(*command.options);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(*text, HasSubstr("filled in by the trainer: 1"));
}

TEST(OptionsTest, ABatchThatTheRanksDoNotDivideIsRefused) {
  ScratchFiles files;
  const std::string path = files.Write("config.json", R"({"train_batch_size": 8})");
  EXPECT_NE(Refusal({"--config", path.c_str(), "--ranks", "3"}), "");
  EXPECT_NE(Refusal({"--config", files.Path("absent").c_str()}), "");
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

}  // namespace
}  // namespace ebb::gpt::options_test
