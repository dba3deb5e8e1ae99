// Ranks as processes: how they find each other through their environment, how they are killed at
// any point, and what they leave behind. The conformance suites check their results and failures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/shared/shared_file.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/device/device.h"
#include "processes.h"
#include "tests/full.h"
#include "tests/status.h"

namespace ebb::testing::process_test {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::string Host() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

void SetRank(int rank, const char* variable) {
  setenv(variable, std::to_string(rank).c_str(), 1);
}

// Variables that mpirun sets for ranks of this host; they need no port.
void SetMpiEnvironment(int rank, int ranks, const std::string& job) {
  SetRank(rank, "OMPI_COMM_WORLD_RANK");
  SetRank(ranks, "OMPI_COMM_WORLD_SIZE");
  SetRank(ranks, "OMPI_COMM_WORLD_LOCAL_SIZE");
  setenv("PMIX_NAMESPACE", job.c_str(), 1);
}

absl::Status Sum(const World& world) {
  EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
  Stream stream = Device::Cpu(1).CallerStream();
  float value = static_cast<float>(world.rank() + 1);
  const CollectiveSpan span = {.send = &value, .receive = &value, .count = 1};
  EBB_RETURN_IF_ERROR(communicator.AllReduce(stream, {&span, 1}, DType::kFloat32));
  EBB_RETURN_IF_ERROR(communicator.status());
  const int n = world.size();
  return value == static_cast<float>(n * (n + 1) / 2) ? absl::OkStatus()
                                                      : absl::InternalError("wrong sum");
}

TEST(Processes, SixteenOfMpirunMeetWithoutMpi) {
  Results seen;
  const std::string job = NewMeetingName();
  Fork(16, [&](int rank) {
    SetMpiEnvironment(rank, 16, job);
    const absl::StatusOr<World> world = World::FromEnvironment({.timeout_seconds = 60});
    if (world.ok()) {
      EXPECT_EQ(world->rank(), rank);
      EXPECT_EQ(world->size(), 16);
      EXPECT_EQ(world->local_rank(), rank);
      EXPECT_EQ(world->local_size(), 16);
      EXPECT_EQ(CoreShare::CoresPerRank(), std::max(1, CoreShare::Cores() / 16));
    }
    seen.Set(rank, !world.ok()                     ? world.status()
                   : ::testing::Test::HasFailure() ? absl::InternalError("see above")
                                                   : Sum(*world));
    return 0;
  });
  for (const absl::Status& status : seen.Take(16)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(LeftInSharedMemory(), IsEmpty());
}

TEST(Processes, OfTorchrunMeetAtThePort) {
  Results seen;
  const int port = 20'000 + getpid() % 10'000;
  Fork(3, [&](int rank) {
    SetRank(rank, "RANK");
    SetRank(3, "WORLD_SIZE");
    SetRank(3, "LOCAL_WORLD_SIZE");
    setenv("MASTER_ADDR", "localhost", 1);
    SetRank(port, "MASTER_PORT");
    const absl::StatusOr<World> world = World::FromEnvironment({.timeout_seconds = 60});
    seen.Set(rank, world.ok() ? Sum(*world) : world.status());
    return 0;
  });
  for (const absl::Status& status : seen.Take(3)) EXPECT_TRUE(status.ok()) << status;
}

TEST(Processes, RankThatIsNeverStartedIsNamed) {
  Results seen;
  const std::string job = NewMeetingName();
  Fork(2, [&](int rank) {
    SetMpiEnvironment(rank, 3, job);
    seen.Set(rank, World::FromEnvironment({.timeout_seconds = 0.3}).status());
    return 0;
  });
  for (const absl::Status& status : seen.Take(2)) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, "for rank 2 of 3 ranks"));
  }
}

// Works until the rank's world has failed. Returns its error.
absl::Status WorkUntilFailure(const World& world, const std::function<void(int step)>& each) {
  EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator({.name = "gather"}));
  EBB_ASSIGN_OR_RETURN(const Buffer buffer, Device::Cpu(1).Allocate(1 << 20, "numbers"));
  Stream stream = Device::Cpu(1).CallerStream();
  // Large and small in turn: the large ones are read in place, the small ones staged.
  for (int step = 0; communicator.status().ok(); ++step) {
    each(step);
    auto* const numbers = reinterpret_cast<float*>(buffer.data());
    const CollectiveSpan span = {
        .send = numbers, .receive = numbers, .count = step % 2 == 0 ? (1 << 18) : 100};
    EBB_RETURN_IF_ERROR(communicator.AllReduce(stream, {&span, 1}, DType::kFloat32));
  }
  return communicator.status();
}

