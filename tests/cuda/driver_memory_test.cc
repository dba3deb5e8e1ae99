// What the driver and libraries take of a GPU, in the memory table. On the stand-in, which says how
// much each of them takes.
#include "ebb/runtime/device/driver_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <vector>

#include "ebb/runtime/config/status_macros.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "tests/engine/scripted.h"

namespace ebb::testing::driver_memory_test {
namespace {

class DriverMemoryTest : public ::testing::Test {
 protected:
  void TearDown() override { stand_in::Reset(); }

  static std::vector<MemoryRow> DriverRows(const Engine& engine) {
    std::vector<MemoryRow> rows = engine.memory();
    std::erase_if(rows, [](const MemoryRow& row) { return row.state != StateClass::kDriver; });
    return rows;
  }

  static void ExpectOneDriverRow(const Engine& engine, const Device& device) {
    const std::vector<MemoryRow> rows = DriverRows(engine);
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0].tier, Tier::kDevice);
    EXPECT_EQ(rows[0].predicted_bytes, 0u);
    EXPECT_EQ(rows[0].current_bytes, static_cast<uint64_t>(device.driver_bytes()));
    EXPECT_GE(rows[0].peak_bytes, rows[0].current_bytes);
    EXPECT_GE(rows[0].current_bytes,
              static_cast<uint64_t>(stand_in::kContextBytes + stand_in::kCommunicatorBytes));
  }
};

TEST_F(DriverMemoryTest, IsMeasuredAroundAllocations) {
  const Device device = *Device::Cuda();
  const int64_t before = device.driver_bytes();
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  cudaGraph_t graph = nullptr;
  {
    const DriverMemory::Measured outer(device), nested(device);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  }
  EXPECT_EQ(device.driver_bytes(), before + stand_in::kGraphBytes);
  {
    const DriverMemory::Measured measured(device);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  EXPECT_EQ(device.driver_bytes(), before);
  cudaStreamDestroy(stream);
}

// Ranks that share a GPU share the measurement: no rank makes or destroys an engine while another
// reads it.
TEST_F(DriverMemoryTest, IsARowOfAnEngineOverNccl) {
  const NcclSharesDevice nccl(true);
  std::barrier together(2);
  const absl::Status status = RunThreads(2, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
    const absl::StatusOr<Engine> engine =
        Engine::Create(world, device, ScriptedModel(), ConfigFor({.world = 2, .stage = 2}));
    together.arrive_and_wait();
    if (engine.ok()) ExpectOneDriverRow(*engine, device);
    together.arrive_and_wait();
    return engine.status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(DriverMemoryTest, HasNoRowOnTheCpu) {
  EXPECT_EQ(Device::Cpu().driver_bytes(), 0);
  const absl::StatusOr<Engine> engine = Engine::Create(
      World::Single(), Device::Cpu(1), ScriptedModel(), ConfigFor({.world = 1, .stage = 2}));
  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_TRUE(DriverRows(*engine).empty());
}

}  // namespace
}  // namespace ebb::testing::driver_memory_test
