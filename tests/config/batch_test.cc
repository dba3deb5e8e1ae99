// The batch triple for a world: the six rows that can be completed, and the errors of the others.
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ebb::batch_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

struct Row {
  const char* name;
  int64_t train, micro, accumulation;  // 0: not given
  int world;
  int64_t expected_train, expected_micro, expected_accumulation;
};
void PrintTo(const Row& row, std::ostream* out) {
  *out << row.name;
}

Config Given(int64_t train, int64_t micro, int64_t accumulation) {
  Config config;
  config.train_batch_size = train;
  config.micro_batch_size = micro;
  config.gradient_accumulation_steps = accumulation;
  return config;
}

class Completed : public ::testing::TestWithParam<Row> {};
TEST_P(Completed, TheWorldCompletesTheBatchTriple) {
  const Row& row = GetParam();
  const absl::StatusOr<Config> config =
      Given(row.train, row.micro, row.accumulation).ForWorld(row.world);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->train_batch_size, row.expected_train);
  EXPECT_EQ(config->micro_batch_size, row.expected_micro);
  EXPECT_EQ(config->gradient_accumulation_steps, row.expected_accumulation);
  // Completing a complete configuration changes nothing.
  EXPECT_EQ(*config->ForWorld(row.world), *config);
}
INSTANTIATE_TEST_SUITE_P(Rows, Completed,
                         ::testing::Values(Row{"all", 24, 4, 2, 3, 24, 4, 2},
                                           Row{"train and micro", 24, 4, 0, 3, 24, 4, 2},
                                           Row{"train and accumulation", 24, 0, 2, 3, 24, 4, 2},
                                           Row{"micro and accumulation", 0, 4, 2, 3, 24, 4, 2},
                                           Row{"train", 24, 0, 0, 3, 24, 8, 1},
                                           Row{"micro", 0, 4, 0, 3, 12, 4, 1},
                                           Row{"one rank", 32, 16, 2, 1, 32, 16, 2}));