void ExpectDeathReported(const absl::Status& status, int rank) {
  EXPECT_THAT(status,
              StatusIs(absl::StatusCode::kUnavailable, "rank " + std::to_string(rank) + " (process",
                       "on host '" + Host() + "'", "has died"));
}

TEST(Killed, RankIsNamedOnAllSurvivors) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  constexpr int kRanks = 4;
  int64_t slowest = 0;
  for (int round = 0; round < 12; ++round) {
    const int victim = static_cast<int>(random() % kRanks);
    const int step_of_death = static_cast<int>(random() % 40);
    const auto microseconds = std::chrono::microseconds(random() % 2000);
    const std::string job = NewMeetingName();
    const Shared<std::atomic<int64_t>> died_at(0), last_reported_at(0);
    const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
    Results seen;
    const std::vector<int> codes = Fork(kRanks, [&](int rank) {
      SetMpiEnvironment(rank, kRanks, job);
      const absl::StatusOr<World> world = World::FromEnvironment({.timeout_seconds = 60});
      if (!world.ok()) return 1;
      std::thread killer;
      const absl::Status status = WorkUntilFailure(*world, [&](int step) {
        if (rank != victim || step != step_of_death) return;
        killer = std::thread([&] {
          std::this_thread::sleep_for(microseconds);
          died_at->store(now());
          raise(SIGKILL);
        });
      });
      last_reported_at->store(now());
      seen.Set(rank, status);
      return 0;
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(codes[static_cast<size_t>(rank)], rank == victim ? -SIGKILL : 0);
      if (rank != victim) ExpectDeathReported(seen.Get(rank), victim);
    }
    slowest = std::max(slowest, last_reported_at->load() - died_at->load());
    EXPECT_THAT(LeftInSharedMemory(), IsEmpty());
  }
  RecordProperty("milliseconds until all had been told", std::to_string(slowest / 1'000'000));
}

TEST(Killed, ExitWithoutLeavingIsADeath) {
  Results seen;
  const std::string job = NewMeetingName();
  Fork(2, [&](int rank) {
    SetMpiEnvironment(rank, 2, job);
    const absl::StatusOr<World> world = World::FromEnvironment({.timeout_seconds = 60});
    seen.Set(rank, WorkUntilFailure(*world, [&](int step) {
               if (rank == 0 && step == 3) _exit(0);
             }));
    return 0;
  });
  ExpectDeathReported(seen.Get(1), 0);
}

TEST(Killed, SurvivorsOfRankZeroStillNoticeEachOther) {
  Results seen;
  const std::string name = NewMeetingName();
  Signal rank_zero_has_left;
  Fork(3, [&](int rank) {
    SetMpiEnvironment(rank, 3, name);
    absl::StatusOr<World> world = World::FromEnvironment({.timeout_seconds = 60});
    seen.Set(rank, [&]() -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const World others, world->Split(rank == 0 ? 0 : 1, 0));
      EBB_ASSIGN_OR_RETURN(Communicator part, others.NewCommunicator());
      if (rank == 0) return absl::OkStatus();
      Stream stream = Device::Cpu(1).CallerStream();
      while (part.status().ok()) {
        EBB_RETURN_IF_ERROR(part.Barrier(stream));
        rank_zero_has_left.Wait();
        if (rank == 2) raise(SIGKILL);
      }
      return part.status();
    }());
    world = absl::CancelledError("left");
    if (rank == 0) rank_zero_has_left.Set();
    return 0;
  });
  EXPECT_TRUE(seen.Get(0).ok()) << seen.Get(0);
  ExpectDeathReported(seen.Get(1), 2);
}

absl::StatusOr<Rendezvous> Meet(const std::string& name, int rank, int ranks) {
  RendezvousOptions options;
  options.rank = rank;
  options.size = ranks;
  options.place.name = name;
  options.launcher = "a test";
  options.timeout_seconds = 60;
  return Rendezvous::Join(options);
}

// Waits until the main thread of process `pid` sleeps.
void AwaitAsleep(int64_t pid) {
  std::string stat;
  do {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::getline(file, stat);
  } while (stat.find(") S ") == std::string::npos);
}

