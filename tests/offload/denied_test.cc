// Machines that refuse the fastest way: each time there is another one, and a line in the log.
#include "denied.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

#include "ebb/offload/shard_file.h"
#include "ebb/runtime/device/cpu/pages.h"
#include "ebb/runtime/device/device.h"
#include "has_once.h"
#include "locked_memory.h"
#include "made_files.h"
#include "ordinary_user.h"
#include "scratch.h"
#include "tests/new_process.h"
#include "tests/status.h"

namespace ebb::testing::denied_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kBytes = int64_t{4} << 20;

// The result of RoundTrips under `refusal`, and the log.
struct Outcome {
  std::string description;
  std::string log;
};
class DeniedTest : public ::testing::Test {
 protected:
  ShardFile::Options Options(IoBackend backend = IoBackend::kAuto) const {
    ShardFile::Options options;
    options.directories = scratch_.Directories(2);
    options.name = "shards";
    options.bytes = kBytes;
    options.memory = {memory_.buffer.span()};
    options.backend = backend;
    return options;
  }
  // Writes and reads a file, twice, and returns how it reached the disk.
  std::string RoundTrips(const ShardFile::Options& options) const {
    std::string description;
    for (int i = 0; i < 2; ++i) {
      auto file = ShardFile::Create(options);
      if (!file.ok()) return file.status().ToString();
      description = (*file)->description();
      const std::span<std::byte> data = memory_.buffer.span();
      FillRandomly(data, 1);
      const std::vector<std::byte> written(data.begin(), data.end());
      IoTransfer transfer;
      (*file)->StartWrite(transfer, 0, data.data(), kBytes);
      if (absl::Status status = (*file)->Wait(transfer); !status.ok()) return status.ToString();
      std::memset(data.data(), 0, data.size());
      (*file)->StartRead(transfer, 0, data.data(), kBytes);
      if (absl::Status status = (*file)->Wait(transfer); !status.ok()) return status.ToString();
      if (std::memcmp(data.data(), written.data(), data.size()) != 0) return "wrong data";
    }
    return description;
  }

  std::optional<Outcome> RoundTripsRefused(Refusal refusal,
                                           IoBackend backend = IoBackend::kAuto) const {
    Outcome outcome;
    ::testing::internal::CaptureStderr();
    const bool ran =
        RunRefused(refusal, [&] { outcome.description = RoundTrips(Options(backend)); });
    outcome.log = ::testing::internal::GetCapturedStderr();
    if (!ran) return std::nullopt;
    return outcome;
  }

  // The error of a file that demands io_uring; nothing: no filter can be set here.
  std::optional<absl::Status> ErrorOfUringRefused(Refusal refusal) const {
    absl::Status status;
    const bool ran = RunRefused(
        refusal, [&] { status = ShardFile::Create(Options(IoBackend::kUring)).status(); });
    if (!ran) return std::nullopt;
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(scratch_.Entries(), ::testing::IsEmpty());
    return status;
  }

  const Scratch scratch_;
  const PinnedMemory memory_ = Memory(kBytes);
};
using MemlockDeathTest = DeniedTest;
using ThreadLimitDeathTest = DeniedTest;
using FileSizeLimitDeathTest = DeniedTest;

TEST_F(DeniedTest, IoUringIsReplacedByThreads) {
  InNewProcess([&] {
    for (const int error : {EPERM, ENOSYS, EACCES}) {
      const auto outcome = RoundTripsRefused({SYS_io_uring_setup, error});
      if (!outcome) GTEST_SKIP() << "no seccomp filter can be set here";
      EXPECT_THAT(outcome->description, HasSubstr("4 threads"));
      // Once in a process.
      if (error == EPERM) {
        EXPECT_THAT(outcome->log, HasOnce("Going on with threads"));
      } else {
        EXPECT_THAT(outcome->log, Not(HasSubstr("Going on with threads")));
      }
    }
  });
}

// A profile that allows only io_uring_setup.
TEST_F(DeniedTest, IoUringThatTakesNoRequestIsReplacedByThreads) {
  for (const int error : {EPERM, ENOSYS, EACCES}) {
    const auto outcome = RoundTripsRefused({SYS_io_uring_enter, error});
    if (!outcome) GTEST_SKIP() << "no seccomp filter can be set here";
    EXPECT_THAT(outcome->description, HasSubstr("4 threads"));
  }
}

TEST_F(DeniedTest, DemandedIoUringIsAnErrorIfThereIsNone) {
  for (const int system_call : {SYS_io_uring_setup, SYS_io_uring_enter}) {
    const auto status = ErrorOfUringRefused({system_call, EPERM});
    if (!status) GTEST_SKIP() << "no seccomp filter can be set here";
    EXPECT_THAT(status->message(),
                AllOf(HasSubstr("ebb.io_backend \"auto\""), Not(HasSubstr("ulimit"))));
  }
}