std::string ErrorOf(const Config& config, int world) {
  const absl::StatusOr<Config> resolved = config.ForWorld(world);
  EXPECT_FALSE(resolved.ok());
  EXPECT_EQ(resolved.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(resolved.status().message());
}

TEST(Batch, CountsDataRanks) {
  Config config = Given(0, 4, 2);
  config.ebb.mesh.tensor = 2;
  ASSERT_TRUE(config.ForWorld(6).ok());
  EXPECT_EQ(config.ForWorld(6)->train_batch_size, 24);
  EXPECT_EQ(ErrorOf(config, 5),
            "\"ebb.mesh.tensor\" 2 does not divide 5 ranks; nearest that do: 1 or 5");
  config.train_batch_size = 16;
  EXPECT_THAT(ErrorOf(config, 6), HasSubstr("* data ranks, but the numbers are "));
  EXPECT_THAT(ErrorOf(config, 6), HasSubstr(" 3 data ranks; nearest"));
  EXPECT_EQ(config.FittingWorld(8), 4);
}

TEST(Batch, MismatchNamesAllNumbersAndChoices) {
  EXPECT_EQ(
      ErrorOf(Given(33, 17, 2), 2),
      "the batch sizes do not fit: \"train_batch_size\" must be "
      "\"train_micro_batch_size_per_gpu\" * \"gradient_accumulation_steps\" * ranks, but the "
      "numbers are \"train_batch_size\" 33, \"train_micro_batch_size_per_gpu\" 17, "
      "\"gradient_accumulation_steps\" 2, 2 ranks; nearest that fit: \"train_batch_size\" 68");
  EXPECT_THAT(ErrorOf(Given(48, 4, 2), 3),
              HasSubstr("nearest that fit: \"train_batch_size\" 24, or "
                        "\"train_micro_batch_size_per_gpu\" 8, or "
                        "\"gradient_accumulation_steps\" 4"));
}

TEST(Batch, TrainAndMicroThatDoNotDivideAreAnError) {
  EXPECT_THAT(ErrorOf(Given(32, 4, 0), 3),
              HasSubstr("\"gradient_accumulation_steps\" (not given), 3 ranks; nearest that fit: "
                        "\"train_batch_size\" 24 or 36"));
  EXPECT_THAT(
      ErrorOf(Given(24, 5, 0), 2),
      HasSubstr("\"train_batch_size\" 20 or 30, or \"train_micro_batch_size_per_gpu\" 4 or 6"));
}

TEST(Batch, TrainAndAccumulationThatDoNotDivideAreAnError) {
  EXPECT_THAT(
      ErrorOf(Given(24, 0, 5), 2),
      HasSubstr("\"train_batch_size\" 20 or 30, or \"gradient_accumulation_steps\" 4 or 6"));
}

TEST(Batch, ATrainBatchThatTheWorldDoesNotDivideIsAnError) {
  EXPECT_THAT(ErrorOf(Given(10, 0, 0), 4),
              HasSubstr("nearest that fit: \"train_batch_size\" 8 or 12"));
  const std::string smaller = ErrorOf(Given(2, 0, 0), 4);
  EXPECT_THAT(smaller, HasSubstr("nearest that fit: \"train_batch_size\" 4"));
  EXPECT_THAT(smaller, Not(HasSubstr("0 or 4")));
}

TEST(Batch, NoGivenBatchSizeIsAnError) {
  EXPECT_THAT(ErrorOf(Given(0, 0, 0), 2), HasSubstr("the batch size is not given"));
  EXPECT_THAT(
      ErrorOf(Given(0, 0, 8), 2),
      HasSubstr("\"gradient_accumulation_steps\" 8, 2 ranks): give \"train_batch_size\" or"));
}

TEST(Batch, ResultsThatAreTooLargeAreAnError) {
  EXPECT_THAT(ErrorOf(Given(0, 2147483647, 2147483647), 1024), HasSubstr("more than 2^63"));
  EXPECT_THAT(ErrorOf(Given(int64_t{1} << 40, 0, 0), 2),
              HasSubstr("\"train_micro_batch_size_per_gpu\" is 549755813888"));
  // The search for choices also ends for a prime near the maximum.
  EXPECT_THAT(ErrorOf(Given(INT64_MAX - 24, 2147483647, 0), 1), HasSubstr("nearest that fit"));
}

TEST(Batch, AWorldWithoutARankIsAnError) {
  EXPECT_EQ(ErrorOf(Given(8, 0, 0), 0), "a world has at least one rank, not 0");
  EXPECT_EQ(ErrorOf(Given(8, 0, 0), -1), "a world has at least one rank, not -1");
}

TEST(Batch, AutoCountsAsNotGiven) {
  const absl::StatusOr<Config> config = Config::FromJson(
      R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2,
          "gradient_accumulation_steps": "auto"})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->ForWorld(3)->train_batch_size, 6);
}

TEST(ForWorld, ResolvesRounds) {
  Config config = Given(0, 2, 8);
  config.ebb.micro_batches_per_round = 0;
  EXPECT_EQ(config.ForWorld(2)->ebb.micro_batches_per_round, 8);
  config.ebb.micro_batches_per_round = 4;
  EXPECT_EQ(config.ForWorld(2)->ebb.micro_batches_per_round, 4);
  config.ebb.micro_batches_per_round = 3;
  EXPECT_EQ(ErrorOf(config, 2),
            "\"ebb.micro_batches_per_round\" 3 does not divide \"gradient_accumulation_steps\" 8; "
            "nearest that do: 2 or 4");
  config.ebb.micro_batches_per_round = 16;
  EXPECT_THAT(ErrorOf(config, 2), HasSubstr("nearest that do: 8"));
}

TEST(ForWorld, TakesTheShardGroupByEitherName) {
  Config config = Given(0, 1, 1);
  config.zero.stage = 3;
  config.zero.mics_shard_size = 2;
  EXPECT_EQ(config.ForWorld(4)->ebb.shard_group, 2);
  config.ebb.shard_group = 2;
  EXPECT_EQ(config.ForWorld(4)->ebb.shard_group, 2);
  EXPECT_THAT(std::string(config.ForWorld(3).status().message()),
              HasSubstr("\"ebb.shard_group\" 2 does not divide 3 ranks; nearest that do: 1 or 3"));
  config.ebb.reduction_group = 4;
  EXPECT_THAT(std::string(config.ForWorld(4).status().message()),
              HasSubstr("\"ebb.reduction_group\" 4 is not the shard group"));
  config.ebb.reduction_group = 0;
  config.zero.stage = 0;
  EXPECT_THAT(std::string(config.ForWorld(4).status().message()), HasSubstr("choose stage 1, 2"));
  config.zero.stage = 1;
  config.ebb.shard_group = 4;
  EXPECT_THAT(std::string(config.ForWorld(4).status().message()), HasSubstr("two names"));
}