TEST(Killed, ARankKilledWhileItFailsTheWorldBlocksNoRank) {
  const std::string name = NewMeetingName();
  const Shared<std::atomic<int64_t>> waiting(0);
  Results seen;
  Fork(2, [&](int rank) {
    auto node = SharedWorld::Form(rank, *Meet(name, rank, 2));
    const World world(std::make_shared<SharedRank>(*node));
    absl::StatusOr<Communicator> communicator = world.NewCommunicator({.timeout_seconds = 1e6});
    if (rank == 0) {
      Stream stream = Device::Cpu(1).CallerStream();
      waiting->store(getpid());
      communicator->Barrier(stream).IgnoreError();
      seen.Set(0, communicator->status());
      return 0;
    }
    while (waiting->load() == 0) sched_yield();
    AwaitAsleep(waiting->load());
    // The state left by a rank that is killed in SharedWorld::Fail.
    const absl::StatusOr<Mapping> pages = (*node)->file().Map(0, sizeof(shared::WorldHeader));
    reinterpret_cast<shared::WorldHeader*>(pages->data())
        ->failure.TrySet(absl::AbortedError("the first failure"));
    raise(SIGKILL);
    return 1;
  });
  EXPECT_EQ(seen.Get(0), absl::AbortedError("the first failure"));
}

// Errors of two ranks whose parent is killed while they work, for at most `steps` steps.
std::vector<absl::Status> SeenAfterDeathOfParent(int steps,
                                                 const std::function<void(int rank)>& environment) {
  Results seen;
  Signal ended[2];
  const Shared<std::atomic<int>> working(0);
  const auto rank_of_two = [&](int rank) {
    environment(rank);
    const pid_t parent = getppid();
    const absl::StatusOr<World> world = World::FromEnvironment({.timeout_seconds = 60});
    int alone = 0;
    const auto each = [&](int step) {
      if (step == 3) ++*working;
      if (getppid() != parent && ++alone == steps) world->Fail(absl::AbortedError("the last step"));
    };
    seen.Set(rank, world.ok() ? WorkUntilFailure(*world, each) : world.status());
    ended[rank].Set();
    return 0;
  };
  Fork(1, [&](int) {
    Fork(2, rank_of_two, [&](const std::vector<int>&) {
      while (working->load() < 2) sched_yield();
      raise(SIGKILL);
    });
    return 0;
  });
  for (const Signal& each : ended) each.Wait();
  return seen.Take(2);
}

TEST(Killed, LauncherEndsItsRanksToo) {
  const std::string job = NewMeetingName();
  const auto seen =
      SeenAfterDeathOfParent(50'000, [&](int rank) { SetMpiEnvironment(rank, 2, job); });
  EXPECT_THAT(seen,
              Each(StatusIs(absl::StatusCode::kUnavailable,
                            "the launcher of the ranks, Open MPI's mpirun (process", "has ended")));
}

TEST(Killed, ShellDoesNotEndTheRanksThatItHasStarted) {
  const int port = 20'000 + getpid() % 10'000;
  const auto seen = SeenAfterDeathOfParent(300, [&](int rank) {
    SetRank(rank, "RANK");
    SetRank(2, "WORLD_SIZE");
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    SetRank(port, "MASTER_PORT");
  });
  EXPECT_THAT(seen, Each(Says("the last step")));
}

// Like a container without the right to look into other processes.
void HideFromOtherProcesses() {
  __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  const __user_cap_data_struct none[2] = {};
  EXPECT_EQ(syscall(SYS_capset, &header, none), 0);
  EXPECT_EQ(prctl(PR_SET_DUMPABLE, 0), 0);
}

TEST(Killed, AnIncompleteWorldLeavesNothing) {
  for (const int victim : {0, 1}) {
    Results seen;
    const std::string name = NewMeetingName();
    Fork(3, [&](int rank) {
      HideFromOtherProcesses();  // so that the files need a name
      absl::StatusOr<Rendezvous> rendezvous = Meet(name, rank, 3);
      if (rank == victim) {
        // Rank 0 has made the file that the others are about to open.
        const std::string file_name = shared::SharedFileName(*rendezvous);
        StoreGroup ranks(*Store::Hold(rank, *std::move(rendezvous), 60));
        const auto no_descriptor = ranks.AllGather("", 60);
        const auto open = ranks.AllGather("not open", 60);
        const auto file = SharedFile::Create(file_name);
        raise(SIGKILL);
      }
      seen.Set(rank, SharedWorld::Form(rank, *std::move(rendezvous)).status());
      return 0;
    });
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(seen.Get(rank).ok(), rank == victim);
    }
    EXPECT_THAT(LeftInSharedMemory(), IsEmpty());
  }
}

