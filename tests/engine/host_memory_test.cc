// A run that the host's memory cannot hold is refused before it takes any: the files that say what
// there is are the test's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "ebb/ebb.h"
#include "ebb/runtime/trace/resident_set.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/plan.h"
#include "tests/engine/scripted.h"
#include "tests/offload/has_once.h"
#include "tests/offload/scratch.h"
#include "tests/offload/status_line.h"
#include "tests/offload/system_files.h"
#include "tests/offload/test_overrides.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::host_memory_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int kWorld = 3;
constexpr int64_t kSavesKib = kWorld * (sharding::kSaveBufferBytes >> 10);

class HostMemoryTest : public ::testing::Test {
 protected:
  HostMemoryTest() {
    TestOverrides().system_root = files_.root();
    for (int u = 0; u < 8; ++u) {
      const UnitId unit = model_.AddUnit("unit" + std::to_string(u));
      model_.Add(unit,
                 {.name = "w" + std::to_string(u), .shape = {500'000}, .init = Constant(0.5f)});
      model_.forward.push_back({.unit = unit});
    }
  }
  ~HostMemoryTest() override { TestOverrides() = {}; }

  // The pools of all ranks in whole pages, and the staging of calls for state.
  int64_t NeededKib(const Config& config) const {
    const auto rows = PredictMemory(model_, kWorld, config);
    EXPECT_OK(rows);
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
  files_.Memory((NeededKib(config_) + kSavesKib) * 3 / 2, /*swap_kib=*/0);
  for (const absl::Status& status : Created(config_)) EXPECT_OK(status);
  EXPECT_THAT(log_, Not(HasSubstr("this machine")));
}

TEST_F(HostMemoryTest, PoolsThatLeaveNothingElseAreTakenWithOneWarning) {
  files_.Memory(NeededKib(config_), /*swap_kib=*/0);
  for (const absl::Status& status : Created(config_)) EXPECT_OK(status);
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
  EXPECT_THAT(status,
              StatusIs(absl::StatusCode::kResourceExhausted, "/sys/fs/cgroup/job (memory.max "));
}

TEST_F(HostMemoryTest, PoolsThatNeedSwapSpaceAreTakenWithOneWarning) {
  files_.Memory(NeededKib(config_) - 5, /*swap_kib=*/5);
  for (const absl::Status& status : Created(config_)) EXPECT_OK(status);
  EXPECT_THAT(log_, HasOnce("what does not fit will be swapped"));
}

TEST_F(HostMemoryTest, AnUntouchedWorkspaceIsNoReasonToRefuse) {
  const int64_t without = NeededKib(config_) + kSavesKib;
  files_.Memory(without * 3 / 2, 0);
  model_.workspace_bytes = int64_t{1} << 40;
  EXPECT_THAT(Created(config_).front(), Says("this machine"));
  model_.workspace_untouched_bytes = model_.workspace_bytes;
  // An allocation of so much may be refused by the system, but not here.
  EXPECT_THAT(std::string(Created(config_).front().message()), Not(HasSubstr("this machine")));
  EXPECT_THAT(log_, Not(HasSubstr("this machine")));
}

// Untouched workspace does not count as memory that an advised change may need.
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
  for (const absl::Status& status : Created(config_)) EXPECT_OK(status);
  files_.GroupMemory("/job", std::to_string(needed + 9'999), 20'000, 10'000);
  for (const absl::Status& status : Created(config_))
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kResourceExhausted,
                         "/sys/fs/cgroup/job (memory.max " + std::to_string(needed + 9'999)));
}

// State on NVMe passes through staging.
TEST_F(HostMemoryTest, ASaveThatDoesNotFitIsWarnedOfAndRefusedWithAdvice) {
  const Scratch scratch;
  for (const int64_t save_mib : {32, 48}) {
    if (save_mib == 48) config_ = OnNvme(ConfigFor({.world = kWorld, .stage = 3}), scratch.path());
    const int64_t needed = NeededKib(config_) * 1024 + kWorld * (save_mib << 20);
    files_.Memory(int64_t{1} << 40, 0);
    files_.Group("/job");
    const auto room_for_saves = [&](int64_t bytes) {
      files_.GroupMemory("/job", std::to_string(bytes), 0, 0);
      std::vector<absl::Status> statuses(kWorld);
      ::testing::internal::CaptureStderr();
      EXPECT_OK(RunThreads(kWorld, [&](World world) -> absl::Status {
        const auto engine = Engine::Create(world, Device::Cpu(1), model_, config_);
        if (engine.ok()) statuses[static_cast<size_t>(world.rank())] = engine->CheckRoomForSaves();
        return engine.status();
      }));
      log_ = ::testing::internal::GetCapturedStderr();
      return statuses;
    };
    for (const absl::Status& status : room_for_saves(needed)) EXPECT_OK(status);
    EXPECT_THAT(log_, Not(HasSubstr("a save")));
    const std::string bytes = absl::StrCat(save_mib, ".0 MiB");
    for (const absl::Status& status : room_for_saves(needed - kWorld)) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, "a save: " + bytes + ")"));
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("/sys/fs/cgroup/job"), HasSubstr("free memory")));
    }
    EXPECT_THAT(log_, HasOnce("a save does not fit, because it takes " + bytes + " more a rank"));
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
  for (const absl::Status& status : Created(config_)) EXPECT_OK(status);
}

// The process's peak in RAM is the prediction for its pools, plus its plans, within 5%. No memory
// is held twice, not even while it is made or locked, and no pool is larger than laid out.

constexpr int64_t kMebi = int64_t{1} << 20;
constexpr double kTolerance = 0.05;

TEST(ResidentSetTest, IsReadFromTheKernelsStatus) {
  const Scratch scratch;
  const std::string file = scratch.path() + "/status";
  const auto write = [&](const char* text) { std::ofstream(file) << text; };
  EXPECT_FALSE(ReadResidentSet(file).has_value());
  write("Name:\tVmRSS: 1 kB\nVmHWM:\t  2048 kB\nVmRSS:\t     4 kB\nRssAnon:\t   3 kB\n");
  const auto read = ReadResidentSet(file);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->bytes, 4096);
  EXPECT_EQ(read->peak_bytes, 2 * kMebi);
  write("VmRSS:\t     4 kB\n");
  EXPECT_FALSE(ReadResidentSet(file).has_value()) << "without a peak";
}

struct Case {
  const char* name;
  Tier tier = Tier::kDevice;  // of parameters and of states
  bool pins = false;
  int ranks = 1;
  int units = 20;
  int64_t unit_parameters = kMebi;
  std::optional<int64_t> host_memory = {};  // the cap of a rank
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

// By how much a count of the system's may be wrong: bytes. Since Linux 6.2 each of n processors
// that may exist keeps up to max(32, 2 n) pages back from each of three counters (of files',
// anonymous and shared pages). /proc reads the counters without asking the processors.
double CountingError() {
  const auto processors = static_cast<double>(sysconf(_SC_NPROCESSORS_CONF));
  return 3 * processors * std::max(32.0, 2 * processors) *
         static_cast<double>(sysconf(_SC_PAGESIZE));
}

// Measurements of a process, in bytes.
struct Measured {
  int64_t before = 0;     // resident before the engines were created
  int64_t predicted = 0;  // of all ranks: pools that are RAM, and plans
  int64_t created = 0;    // the peak when all were
  int64_t peak = 0;       // after the steps
  int64_t swapped = 0;    // out of RAM by then
};

// A step of a trainer without memory of its own.
absl::Status RunStep(Engine& engine, int units) {
  Step step = engine.BeginStep();
  for (int u = 0; u < units; ++u) step.Forward(UnitId{u}).Close();
  for (int u = units; u-- > 0;) {
    BackwardScope scope = step.Backward(UnitId{u});
    for (BFloat16& g : scope.gradient(ParameterId{u}).as<BFloat16>()) g = BFloat16(1e-3f);
  }
  return step.Finish();
}

absl::StatusOr<Measured> Train(const Case& c, const std::string& disk) {
  Config config;
  config.micro_batch_size = 1;
  config.compute = DType::kBFloat16;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.zero.sub_group_size = kMebi;
  config.zero.offload_param = {
      .device = c.tier, .nvme_paths = {disk}, .max_in_cpu = 0, .pin_memory = c.pins};
  config.zero.offload_optimizer = {.device = c.tier, .nvme_paths = {disk}, .pin_memory = c.pins};
  config.ebb.host_memory = c.host_memory;
  ModelSpec model;
  for (int u = 0; u < c.units; ++u) {
    const UnitId unit = model.AddUnit(absl::StrCat("unit", u));
    model.Add(unit,
              {.name = absl::StrCat("w", u), .shape = {c.unit_parameters}, .init = Constant(0.5f)});
    model.forward.push_back({.unit = unit});
  }

  Measured measured;
  const auto before = ReadResidentSet();
  if (!before) return absl::UnavailableError("/proc/self/status is gone");
  measured.before = before->bytes;
  std::atomic<int64_t> predicted{0}, created{0};
  const absl::Status status = RunThreads(c.ranks, [&](World world) -> absl::Status {
    auto engine = Engine::Create(world, Device::Cpu(1), model, config);
    if (!engine.ok()) return engine.status();
    predicted += engine->program().plan().OwnBytes();
    for (const MemoryRow& row : engine->memory())
      if (row.tier != Tier::kNvme) predicted += static_cast<int64_t>(row.predicted_bytes);
    created = ReadResidentSet()->peak_bytes;
    for (int s = 0; s < 3; ++s)
      if (absl::Status step = RunStep(*engine, c.units); !step.ok()) return step;
    return engine->Report().status();
  });
  if (!status.ok()) return status;
  measured.predicted = predicted;
  measured.created = created;
  measured.peak = ReadResidentSet()->peak_bytes;
  measured.swapped = StatusBytes("VmSwap");
  return measured;
}

// Trains in a separate process, so that its peak is that of Train alone.
Measured TrainForked(const Case& c, const std::string& disk) {
  Measured measured;
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const absl::StatusOr<Measured> result = Train(c, disk);
    if (!result.ok()) std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
    _exit(result.ok() && write(ends[1], &*result, sizeof(Measured)) == sizeof(Measured) ? 0 : 1);
  }
  close(ends[1]);
  EXPECT_EQ(read(ends[0], &measured, sizeof(measured)), static_cast<ssize_t>(sizeof(measured)));
  close(ends[0]);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  return measured;
}

class ResidentSetOfEnginesTest : public ::testing::TestWithParam<Case> {};

TEST_P(ResidentSetOfEnginesTest, PeaksAtThePrediction) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizers' shadow of the pools is resident, too";
#endif
  if (!ReadResidentSet()) GTEST_SKIP() << "/proc/self/status does not say what is resident";
  const Scratch scratch;
  const Measured m = TrainForked(GetParam(), scratch.path());
  const double predicted = static_cast<double>(m.predicted);
  const auto grown = [&](int64_t bytes) { return static_cast<double>(bytes - m.before); };
  const double error = 2 * CountingError();  // growth is the difference of two counts
  SCOPED_TRACE(absl::StrFormat(
      "MiB: %.1f before, %.1f predicted, grown by %.1f at Create and %.1f, counted to %.1f",
      static_cast<double>(m.before) / kMebi, predicted / kMebi, grown(m.created) / kMebi,
      grown(m.peak) / kMebi, error / kMebi));
  EXPECT_LE(grown(m.created), predicted * (1 + kTolerance) + error);
  EXPECT_LE(grown(m.peak), predicted * (1 + kTolerance) + error);
  // Steps write to all of every pool. Where memory is short some of it may have left RAM before the
  // rest came, and how much of it nothing says.
  if (m.swapped != 0) GTEST_SKIP() << "swapped out, so not all was in RAM at once: " << m.swapped;
  EXPECT_GE(grown(m.peak), predicted * (1 - kTolerance) - error);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ResidentSetOfEnginesTest,
    ::testing::Values(
        Case{.name = "OnNvmeWithACap",
             .tier = Tier::kNvme,
             .pins = true,
             .units = 24,
             .host_memory = 280 * kMebi},
        Case{.name = "InRamPinned", .tier = Tier::kCpu, .pins = true},
        Case{.name = "InRam", .tier = Tier::kCpu}, Case{.name = "OnTheDevice"},
        Case{.name = "TwoRanksInRamPinned", .tier = Tier::kCpu, .pins = true, .ranks = 2},
        // Sizes of units and of pools: 128.5 MiB of masters, 257 of optimizer states.
        Case{.name = "JustAbovePowersOfTwo",
             .tier = Tier::kCpu,
             .pins = true,
             .units = 32,
             .unit_parameters = kMebi + 4096}),
    [](const auto& c) { return std::string(c.param.name); });

}  // namespace
}  // namespace ebb::testing::host_memory_test
