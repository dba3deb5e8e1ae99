// A run that the host's memory cannot hold is refused before it takes any: the files that say what
// there is are the test's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_replace.h"
#include "ebb/offload/test_hooks.h"
#include "tests/engine/scripted.h"
#include "tests/offload/has_once.h"
#include "tests/offload/system_files.h"

namespace ebb::testing::host_memory_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int kWorld = 3;

class HostMemoryTest : public ::testing::Test {
 protected:
  HostMemoryTest() {
    GetOffloadTestHooks().system_root = files_.root();
    for (int u = 0; u < 8; ++u) {
      const UnitId unit = model_.AddUnit("unit" + std::to_string(u));
      model_.Add(unit,
                 {.name = "w" + std::to_string(u), .shape = {100'000}, .init = Constant(0.5f)});
      model_.forward.push_back({.unit = unit});
    }
  }
  ~HostMemoryTest() override { GetOffloadTestHooks() = {}; }

  // The pools of all ranks, in whole pages.
  int64_t NeededKib(const Config& config) const {
    const auto rows = PredictMemory(model_, kWorld, config);
    EXPECT_TRUE(rows.ok()) << rows.status();
    uint64_t bytes = 0;
    for (const MemoryRow& row : *rows) bytes += row.tier == Tier::kNvme ? 0 : row.predicted_bytes;
    return kWorld * static_cast<int64_t>(bytes) / 1024;
  }

  std::vector<absl::Status> Created(const Config& config) {
    std::vector<absl::Status> statuses(kWorld);
    ::testing::internal::CaptureStderr();
    RunThreads(kWorld, [&](World world) {
      return statuses[static_cast<size_t>(world.rank())] =
                 Engine::Create(world, Device::Cpu(1), model_, config).status();
    }).IgnoreError();
    log_ = ::testing::internal::GetCapturedStderr();
    return statuses;
  }

  // config_ with the JSON of the message's advice merged into it; without any, as it is.
  Config Followed(const std::string& message, const std::string& folder) const {
    const size_t from = message.find("; {"), to = message.find("} would fit");
    nlohmann::json config = nlohmann::json::parse(config_.ToJson());
    if (to != message.npos) {
      config.merge_patch(nlohmann::json::parse(absl::StrReplaceAll(
          message.substr(from + 2, to + 1 - (from + 2)), {{"FOLDER", folder}})));
    }
    const absl::StatusOr<Config> followed = Config::FromJson(config.dump());
    EXPECT_TRUE(followed.ok()) << followed.status() << ": " << message;
    return followed.ok() ? *followed : config_;
  }

  ModelSpec model_;
  Config config_ = ConfigFor({.world = kWorld, .stage = 1});
  SystemFiles files_;
  std::string log_;
};

TEST_F(HostMemoryTest, PoolsThatFitAreTakenWithoutALogLine) {
  files_.Memory(NeededKib(config_) * 3 / 2, /*swap_kib=*/0);
  for (const absl::Status& status : Created(config_)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(log_, Not(HasSubstr("this machine")));
}

TEST_F(HostMemoryTest, PoolsThatLeaveNothingElseAreTakenWithOneWarning) {
  files_.Memory(NeededKib(config_), /*swap_kib=*/0);
  for (const absl::Status& status : Created(config_)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(log_, HasOnce("that leaves little to the rest of the process"));
}

TEST_F(HostMemoryTest, BeyondRamAndSwapEveryRankRefusesWithAdvice) {
  config_.zero.offload_optimizer.device = Tier::kCpu;
  files_.Memory(NeededKib(config_) - 5, /*swap_kib=*/4);
  const std::vector<absl::Status> statuses = Created(config_);
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    const std::string message(status.message());
    EXPECT_THAT(message, HasSubstr("this machine (MemAvailable of /proc/meminfo) has "));
    EXPECT_THAT(message,
                ContainsRegex("need [0-9.]+ MiB a rank \\(device: .*parameter [0-9.]+ MiB.*"
                              "; cpu: .*optimizer [0-9.]+ MiB"));
    EXPECT_THAT(message, HasSubstr(" for the 3 ranks that share it; {"));
    EXPECT_THAT(message, AllOf(HasSubstr("} would fit ("), HasSubstr("or free memory")));
    EXPECT_EQ(status, statuses.front()) << "one has looked for all";
  }
}

// The group's kernel would kill a process that fills its workspace in the first step.
TEST_F(HostMemoryTest, AdviceFitsTheGroupWithTheFilledWorkspace) {
  const Scratch scratch;
  model_.workspace_bytes = 4 << 20;
  const int64_t needed = NeededKib(config_) * 1024;
  files_.Memory(int64_t{1} << 40, 0);
  files_.Group("/job");
  int fit = 0;
  for (const int64_t percent : {95, 80, 65, 50}) {
    const int64_t limit = needed / 100 * percent;
    files_.GroupMemory("/job", std::to_string(limit), 0, 0);
    const absl::Status refused = Created(config_).front();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << percent << "%: " << refused;
    const Config advised = Followed(std::string(refused.message()), scratch.path());
    if (advised.ToJson() == config_.ToJson()) continue;
    ++fit;
    EXPECT_LE(NeededKib(advised) * 1024, limit) << percent << "%: " << refused;
    EXPECT_TRUE(Created(advised).front().ok()) << percent << "%: " << refused;
  }
  EXPECT_GE(fit, 2);
}

// With the machine's memory alone a change would be advised that the group has no room for.
TEST_F(HostMemoryTest, AdviceFitsTheTightestLimit) {
  const int64_t needed = NeededKib(config_) * 1024;
  files_.Memory(needed / 1024 * 9 / 10, 0);
  files_.Group("/job");
  files_.GroupMemory("/job", std::to_string(needed * 7 / 10), 0, 0);
  const absl::Status status = Created(config_).front();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/sys/fs/cgroup/job (memory.max "));
}

TEST_F(HostMemoryTest, PoolsThatNeedSwapSpaceAreTakenWithOneWarning) {
  files_.Memory(NeededKib(config_) - 5, /*swap_kib=*/5);
  for (const absl::Status& status : Created(config_)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(log_, HasOnce("what does not fit will be swapped"));
}

TEST_F(HostMemoryTest, AnUntouchedWorkspaceIsNoReasonToRefuse) {
  const int64_t without = NeededKib(config_);
  files_.Memory(without * 3 / 2, 0);
  model_.workspace_bytes = int64_t{1} << 40;
  EXPECT_THAT(std::string(Created(config_).front().message()), HasSubstr("this machine"));
  model_.workspace_untouched_bytes = model_.workspace_bytes;
  // An allocation of so much may be refused by the system, but not here.
  EXPECT_THAT(std::string(Created(config_).front().message()), Not(HasSubstr("this machine")));
  EXPECT_THAT(log_, Not(HasSubstr("this machine")));
}

// It does not count memory that an advised change may need.
TEST_F(HostMemoryTest, AdviceDoesNotDependOnAnUntouchedWorkspace) {
  files_.Memory(NeededKib(config_) * 9 / 10, /*swap_kib=*/0);
  const auto advised = [&] {
    const std::string message(Created(config_).front().message());
    const size_t from = message.find("; {");
    return from == message.npos ? message
                                : message.substr(from, message.find("} would fit") - from);
  };
  const std::string without = advised();
  EXPECT_THAT(without, HasSubstr("; {"));
  model_.workspace_bytes = model_.workspace_untouched_bytes = int64_t{1} << 40;
  EXPECT_EQ(advised(), without);
}

TEST_F(HostMemoryTest, AControlGroupsLimitCountsBelowTheMachinesMemory) {
  const int64_t needed = NeededKib(config_) * 1024;
  files_.Memory(int64_t{1} << 40, 0);
  files_.Group("/job/step");
  files_.GroupMemory("/job/step", "max", 0, 0);
  files_.GroupMemory("/job", std::to_string(needed + 10'000), 20'000, 10'000);
  for (const absl::Status& status : Created(config_)) EXPECT_TRUE(status.ok()) << status;
  files_.GroupMemory("/job", std::to_string(needed + 9'999), 20'000, 10'000);
  for (const absl::Status& status : Created(config_)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("/sys/fs/cgroup/job (memory.max " + std::to_string(needed + 9'999)));
  }
}

TEST_F(HostMemoryTest, ACapAboveTheHostsMemoryIsAdvisedDown) {
  const Scratch scratch;
  config_ = OnNvme(ConfigFor({.world = kWorld, .stage = 3}), scratch.path());
  config_.zero.sub_group_size = 2048;
  const int64_t least = NeededKib(config_);
  config_.ebb.host_memory = int64_t{1} << 40;
  ASSERT_GT(NeededKib(config_), least);
  files_.Memory(NeededKib(config_) - 1, 0);
  const std::string message(Created(config_).front().message());
  EXPECT_THAT(message,
              AllOf(HasSubstr("; {\"ebb\": {\"host_memory\": "), HasSubstr("would fit (")));
  EXPECT_THAT(scratch.Entries(), IsEmpty());
}

TEST_F(HostMemoryTest, NothingIsCheckedWhereTheSystemSaysNothing) {
  for (const absl::Status& status : Created(config_)) EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace ebb::testing::host_memory_test
