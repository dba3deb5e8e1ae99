// What Suspend gives back and Resume takes again: in the ledger, from the system, and on all ranks
// or on none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <limits>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/backend.h"
#include "tests/engine/snapshot.h"

namespace ebb::testing::suspension_memory_test {
namespace {

using ::testing::HasSubstr;

class SuspensionMemoryTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, SuspensionMemoryTest,
                         ::testing::ValuesIn(WorldsAndStages({1, 2, 4})), NameOf);

// The rows of one tier, and only these.
std::vector<MemoryRow> RowsOf(const Engine& engine, Tier tier) {
  std::vector<MemoryRow> rows = engine.memory();
  std::erase_if(rows, [&](const MemoryRow& row) { return row.tier != tier; });
  return rows;
}

TEST_P(SuspensionMemoryTest, GivesThePoolsBackAndTakesThemAgain) {
  ModelSpec model = ScriptedModel(/*boundary_bytes=*/512);
  model.workspace_bytes = 5000;
  Config config = ConfigFor(GetParam());
  config.compute = DType::kBFloat16;
  RunOn(GetParam(), model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    const std::vector<MemoryRow> before = RowsOf(engine, Tier::kDevice);
    EXPECT_TRUE(RowsOf(engine, Tier::kCpu).empty());
    for (int n = 0; n < 2; ++n) {
      EBB_RETURN_IF_ERROR(engine.Suspend());
      for (const MemoryRow& row : RowsOf(engine, Tier::kDevice)) {
        EXPECT_EQ(row.current_bytes, 0u) << Name(row.state);
        EXPECT_GT(row.peak_bytes, 0u);
        EXPECT_EQ(row.peak_bytes, row.predicted_bytes);
      }
      std::vector<std::string> kept;
      for (const MemoryRow& row : RowsOf(engine, Tier::kCpu)) {
        kept.emplace_back(Name(row.state));
        for (const MemoryRow& device : before) {
          if (device.state != row.state) continue;
          EXPECT_EQ(row.current_bytes, device.current_bytes);
          EXPECT_EQ(row.peak_bytes, device.current_bytes);
          EXPECT_EQ(row.predicted_bytes, device.current_bytes);
        }
      }
      EXPECT_THAT(kept, ::testing::ElementsAre("parameter", "master", "optimizer"));
      EBB_RETURN_IF_ERROR(engine.Resume());
      const std::vector<MemoryRow> after = RowsOf(engine, Tier::kDevice);
      EXPECT_EQ(after.size(), before.size());
      for (size_t i = 0; i < std::min(after.size(), before.size()); ++i) {
        EXPECT_EQ(after[i].current_bytes, before[i].current_bytes) << Name(after[i].state);
        EXPECT_EQ(after[i].peak_bytes, before[i].peak_bytes) << Name(after[i].state);
      }
      for (const MemoryRow& row : RowsOf(engine, Tier::kCpu)) EXPECT_EQ(row.current_bytes, 0u);
      EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, n + 1));
    }
    return absl::OkStatus();
  });
}

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * 4096;
}

TEST(SuspensionMemory, TheSystemHasTheMemoryAgain) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  ModelSpec model = ScriptedModel();
  model.workspace_bytes = kBytes;
  const Setting setting{.world = 1};
  RunOn(setting, model, ConfigFor(setting), [&](Engine& engine, ScriptedTrainer& trainer) {
    std::memset(engine.workspace().data, 1, static_cast<size_t>(kBytes));
    const int64_t full = ResidentBytes();
    EBB_RETURN_IF_ERROR(engine.Suspend());
    EXPECT_LE(ResidentBytes(), full - kBytes * 3 / 4);
    EXPECT_EQ(engine.workspace().data, nullptr);
    EBB_RETURN_IF_ERROR(engine.Resume());
    EXPECT_EQ(engine.workspace().size(), kBytes);
    return TrainStep(engine, trainer, 0);
  });
}

// A CPU with as much memory as a test says.
class LimitedCpu : public DeviceBackend {
 public:
  explicit LimitedCpu(const int64_t& bytes_max) : bytes_max_(bytes_max) {}

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string description() const override { return "a limited CPU"; }
  absl::StatusOr<std::unique_ptr<StreamBackend>> NewStream(std::string_view name,
                                                           int tasks_max) override {
    return cpu_.backend().NewStream(name, tasks_max);
  }
  std::unique_ptr<StreamBackend> CallerStream() override { return cpu_.backend().CallerStream(); }
  absl::StatusOr<std::unique_ptr<EventBackend>> NewEvent() override {
    return cpu_.backend().NewEvent();
  }
  absl::StatusOr<Buffer> Allocate(int64_t bytes, std::string_view what) override {
    if (bytes > bytes_max_) return absl::ResourceExhaustedError("this machine is full");
    return cpu_.Allocate(bytes, what);
  }

 private:
  Device cpu_ = Device::Cpu(1);
  const int64_t& bytes_max_;
};

TEST_P(SuspensionMemoryTest, ResumesOnAllRanksOrOnNone) {
  const int world = GetParam().world;
  const ModelSpec model = ScriptedModel();
  const absl::Status status = RunThreads(world, [&](World w) -> absl::Status {
    int64_t bytes_max = std::numeric_limits<int64_t>::max();
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(w, Device(std::make_shared<LimitedCpu>(bytes_max)), model,
                                        ConfigFor(GetParam()), {.name = "policy"}));
    ScriptedTrainer trainer(model, w.rank());
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    EBB_ASSIGN_OR_RETURN(const Snapshot before, TakeSnapshot(engine, model));
    EBB_RETURN_IF_ERROR(engine.Suspend());
    if (w.rank() + 1 == world) bytes_max = 100;
    const absl::Status full = engine.Resume();
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
    EXPECT_THAT(std::string(full.message()), HasSubstr("this machine is full"));
    for (const MemoryRow& row : RowsOf(engine, Tier::kDevice))
      EXPECT_EQ(row.current_bytes, 0u) << Name(row.state);
    EXPECT_THAT(std::string(engine.BeginStep().Finish().message()), HasSubstr("is suspended"));
    bytes_max = std::numeric_limits<int64_t>::max();
    EBB_RETURN_IF_ERROR(engine.Resume());
    EBB_ASSIGN_OR_RETURN(const Snapshot after, TakeSnapshot(engine, model));
    EXPECT_EQ(before, after);
    return TrainStep(engine, trainer, 1);
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace ebb::testing::suspension_memory_test
