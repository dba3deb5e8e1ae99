// An engine where the system refuses io_uring, as a container's seccomp profile does: it trains
// with threads in its place, to the same bits, and says so once. The test also reads the arguments
// of the system calls.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/io_uring.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "ebb/offload/file_handle.h"
#include "ebb/offload/io_error.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/offload/shard_file.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/new_process.h"
#include "tests/offload/denied.h"
#include "tests/offload/faulty_queue.h"
#include "tests/offload/has_once.h"
#include "tests/offload/locked_memory.h"
#include "tests/offload/ordinary_user.h"
#include "tests/offload/scratch.h"
#include "tests/offload/test_overrides.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::denied_swap_test {
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

TEST(DeniedSwapTest, ThreadsReplaceIoUringWithTheSameBitsAndOneLogLine) {
  InNewProcess([] {
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
      ASSERT_OK(denied[i]);
      ASSERT_TRUE(on_device.ok() && allowed.ok()) << on_device.status() << allowed.status();
      EXPECT_EQ(*denied[i], *on_device);
      EXPECT_EQ(*denied[i], *allowed);
    }
    // Two ranks, two files each, three engines.
    EXPECT_THAT(log, HasOnce("Going on with threads"));
    EXPECT_THAT(log, ::testing::ContainsRegex("io_uring is not available: Operation not permitted|"
                                              "this build has no io_uring"));
    EXPECT_THAT(scratch.Entries(), ::testing::IsEmpty());
  });
}

TEST(DeniedSwapTest, IoUringThatIsAskedForIsAnErrorOfCreateOnEveryRank) {
  const Scratch scratch;
  Config config = OnNvme(DeviceConfig(Timing::kLate), scratch.path());
  config.ebb.io_backend = IoBackend::kUring;
  std::vector<absl::Status> statuses;
  const bool ran = RunRefused(kRefusal, [&] {
    statuses = StatusesOnThreads(kWorld, [&](World world) {
      return Engine::Create(world, Device::Cpu(1), ToyModel({}).spec(), config).status();
    });
  });
  if (!ran) GTEST_SKIP() << "no seccomp filter can be set here";
  for (const absl::Status& status : statuses)
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, "io_uring",
                                 "ebb.io_backend \"auto\""));
  EXPECT_THAT(scratch.Entries(), ::testing::IsEmpty());
}

// Each ring in another way, while one more of the process reads.
TEST(DeniedSwapTest, RingsThatAreRefusedForEverEndAStepAndACreateTogether) {
  constexpr int kErrors[] = {EAGAIN, EINTR, EBUSY};
  constexpr int kRings = kWorld * 2;
  constexpr int kMany = 20'000;  // calls, after which they are refused no more
  Refusals::ForgetGivenUp();
  const Scratch scratch;
  std::atomic<bool> refuses = false;
  std::atomic<int> calls = 0;
  std::atomic<int64_t> ring_that_reads = -1;
  const auto answer = [&](std::span<const uint64_t, 6> arguments) {
    const auto ring = static_cast<int64_t>(arguments[0]);
    if (arguments[1] == 0) return 0;  // which hands nothing over
    if (ring_that_reads < 0) ring_that_reads = ring;
    if (!refuses || ring == ring_that_reads || ++calls > kMany) return 0;
    return kErrors[ring % 3];
  };
  bool has_rings = true;
  std::vector<absl::Status> steps(kWorld), creates(kWorld);
  const bool ran = RunAnswered(SYS_io_uring_enter, answer, [&] {
    ShardFile::Options options;
    options.directories = scratch.Directories(1);
    options.name = "reads";
    options.bytes = 4096;
    options.backend = IoBackend::kUring;
    const auto file = ShardFile::Create(options);
    has_rings = file.ok();
    if (!has_rings) return;
    std::atomic<bool> reads = true;
    std::thread reader([&] {
      const PinnedMemory memory = Memory(4096);
      while (reads) {
        IoTransfer transfer;
        (*file)->StartWrite(transfer, 0, memory.buffer.data(), 4096);
        EXPECT_EQ((*file)->Wait(transfer), absl::OkStatus());
      }
    });
    Config config = OnNvme(DeviceConfig(Timing::kLate), scratch.path());
    config.ebb.io_backend = IoBackend::kUring;
    RunThreads(kWorld, [&](World world) -> absl::Status {
      const auto rank = static_cast<size_t>(world.rank());
      ToyModel model({.width = 67});
      auto engine = Engine::Create(world, Device::Cpu(1), model.spec(), config);
      if (!engine.ok()) return engine.status();
      for (int step = 0; step < kSteps && steps[rank].ok(); ++step) {
        if (step == 2) refuses = true;
        steps[rank] = model.Train(*engine, world.rank(), step);
      }
      return absl::OkStatus();
    }).IgnoreError();
    creates = StatusesOnThreads(kWorld, [&](World world) {
      return Engine::Create(world, Device::Cpu(1), ToyModel({}).spec(), config).status();
    });
    reads = false;
    reader.join();
  });
  Refusals::ForgetGivenUp();
  if (!ran) GTEST_SKIP() << "no seccomp filter can be set here";
  if (!has_rings) GTEST_SKIP() << "no io_uring here";
  for (const absl::Status& status : steps)
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  for (const absl::Status& status : creates)
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_LE(calls, kRings * (1000 + 2 * 17));
}

