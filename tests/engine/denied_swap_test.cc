// An engine where the system refuses io_uring, as a container's seccomp profile does: it trains with
// threads in its place, to the same bits, and says so once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <cerrno>
#include <optional>
#include <vector>

#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/denied.h"
#include "tests/offload/has_once.h"
#include "tests/offload/scratch.h"

namespace ebb::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kWorld = 2, kSteps = 4;

Config DeviceConfig(Timing timing) {
  return ConfigFor({.world = kWorld, .stage = 3, .timing = timing});
}

absl::StatusOr<std::vector<uint32_t>> Trained(const Config& config) {
  return TrainedMasterBits(kWorld, ToyModel({.width = 67}), config, kSteps);
}

// Threads that it starts, the ranks', are refused the same.
constexpr Refusal kRefusal = {.system_call = SYS_io_uring_setup, .error = EPERM};

TEST(DeniedSwapTest, ThreadsTakeThePlaceOfIoUringAtTheSameBitsAndItIsSaidOnce) {
  const Scratch scratch;
  ::testing::internal::CaptureStderr();
  std::vector<absl::StatusOr<std::vector<uint32_t>>> denied;
  const bool ran = RunRefused(kRefusal, [&] {
    for (const Timing timing : kTimings)
      denied.push_back(Trained(OnNvme(DeviceConfig(timing), scratch.path())));
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  if (!ran) GTEST_SKIP() << "no seccomp filter can be set here";
  for (size_t i = 0; i < denied.size(); ++i) {
    const Config config = DeviceConfig(kTimings[i]);
    const auto on_device = Trained(config), allowed = Trained(OnNvme(config, scratch.path()));
    ASSERT_TRUE(denied[i].ok()) << denied[i].status();
    ASSERT_TRUE(on_device.ok() && allowed.ok()) << on_device.status() << allowed.status();
    EXPECT_EQ(*denied[i], *on_device);
    EXPECT_EQ(*denied[i], *allowed);
  }
  // Two ranks, two files each, three engines.
  EXPECT_THAT(log, HasOnce("Going on with threads"));
  EXPECT_THAT(log, ::testing::ContainsRegex("io_uring is not available: Operation not permitted|"
                                            "this build has no io_uring"));
  EXPECT_THAT(scratch.Entries(), ::testing::IsEmpty());
}

TEST(DeniedSwapTest, IoUringThatIsAskedForIsAnErrorOfCreateOnEveryRank) {
  const Scratch scratch;
  Config config = OnNvme(DeviceConfig(Timing::kLate), scratch.path());
  config.ebb.io_backend = IoBackend::kUring;
  std::vector<absl::Status> statuses(kWorld);
  const bool ran = RunRefused(kRefusal, [&] {
    RunThreads(kWorld, [&](World world) {
      return statuses[static_cast<size_t>(world.rank())] =
                 Engine::Create(world, Device::Cpu(1), ToyModel({}).spec(), config).status();
    }).IgnoreError();
  });
  if (!ran) GTEST_SKIP() << "no seccomp filter can be set here";
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("io_uring"), HasSubstr("ebb.io_backend \"auto\"")));
  }
  EXPECT_THAT(scratch.Entries(), ::testing::IsEmpty());
}

}  // namespace
}  // namespace ebb::testing