TEST_F(DeniedTest, IoUringWithoutLockedMemorySaysHowToRaiseTheLimit) {
  const auto status = ErrorOfUringRefused({SYS_io_uring_setup, ENOMEM});
  if (!status) GTEST_SKIP() << "no seccomp filter can be set here";
  EXPECT_THAT(status->message(),
              AllOf(HasSubstr("io_uring is not available"), HasSubstr(kRaiseLockedMemory)));
}

TEST_F(DeniedTest, RegistrationIsNotNeeded) {
  for (const int error : {EPERM, ENOMEM}) {
    const auto outcome = RoundTripsRefused({SYS_io_uring_register, error});
    if (!outcome) GTEST_SKIP() << "no seccomp filter can be set here";
    EXPECT_THAT(outcome->description, Not(HasSubstr("registered")));
    EXPECT_THAT(outcome->description, Not(HasSubstr("wrong data")));
  }
}

TEST_F(DeniedTest, DirectTransfersAreReplacedByThePageCache) {
  InNewProcess([&] {
    std::string log;
    for (const IoBackend backend : {IoBackend::kAuto, IoBackend::kThreads}) {
      const auto outcome = RoundTripsRefused({SYS_fcntl, EINVAL, 2, O_DIRECT}, backend);
      if (!outcome) GTEST_SKIP() << "no seccomp filter can be set here";
      EXPECT_THAT(outcome->description, HasSubstr("page cache"));
      log += outcome->log;
    }
    EXPECT_THAT(log, HasOnce("refuses O_DIRECT"));
  });
}

TEST_F(DeniedTest, DirectTransfersThatAreRefusedLateAreReplacedByThePageCache) {
  std::string description;
  // The first whole block of Create.
  const bool ran = RunRefused({SYS_pwrite64, EINVAL, 2, 4096}, [&] {
    ASSERT_OK_AND_ASSIGN(auto file, ShardFile::Create(Options()));
    description = file->description();
  });
  if (!ran) GTEST_SKIP() << "no seccomp filter can be set here";
  EXPECT_THAT(description, HasSubstr("page cache"));
}

TEST_F(DeniedTest, AFileInMemoryWorksToo) {
  std::string path = "/dev/shm/ebb-test-XXXXXX";
  if (mkdtemp(path.data()) == nullptr) GTEST_SKIP() << "no /dev/shm";
  ShardFile::Options options;
  options.directories = {path};
  options.name = "shards";
  options.bytes = kBytes;
  for (const IoBackend backend : {IoBackend::kAuto, IoBackend::kThreads}) {
    options.backend = backend;
    EXPECT_THAT(RoundTrips(options),
                ::testing::AnyOf(HasSubstr("O_DIRECT"), HasSubstr("page cache")));
  }
  EXPECT_EQ(rmdir(path.c_str()), 0);
}

// Like ext2, or NFS before 4.2, or a seccomp profile.
TEST_F(DeniedTest, SpaceThatCannotBeReservedIsWrittenFullOfZeros) {
  InNewProcess([&] {
    for (const int error : {EOPNOTSUPP, ENOSYS}) {
      ::testing::internal::CaptureStderr();
      const bool ran = RunRefused({SYS_fallocate, error}, [&] {
        ShardFile::Options options = Options();
        MadeFiles::Watch();
        ASSERT_OK_AND_ASSIGN(auto file, ShardFile::Create(options));
        for (const std::string& directory : options.directories) {
          const struct stat filled = MadeFiles::OfProcess().StatOf(directory + " (shards)");
          EXPECT_EQ(filled.st_size, kBytes / 2);
          struct statfs disk = {};
          ASSERT_EQ(statfs(directory.c_str(), &disk), 0);
          if (disk.f_type == BTRFS_SUPER_MAGIC) continue;  // it may compress them
          EXPECT_GE(filled.st_blocks * 512, filled.st_size);
        }
        FillRandomly(memory_.buffer.span(), 1);
        IoTransfer transfer;
        file->StartRead(transfer, 0, memory_.buffer.data(), kBytes);
        ASSERT_EQ(file->Wait(transfer), absl::OkStatus());
        const std::span<std::byte> data = memory_.buffer.span();
        EXPECT_TRUE(
            std::all_of(data.begin(), data.end(), [](auto b) { return b == std::byte{0}; }));
        file.reset();
        EXPECT_THAT(RoundTrips(options), Not(HasSubstr("wrong")));
      });
      const std::string log = ::testing::internal::GetCapturedStderr();
      if (!ran) GTEST_SKIP() << "no seccomp filter can be set here";
      if (error == EOPNOTSUPP) {
        EXPECT_THAT(log, HasOnce("is written full of zeros"));  // once in a process
      }
    }
  });
}

