// Agreements of ranks on a device, and values that they pass to each other, through a mirror that
// is smaller than the values. On the stand-in.
#include "ebb/runtime/engine/ranks/host_lane.h"

#include <gtest/gtest.h>

#include <numeric>
#include <span>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "tests/ranks.h"
#include "tests/status.h"
#include "thread_ranks.h"

namespace ebb::host_lane_test {
namespace {

std::vector<int64_t> ListOf(int rank) {
  std::vector<int64_t> list(static_cast<size_t>(7 + 31 * rank));
  std::iota(list.begin(), list.end(), 1000 * rank);
  return list;
}

TEST(HostLaneTest, ListsLongerThanTheMirrorGoInPieces) {
  constexpr int kRanks = 3;
  std::vector<std::vector<int64_t>> expected;
  for (int rank = 0; rank < kRanks; ++rank) expected.push_back(ListOf(rank));
  for (const int64_t bytes : {64, 256, 1000, 1 << 20}) {  // the mirror's sizes
    testing::ExpectOk(testing::RunOnGpu(kRanks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
      EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
      EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("comm"));
      MemoryLedger ledger;
      DeviceMirror mirror;
      EBB_RETURN_IF_ERROR(mirror.Allocate(device, bytes, ledger));
      EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all,
                           AllLists({communicator, stream, mirror, world}, ListOf(world.rank())));
      EXPECT_EQ(all, expected) << bytes;
      return absl::OkStatus();
    }));
  }
  stand_in::Reset();
}

ModelSpec ModelOf(int64_t elements, ParameterId& parameter) {
  ModelSpec model;
  const UnitId unit = model.AddUnit("unit");
  parameter =
      model.Add(unit, {.name = "weight",
                       .shape = {elements},
                       .init = [](const Slice& slice, std::span<float> values) {
                         std::iota(values.begin(), values.end(), static_cast<float>(slice.begin));
                         return absl::OkStatus();
                       }});
  model.forward.push_back({.unit = unit});
  return model;
}

Config ShardedConfig() {
  Config config;
  config.micro_batch_size = 1;
  config.zero.stage = 3;
  return config;
}

// A rank's part of the parameter is larger than one piece that an engine passes on a device.
TEST(HostLaneTest, AParameterIsGatheredInPieces) {
  constexpr int kRanks = 2;
  constexpr int64_t kElements = 700'001;
  ParameterId parameter{};
  const ModelSpec model = ModelOf(kElements, parameter);
  std::vector<float> expected(kElements);
  std::iota(expected.begin(), expected.end(), 0.0f);
  const Config config = ShardedConfig();
  for (const bool nccl : {false, true}) {
    const testing::NcclSharesDevice shares(nccl);
    testing::OnThreads(kRanks, [&](World world) {
      ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
      ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, device, model, config));
      for (const int root : {-1, 0, 1}) {
        std::vector<float> whole(root < 0 || root == world.rank() ? kElements : 0);
        ASSERT_OK(engine.Gather(parameter, StateClass::kMaster, whole, root));
        EXPECT_TRUE(whole.empty() || whole == expected) << "to " << root;
      }
    });
  }
  stand_in::Reset();
}

// In the rows of staging, beside the plan's.
TEST(HostLaneTest, TheMirrorsAreInTheTableOfMemory) {
  constexpr int kRanks = 2;
  ParameterId parameter{};
  const ModelSpec model = ModelOf(5000, parameter);
  const Config config = ShardedConfig();
  const std::vector<MemoryRow> planned = *PredictMemory(model, kRanks, config);
  // The engine's memory on the device beside the plan's; all that is left if it is suspended.
  const auto beside = [&](const Engine& engine, bool suspended) {
    uint64_t bytes = 0;
    for (const MemoryRow& row : engine.memory()) {
      if (row.state == StateClass::kDriver) continue;
      EXPECT_EQ(row.predicted_bytes, row.peak_bytes) << Name(row.state);
      if (row.tier == Tier::kDevice) bytes += suspended ? row.current_bytes : row.predicted_bytes;
    }
    for (const MemoryRow& row : planned)
      if (row.tier == Tier::kDevice && !suspended) bytes -= row.predicted_bytes;
    return bytes;
  };
  testing::OnThreads(kRanks, [&](World world) {
    constexpr uint64_t kAgreement = 1 << 20, kCopy = 8 << 20;
    ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
    ASSERT_OK_AND_ASSIGN(Engine from, Engine::Create(world, device, model, config));
    ASSERT_OK_AND_ASSIGN(Engine into, Engine::Create(world, device, model, config));
    EXPECT_EQ(beside(into, /*suspended=*/false), kAgreement);
    ASSERT_OK(into.CopyParametersFrom(from));
    ASSERT_OK(into.CopyParametersFrom(from));
    EXPECT_EQ(beside(from, /*suspended=*/false), kAgreement);
    EXPECT_EQ(beside(into, /*suspended=*/false), kAgreement + kCopy);
    ASSERT_OK(into.Suspend());
    EXPECT_EQ(beside(into, /*suspended=*/true), kAgreement + kCopy);
    ASSERT_OK(into.Resume());
    EXPECT_EQ(beside(into, /*suspended=*/false), kAgreement + kCopy);
  });
  stand_in::Reset();
}

}  // namespace
}  // namespace ebb::host_lane_test
