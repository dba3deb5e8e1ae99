// Ranks with a stand-in GPU each, connected by the NCCL of the stand-in.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/device.h"
#include "stand_in.h"
#include "tests/status.h"
#include "thread_ranks.h"

namespace ebb::nccl_ranks {

inline constexpr DType kType = DType::kFloat32;
inline constexpr double kShort = 0.2;  // a time-out that the test waits for

inline std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

class NcclFailureTest : public ::testing::Test {
 protected:
  static constexpr int kRanksMax = 4;  // each with its own device, as processes have

  void SetUp() override { stand_in::SetDevices(kRanksMax); }
  void TearDown() override {
    EXPECT_EQ(stand_in::Alive(), stand_in::Live{}) << "something was not given back";
    stand_in::Reset();
  }

  // Runs `body` on every rank. Its result is what that rank saw.
  std::vector<absl::Status> Seen(int ranks, std::function<absl::Status(World&)> body) {
    std::vector<absl::Status> seen(static_cast<size_t>(ranks));
    testing::ExpectOk(testing::RunOnGpus(ranks, kRanksMax, [&](World world) {
      seen[static_cast<size_t>(world.rank())] = body(world);
      return absl::OkStatus();
    }));
    return seen;
  }
};

// Memory of a rank's device and a stream, for one operation after another.
struct Gpu {
  explicit Gpu(const World& world) : device(*Device::Cuda(world.rank())) {}
  Device device;
  Stream stream = *device.NewStream("comm");
  Buffer memory = *device.Allocate(4096, "test");
  CollectiveSpan InPlace(int64_t count = 4) const {
    return {.send = memory.data(), .receive = memory.data(), .count = count};
  }
};

// Waits for enqueued work and returns the communicator's status.
inline absl::Status Outcome(Communicator& communicator, Stream& stream) {
  stream.WaitIdle();
  return communicator.status();
}

}  // namespace ebb::nccl_ranks