// To an ordinary user more than a little locked memory is denied: pools stay unpinned and buffers
// unregistered.
TEST(MemlockDeathTest, AnOrdinaryUserTrainsToTheSameBitsWithOneLogLine) {
  if (const auto why = WhyNotOrdinaryUser()) GTEST_SKIP() << *why;
  const Scratch scratch;
  constexpr int kCannotTrain = 4;  // after the exit codes of OrdinaryUserExit
  const auto as_ordinary_user = [&] {
    const rlimit limit = {64 << 10, 64 << 10};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) _exit(kCannotSetLimit);
    if (BecomeOrdinaryUser() != 0) _exit(kCannotBecomeOrdinary);
    for (const Timing timing : kTimings) {
      Config config = OnNvme(DeviceConfig(timing), scratch.path());
      config.zero.offload_param.pin_memory = config.zero.offload_optimizer.pin_memory = true;
      const auto expected = Trained(DeviceConfig(timing)), bits = Trained(config);
      if (!expected.ok() || !bits.ok()) {
        std::fprintf(stderr, "%s\n%s\n", expected.status().ToString().c_str(),
                     bits.status().ToString().c_str());
        _exit(kCannotTrain);
      }
      if (*expected != *bits) _exit(kNotAsExpected);
    }
    _exit(kAsExpected);
  };
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  const auto said = HasSubstr("");  // the sanitizers make mlock do nothing
#else
  const auto said = AllOf(HasOnce("cannot pin "), HasSubstr(kRaiseLockedMemory));
#endif
  EXPECT_EXIT(as_ordinary_user(), ::testing::ExitedWithCode(kAsExpected), said);
  EXPECT_THAT(scratch.Entries(), ::testing::IsEmpty());
}

// Nothing is refused here: the system is asked to register all that is read and written in steps.
TEST(RegisteredSwapTest, AllTransfersUseMemoryRegisteredWithTheRings) {
  const Scratch scratch;
  // Like the system, reads memory that calls point at. No tool sees that the calling thread waits
  // meanwhile.
  const FileHandle memory(open("/proc/self/mem", O_RDONLY | O_CLOEXEC));
  std::vector<iovec> registered;
  int calls = 0;
  const auto look = [&](std::span<const uint64_t, 6> arguments) {
    ++calls;
    if (arguments[1] == IORING_REGISTER_BUFFERS) {
      std::vector<iovec> vectors(arguments[3]);
      const size_t bytes = vectors.size() * sizeof(iovec);
      EXPECT_EQ(pread(memory.get(), vectors.data(), bytes, static_cast<off_t>(arguments[2])),
                static_cast<ssize_t>(bytes));
      registered.insert(registered.end(), vectors.begin(), vectors.end());
    }
    return 0;
  };
  std::mutex mutex;
  bool in_steps = false;
  std::vector<std::span<const std::byte>> moved;
  TestOverrides().wrap_queue = [&](std::string_view, std::string_view) {
    return WithFaults([&](IoRequest& request) -> std::optional<int64_t> {
      const std::lock_guard lock(mutex);
      if (in_steps) moved.emplace_back(request.data, static_cast<size_t>(request.bytes));
      return std::nullopt;
    });
  };
  std::vector<absl::Status> trained;
  const bool ran = RunAnswered(SYS_io_uring_register, look, [&] {
    for (const Timing timing : kTimings) {
      ToyModel model({.width = 67, .boundaries = true});
      Config config = OnNvme(DeviceConfig(timing), scratch.path());
      config.ebb.offload_gradients = config.ebb.offload_activations = Tier::kNvme;
      auto engine = Engine::Create(World::Single(), Device::Cpu(1), model.spec(), config);
      trained.push_back(engine.status());
      if (!engine.ok()) continue;
      const auto watch = [&](bool watches) {
        engine->traffic();  // waits for pending updates
        const std::lock_guard lock(mutex);
        in_steps = watches;
      };
      watch(true);
      for (int step = 0; step < kSteps; ++step) trained.push_back(model.Train(*engine, 0, step));
      watch(false);
    }
  });
  TestOverrides() = {};
  if (!ran) GTEST_SKIP() << "no seccomp filter can be set here";
  if (calls == 0) GTEST_SKIP() << "no io_uring here";
  for (const absl::Status& status : trained) EXPECT_EQ(status, absl::OkStatus());
  const auto is_registered = [&](std::span<const std::byte> data) {
    return std::any_of(registered.begin(), registered.end(), [&](const iovec& buffer) {
      const auto* const begin = static_cast<const std::byte*>(buffer.iov_base);
      return begin <= data.data() && data.data() + data.size() <= begin + buffer.iov_len;
    });
  };
  EXPECT_FALSE(moved.empty());
  EXPECT_EQ(std::count_if(moved.begin(), moved.end(), std::not_fn(is_registered)), 0)
      << "of " << moved.size();
}

}  // namespace
}  // namespace ebb::testing::denied_swap_test
