#include "options.h"

#include "ebb/runtime/device/thread_team.h"
#include "gmock/gmock.h"
#include "scratch_files.h"

namespace ebb::gpt {
namespace {

using testing::AllOf;
using testing::HasSubstr;

CommandLine Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "gpt");
  return ParseCommandLine(static_cast<int>(arguments.size()), arguments.data());
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

TEST(OptionsTest, OfAnOptionGivenTwiceTheLaterOneCounts) {
  const CommandLine command =
      Parse({"--ranks", "2", "--dtype", "bf16", "--losses", "a", "--recompute", "--ranks", "4",
             "--dtype", "fp32", "--losses", "b", "--recompute"});
  ASSERT_TRUE(command.options.has_value()) << command.text;
  EXPECT_EQ(command.options->ranks, 4);
  EXPECT_EQ(command.options->dtype, DType::kFloat32);
  EXPECT_EQ(command.options->losses_file, "b");
  EXPECT_TRUE(command.options->recompute);
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
  const CommandLine plain = Parse({"--config", path.c_str()});
  const auto from_file = ResolveConfig(*plain.options);
  ASSERT_TRUE(from_file.ok()) << from_file.status();
  EXPECT_EQ(from_file->zero.stage, 1);
  EXPECT_EQ(from_file->compute, DType::kFloat16);

  const CommandLine flags = Parse({"--config", path.c_str(), "--stage", "2", "--dtype", "fp32",
                                   "--batch", "5", "--ranks", "4"});
  const auto overridden = ResolveConfig(*flags.options);
  ASSERT_TRUE(overridden.ok()) << overridden.status();
  EXPECT_EQ(overridden->zero.stage, 2);
  EXPECT_EQ(overridden->compute, DType::kFloat32);
  EXPECT_EQ(overridden->micro_batch_size, 5);
  EXPECT_EQ(overridden->gradient_accumulation_steps, 3);
  EXPECT_EQ(overridden->train_batch_size, 5 * 3 * 4);
}

TEST(OptionsTest, HelpIsNoError) {
  const CommandLine command = Parse({"--help"});
  EXPECT_FALSE(command.options.has_value());
  EXPECT_EQ(command.exit_code, 0);
  for (const char* flag : {"--config", "--data", "--layers", "--heads", "--width", "--context",
                           "--vocabulary", "--steps", "--seed", "--stage", "--ranks", "--losses",
                           "--trace", "--show-plan", "--summary"}) {
    EXPECT_THAT(command.text, HasSubstr(flag));
  }
}

struct Mistake {
  std::vector<const char*> arguments;
  const char* named;
};

class BadCommandLineTest : public testing::TestWithParam<Mistake> {};

TEST_P(BadCommandLineTest, ExitsWithTwoAndNamesTheFlag) {
  const CommandLine command = Parse(GetParam().arguments);
  EXPECT_FALSE(command.options.has_value());
  EXPECT_EQ(command.exit_code, 2);
  EXPECT_THAT(command.text, HasSubstr(GetParam().named));
}

INSTANTIATE_TEST_SUITE_P(
    Mistakes, BadCommandLineTest,
    testing::Values(Mistake{{"--stpes", "3"}, "--stpes"}, Mistake{{"--steps", "many"}, "--steps"},
                    Mistake{{"--steps", "-1"}, "--steps"}, Mistake{{"--stage", "4"}, "--stage"},
                    Mistake{{"--ranks", "0"}, "--ranks"}, Mistake{{"--dtype", "fp8"}, "--dtype"},
                    Mistake{{"--seed", "-1"}, "--seed"}, Mistake{{"--seed", "1.5"}, "--seed"},
                    Mistake{{"--seed", "18446744073709551616"}, "--seed"},
                    Mistake{{"--batch", "0"}, "--batch"}, Mistake{{"--heads", "5"}, "--heads"},
                    Mistake{{"--vocabulary", "100"}, "--vocabulary"},
                    Mistake{{"--layers", "0"}, "--layers"}, Mistake{{"--data"}, "--data"}));

TEST(OptionsTest, ABatchThatTheRanksDoNotDivideIsRefused) {
  ScratchFiles files;
  const std::string path = files.Write("config.json", R"({"train_batch_size": 8})");
  EXPECT_FALSE(ResolveConfig(*Parse({"--config", path.c_str(), "--ranks", "3"}).options).ok());
  EXPECT_FALSE(ResolveConfig(*Parse({"--config", files.Path("absent").c_str()}).options).ok());
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

TEST(OptionsTest, WithoutADeviceForCudaItIsTheCpuAndTheReason) {
  Options options = *Parse({"--device", "cuda", "--threads", "3"}).options;
  if (Device::FromName("cuda").ok()) GTEST_SKIP() << "this machine has a CUDA device";
  const auto chosen = ChooseDevice(options, 0);
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->device.kind(), DeviceKind::kCpu);
  EXPECT_EQ(chosen->device.CallerStream().team().threads(), 3);
  EXPECT_THAT(chosen->instead_of_cuda, testing::Not(testing::IsEmpty()));
  options.device = "cpu";
  EXPECT_THAT(ChooseDevice(options, 0)->instead_of_cuda, testing::IsEmpty());
}

}  // namespace
}  // namespace ebb::gpt