TEST(ForWorld, TakesTheGroupOfSecondaryShardsWithinTheShards) {
  Config config = Given(0, 1, 1);
  config.zero.stage = 3;
  config.zero.hpz_partition_size = 2;
  EXPECT_EQ(config.ForWorld(8)->zero.hpz_partition_size, 2);
  EXPECT_THAT(config.ForWorld(8)->remarks, ElementsAre());
  EXPECT_EQ(ErrorOf(config, 3),
            "\"zero_optimization.zero_hpz_partition_size\" 2 does not divide 3 ranks; nearest that "
            "do: 1 or 3");
  config.ebb.shard_group = 4;
  EXPECT_EQ(config.ForWorld(8)->zero.hpz_partition_size, 2);
  config.zero.hpz_partition_size = 3;
  EXPECT_EQ(ErrorOf(config, 8),
            "\"zero_optimization.zero_hpz_partition_size\" 3 does not divide 4 ranks of a shard "
            "group; nearest that do: 2 or 4");
  // Groups of all ranks, or more: a second copy of the parameters would be useless.
  for (const int64_t all : {4, 5, 8}) {
    config.zero.hpz_partition_size = all;
    const Config resolved = *config.ForWorld(8);
    EXPECT_EQ(resolved.zero.hpz_partition_size, 1);
    EXPECT_THAT(resolved.remarks, ElementsAre(HasSubstr("changes nothing: parameters are cut over "
                                                        "4 ranks of a shard group")));
    EXPECT_EQ(resolved.ForWorld(8)->remarks, resolved.remarks);
  }
  for (const int64_t none : {0, 1}) {
    config.zero.hpz_partition_size = none;
    EXPECT_EQ(config.ForWorld(8)->zero.hpz_partition_size, 1);
    EXPECT_THAT(config.ForWorld(8)->remarks, ElementsAre());
  }
  config.zero.stage = 2;
  config.zero.hpz_partition_size = 3;
  EXPECT_EQ(config.ForWorld(8)->zero.hpz_partition_size, 1);
}

TEST(ForWorld, ChecksTheReductionGroup) {
  Config config = Given(0, 2, 1);
  config.ebb.reduction_group = 2;
  EXPECT_TRUE(config.ForWorld(4).ok());
  EXPECT_EQ(ErrorOf(config, 3),
            "\"ebb.reduction_group\" 2 does not divide 3 ranks; nearest that do: 1 or 3");
  config.ebb.reduction_group = 8;
  EXPECT_THAT(ErrorOf(config, 4), HasSubstr("nearest that do: 4"));
}

TEST(ForWorld, ResolvesTheTimeAndDTypeOfReductions) {
  for (int stage = 0; stage <= 3; ++stage) {
    Config config = Given(4, 0, 0);
    config.zero.stage = stage;
    config.compute = DType::kBFloat16;
    const absl::StatusOr<Config> resolved = config.ForWorld(2);
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    EXPECT_EQ(resolved->ebb.reduce_at, stage >= 2 ? ReduceAt::kRound : ReduceAt::kStep);
    EXPECT_EQ(resolved->communication, DType::kBFloat16);
    EXPECT_EQ(resolved->reduces_at_round(), config.reduces_at_round());
    config.ebb.reduce_at = ReduceAt::kRound;
    config.communication = DType::kFloat32;
    EXPECT_EQ(config.ForWorld(2)->ebb.reduce_at, ReduceAt::kRound);
    EXPECT_EQ(config.ForWorld(2)->communication, DType::kFloat32);
  }
}

// EBB_IO_URING in the tests' environment is for all tests.
class Environment {
 public:
  explicit Environment(const char* value) {
    if (const char* const given = std::getenv(kName)) before_ = given;
    value == nullptr ? unsetenv(kName) : setenv(kName, value, /*overwrite=*/1);
  }
  Environment(const Environment&) = delete;
  ~Environment() {
    before_.has_value() ? setenv(kName, before_->c_str(), /*overwrite=*/1) : unsetenv(kName);
  }