TEST_F(DeniedTest, ADiskThatIsFullBeforeTheZerosEndIsAnErrorOfCreate) {
  for (const int error : {ENOSPC, EDQUOT}) {
    absl::Status status;
    bool ran = false;
    // The zeros come in MiBs.
    const bool ran_both = RunRefused({SYS_fallocate, EOPNOTSUPP}, [&] {
      ran = RunRefused({SYS_pwrite64, error, 2, 1 << 20}, [&] {
        ShardFile::Options options = Options();
        options.whole_need = "this rank needs more";
        status = ShardFile::Create(options).status();
      });
    });
    if (!ran || !ran_both) GTEST_SKIP() << "no seccomp filter can be set here";
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, "cannot reserve",
                                 scratch_.path(), "this rank needs more", "free space"));
    EXPECT_THAT(scratch_.Entries(), ::testing::IsEmpty());
  }
}

// Runs with an ordinary user's limits, in a separate process, which it ends.
void AsOrdinaryUser(rlim_t memlock_bytes, const std::function<bool()>& function) {
  const rlimit limit = {memlock_bytes, memlock_bytes};
  if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) _exit(kCannotSetLimit);
  if (BecomeOrdinaryUser() != 0) _exit(kCannotBecomeOrdinary);
  _exit(function() ? kAsExpected : kNotAsExpected);
}

TEST_F(MemlockDeathTest, SmallLimitLeavesMemoryUnpinnedAndSaysSoOnce) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizers make mlock do nothing";
#endif
  if (const auto why = WhyNotOrdinaryUser()) GTEST_SKIP() << *why;
  EXPECT_EXIT(AsOrdinaryUser(64 << 10,
                             [] {
                               auto first = AllocatePinned(kBytes, true, "the host pool");
                               auto second = AllocatePinned(kBytes, true, "the host pool");
                               auto small = AllocatePinned(4096, true, "a block");
                               return first.ok() && second.ok() && small.ok() && !first->pinned &&
                                      !second->pinned && small->pinned &&
                                      first->buffer.data()[kBytes - 1] == std::byte{0};
                             }),
              ::testing::ExitedWithCode(kAsExpected),
              AllOf(HasOnce("cannot pin 4096 KiB of memory for the host pool"),
                    HasSubstr("(RLIMIT_MEMLOCK) is 64 KiB"), HasSubstr(kRaiseLockedMemory)));
}

TEST_F(MemlockDeathTest, SmallLimitLeavesBuffersUnregisteredAndTransfersRight) {
  if (const auto why = WhyNotOrdinaryUser()) GTEST_SKIP() << *why;
  const ShardFile::Options options = Options();
  EXPECT_EXIT(AsOrdinaryUser(64 << 10,
                             [&] {
                               const std::string description = RoundTrips(options);
                               std::fputs(description.c_str(), stderr);
                               return true;
                             }),
              ::testing::ExitedWithCode(kAsExpected),
              AllOf(::testing::ContainsRegex("O_DIRECT|page cache"),
                    ::testing::AnyOf(HasOnce("cannot register 4096 KiB of buffers"),
                                     HasSubstr("threads"))));
}

TEST_F(ThreadLimitDeathTest, IsAnErrorOfCreateHoweverManyThreadsThereMayBe) {
  if (const auto why = WhyNotOrdinaryUser()) GTEST_SKIP() << *why;
  const auto try_each = [&](IoBackend backend) -> OrdinaryUserExit {
    if (BecomeOrdinaryUser() != 0) return kCannotBecomeOrdinary;  // root has no limit
    ShardFile::Options options = Options();
    options.backend = backend;
    rlimit limit;
    if (getrlimit(RLIMIT_NPROC, &limit) != 0) return kCannotSetLimit;
    // From no threads at all up to a number that suffices.
    for (limit.rlim_cur = 0; limit.rlim_cur < limit.rlim_max; ++limit.rlim_cur) {
      if (setrlimit(RLIMIT_NPROC, &limit) != 0) return kCannotSetLimit;
      const absl::Status status = ShardFile::Create(options).status();
      if (status.ok()) return limit.rlim_cur > 0 ? kAsExpected : kNotAsExpected;
      if (absl::IsFailedPrecondition(status) && backend == IoBackend::kUring) {
        std::fputs("ulimit -u", stderr);  // no message to look at
        return kAsExpected;
      }
      if (!absl::IsResourceExhausted(status)) {
        std::fputs(status.ToString().c_str(), stderr);
        return kNotAsExpected;
      }
      if (limit.rlim_cur == 0) std::fputs(status.ToString().c_str(), stderr);
    }
    return kNotAsExpected;
  };
  for (const IoBackend backend : {IoBackend::kThreads, IoBackend::kUring, IoBackend::kAuto}) {
    EXPECT_EXIT(_exit(try_each(backend)), ::testing::ExitedWithCode(kAsExpected),
                HasSubstr("ulimit -u"));
    EXPECT_THAT(scratch_.Entries(), ::testing::IsEmpty());
  }
}