// The names of the shared-memory files that processes make. `body` starts the processes and returns
// their ids.
std::vector<std::string> NamesGiven(const std::function<std::vector<int>()>& body) {
  const Descriptor watch(inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  EXPECT_GE(inotify_add_watch(watch.get(), "/dev/shm", IN_CREATE), 0);
  std::vector<std::string> names;
  const std::vector<int> pids = body();
  alignas(inotify_event) char events[64 * 1024];
  const ssize_t bytes = read(watch.get(), events, sizeof(events));
  for (ssize_t at = 0; at < bytes;) {
    const auto* const event = reinterpret_cast<const inotify_event*>(events + at);
    for (const int pid : pids) {
      const std::string name = event->name;
      if (name.rfind("ebb-" + std::to_string(pid) + "-", 0) == 0) names.push_back(name);
    }
    at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
  }
  return names;
}

std::vector<int> SumOnTwo(bool hidden) {
  std::vector<int> started;
  Results seen;
  const std::string job = NewMeetingName();
  Fork(
      2,
      [&](int rank) {
        if (hidden) HideFromOtherProcesses();
        SetMpiEnvironment(rank, 2, job);
        const absl::StatusOr<World> world = World::FromEnvironment({.timeout_seconds = 60});
        seen.Set(rank, world.ok() ? Sum(*world) : world.status());
        return 0;
      },
      [&](const std::vector<int>& pids) { started = pids; });
  for (const absl::Status& status : seen.Take(2)) EXPECT_TRUE(status.ok()) << status;
  return started;
}

TEST(Processes, ShareMemoryThatHasNoName) {
  EXPECT_THAT(NamesGiven([] { return SumOnTwo(/*hidden=*/false); }), IsEmpty());
}

TEST(Processes, WithoutPtraceShareMemoryByAName) {
  EXPECT_THAT(NamesGiven([] { return SumOnTwo(/*hidden=*/true); }), SizeIs(1));
  EXPECT_THAT(LeftInSharedMemory(), IsEmpty());
}

TEST(Killed, AtAnyMomentOfTheStartLeavesNothingBehind) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const int rounds = Full() ? 40 : 16;
  for (int round = 0; round < rounds; ++round) {
    const bool all = round % 2 == 1;
    const auto victim = random() % 3;
    const auto microseconds = std::chrono::microseconds(random() % 20'000);
    Results seen;
    const std::string job = NewMeetingName();
    Fork(
        3,
        [&](int rank) {
          SetMpiEnvironment(rank, 3, job);
          const absl::StatusOr<World> world = World::FromEnvironment({.timeout_seconds = 2});
          seen.Set(rank, world.ok() ? WorkUntilFailure(*world, [](int) {}) : world.status());
          return 0;
        },
        [&](const std::vector<int>& pids) {
          std::this_thread::sleep_for(microseconds);
          for (size_t rank = 0; rank < pids.size(); ++rank) {
            if (all || rank == victim) kill(pids[rank], SIGKILL);
          }
        });
    for (int rank = 0; rank < 3 && !all; ++rank) {
      EXPECT_EQ(seen.Get(rank).ok(), rank == static_cast<int>(victim));
    }
    EXPECT_THAT(LeftInSharedMemory(), IsEmpty());
  }
}

// The bytes of this process's file of shared memory.
int64_t SharedBytes() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored);
    struct stat info = {};
    if (target.rfind("/memfd:ebb-world", 0) == 0 && stat(entry.path().c_str(), &info) == 0)
      return info.st_blocks * int64_t{512};
  }
  return -1;
}

TEST(Processes, FreeACommunicatorsPagesWhenAllHaveLeft) {
  const absl::Status status = RunProcesses(2, [](World world) -> absl::Status {
    const int64_t before = SharedBytes();
    int64_t with_one = 0;
    for (int i = 0; i < 20; ++i) {
      EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
      if (i == 0) with_one = SharedBytes();
    }
    const int64_t after = SharedBytes();
    // The other rank may still hold the last one's memory.
    EXPECT_GE(before, 0);
    EXPECT_GT(with_one, before);
    EXPECT_LE(after, with_one + with_one - before);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A store that a process keeps has a thread, which a forked process does not have.
TEST(Processes, MayBeForkedAfterAWorldOfTheirParent) {
  const std::vector<int> codes = Fork(1, [](int) {
    bool all_formed = true;
    for (int round = 0; round < 3; ++round) {
      const std::string name = NewMeetingName();
      const auto form = [&](int rank) {
        return SharedWorld::Form(rank, *Meet(name, rank, 2)).ok();
      };
      const std::vector<int> other = Fork(
          1, [&](int) { return form(1) ? 0 : 1; },
          [&](const std::vector<int>&) { all_formed = form(0) && all_formed; });
      all_formed = all_formed && other[0] == 0;
    }
    return all_formed ? 0 : 1;
  });
  EXPECT_EQ(codes[0], 0);
}

}  // namespace
}  // namespace ebb::testing::process_test