 private:
  static constexpr char kName[] = "EBB_IO_URING";
  std::optional<std::string> before_;
};

TEST(ForWorld, TakesTheIoBackendOfTheEnvironmentWhereNoneIsGiven) {
  const auto resolved = [](IoBackend given, const char* value) {
    const Environment environment(value);
    Config config = Given(8, 0, 0);
    config.ebb.io_backend = given;
    return config.ForWorld(2)->ebb.io_backend;
  };
  for (const char* value : {static_cast<const char*>(nullptr), "", "1"}) {
    EXPECT_EQ(resolved(IoBackend::kAuto, value), IoBackend::kAuto);
    EXPECT_EQ(resolved(IoBackend::kThreads, value), IoBackend::kThreads);
  }
  EXPECT_EQ(resolved(IoBackend::kAuto, "0"), IoBackend::kThreads);
  EXPECT_EQ(resolved(IoBackend::kUring, "0"), IoBackend::kUring);
  const Environment environment("0");
  EXPECT_THAT(Given(8, 0, 0).ForWorld(2)->ToJson(), HasSubstr("\"io_backend\": \"threads\""));
}

TEST(ForWorld, NamesAnEnvironmentThatItDoesNotKnow) {
  const Environment environment("off");
  EXPECT_THAT(ErrorOf(Given(8, 0, 0), 2),
              AllOf(HasSubstr("EBB_IO_URING in the environment is \"off\""),
                    HasSubstr("allowed: 0"), HasSubstr("ebb.io_backend")));
}

TEST(ForWorld, GradientsAndActivationsOnNvmeUseTheParametersPaths) {
  const std::vector<std::string> here = {"/a", "/b"}, there = {"/c"};
  Config config = Given(8, 0, 0);
  config.zero.stage = 3;
  config.zero.offload_param = {.device = Tier::kNvme, .nvme_paths = here};
  const auto resolved = [&] { return config.ForWorld(2)->zero.offload_optimizer.nvme_paths; };
  EXPECT_THAT(resolved(), ::testing::IsEmpty());  // only parameters are on NVMe
  config.ebb.offload_activations = Tier::kNvme;
  EXPECT_EQ(resolved(), here);
  config.ebb.offload_activations = std::nullopt;
  config.ebb.offload_gradients = Tier::kNvme;
  EXPECT_EQ(resolved(), here);
  config.zero.offload_optimizer.nvme_paths = there;
  EXPECT_EQ(resolved(), there);
}

TEST(ForWorld, ReportsAllErrorsTogether) {
  Config config;
  config.train_batch_size = 7;
  config.micro_batch_size = 2;
  config.ebb.reduction_group = 3;
  config.ebb.shard_group = 5;
  const std::string message(config.ForWorld(4).status().message());
  for (const char* wrong : {"3 problems", "\"train_batch_size\" 7", "\"ebb.reduction_group\" 3",
                            "\"ebb.shard_group\" 5"})
    EXPECT_THAT(message, HasSubstr(wrong));
}

TEST(ForWorld, ItsErrorsAreReportedWithTheFilesIfTheWorldIsKnown) {
  constexpr char kFile[] = R"({"gradient_clipping": -1, "train_batch_size": 7,
      "train_micro_batch_size_per_gpu": 2, "ebb": {"reduction_group": 3, "shard_group": "four"}})";
  const std::string message(
      Config::FromJson(kFile, {.world = [](const Config&) { return 4; }}).status().message());
  for (const char* wrong : {"4 problems", "\"gradient_clipping\"", "\"train_batch_size\" 7",
                            "\"ebb.reduction_group\" 3", "\"ebb.shard_group\""})
    EXPECT_THAT(message, HasSubstr(wrong));
}

TEST(ForWorld, RefusesConfigsThatValidateRefuses) {
  Config config = Given(8, 0, 0);
  config.zero.stage = -1;
  EXPECT_THAT(ErrorOf(config, 2), HasSubstr("zero_optimization.stage"));
}

}  // namespace
}  // namespace ebb::batch_test