TEST_F(FileSizeLimitDeathTest, IsAnErrorOfCreateAndNoSignal) {
  const ShardFile::Options options = Options();
  const auto try_it = [&] {
    const rlimit limit = {1 << 20, 1 << 20};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(1);
    const absl::Status status = ShardFile::Create(options).status();
    std::fputs(status.ToString().c_str(), stderr);
    _exit(absl::IsResourceExhausted(status) ? 0 : 1);
  };
  EXPECT_EXIT(try_it(), ::testing::ExitedWithCode(0), HasSubstr("ulimit -f"));
  EXPECT_THAT(scratch_.Entries(), ::testing::IsEmpty());
}

TEST(PinnedMemoryTest, IsZeroFilledAndSaysWhetherItIsPinned) {
  for (const bool pin : {false, true}) {
    [[maybe_unused]] const int64_t locked_before = LockedBytes();
    ASSERT_OK_AND_ASSIGN(auto memory, AllocatePinned(3 << 20, pin, "a test"));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they make mlock do nothing
    EXPECT_EQ(LockedBytes() - locked_before, memory.pinned ? 3 << 20 : 0);
#endif
    EXPECT_TRUE(pin || !memory.pinned);
    EXPECT_EQ(memory.buffer.bytes(), 3 << 20);
    EXPECT_EQ(memory.buffer.data()[(3 << 20) - 1], std::byte{0});
    PinnedMemory moved = std::move(memory);
    EXPECT_EQ(memory.buffer.data(), nullptr);
    memory.buffer = Buffer();
    EXPECT_NE(moved.buffer.data(), nullptr);
  }
  EXPECT_EQ(AllocatePinned(-1, true, "a test").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(AllocatePinned(0, true, "a test").ok());
}

// A line of /proc/self/smaps for the mapping of `data`: the one that begins with `name`; "": the
// mapping's own line.
std::string MappingLine(const void* data, const std::string& name) {
  std::ifstream maps("/proc/self/smaps");
  const auto address = reinterpret_cast<uintptr_t>(data);
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream range(line);
    if (range >> std::hex >> begin >> dash >> end && dash == '-') {
      inside = begin <= address && address < end;
      if (inside && name.empty()) return line;
    } else if (inside && !name.empty() && line.starts_with(name)) {
      return line;
    }
  }
  return "";
}

// Ranks that are processes. The rank that installs the heap keeps it to the end.
TEST(PinnedMemoryTest, IsPrivateAndInHugePagesWhereTheDevicesMemoryIsShared) {
  const auto look = [] {
    SharedHeap* const heap = SharedHeap::Install();
    if (heap == nullptr) return;
    const auto offset = [&](const Buffer& buffer) {
      return heap->OffsetOf(buffer.data(), buffer.bytes());
    };
    EXPECT_GE(offset(*Device::Cpu(1).Allocate(kBytes, "a pool of the device")), 0);
    for (const int64_t bytes : {kBytes, int64_t{1} << 20}) {
      for (const bool pin : {false, true}) {
        const PinnedMemory memory = *AllocatePinned(bytes, pin, "a test");
        std::byte* const data = memory.buffer.data();
        EXPECT_EQ(offset(memory.buffer), -1);
        data[bytes - 1] = std::byte{1};
        EXPECT_THAT(MappingLine(data, ""), HasSubstr(" rw-p "));
        EXPECT_THAT(MappingLine(data, ""), ::testing::Not(HasSubstr("ebb-buffers")));
        if (bytes < kHugePageBytes) continue;
        EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % kHugePageBytes, 0U);
        if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) continue;
        EXPECT_THAT(MappingLine(data, "VmFlags:"), HasSubstr(" hg"));
      }
    }
  };
  const auto exits = [&] {
    look();
    std::fputs(SharedHeap::Installed() == nullptr ? "no heap" : "heap", stderr);
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(exits(), ::testing::ExitedWithCode(0), "heap");
}

}  // namespace
}  // namespace ebb::testing::denied_test
