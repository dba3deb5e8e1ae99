#include "ebb/runtime/device/thread_team.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace ebb {
namespace {

TEST(ThreadTeam, CutsIntoPartsOfWholeGrainsThatCoverEverythingOnce) {
  for (const auto& [threads, of_thread] : {std::pair(1, 1), std::pair(2, 1), std::pair(3, 1),
                                           std::pair(5, 1), std::pair(1, 4), std::pair(3, 4)}) {
    ThreadTeam team(threads, of_thread);
    EXPECT_EQ(team.threads(), threads);
    for (const int64_t grain : {1, 7, 64}) {
      for (const int64_t count : {1, 6, 7, 8, 63, 64, 65, 1000, 4096}) {
        std::vector<int> touched(static_cast<size_t>(count), 0);
        std::atomic<int> parts{0};
        std::atomic<bool> whole_grains{true};
        team.Run(count, grain, [&](int64_t begin, int64_t end) {
          parts.fetch_add(1);
          if (begin % grain != 0 || (end != count && end % grain != 0) || begin >= end)
            whole_grains.store(false);
          for (int64_t i = begin; i < end; ++i) ++touched[static_cast<size_t>(i)];
        });
        EXPECT_EQ(touched, std::vector<int>(static_cast<size_t>(count), 1));
        EXPECT_LE(parts.load(), threads * of_thread);
        EXPECT_TRUE(whole_grains.load()) << threads << " " << grain << " " << count;
      }
    }
  }
}

TEST(ThreadTeam, NothingToDoCallsNothing) {
  ThreadTeam team(2);
  team.Run(0, 1, [](int64_t, int64_t) { FAIL(); });
}

TEST(ThreadTeam, PartsRunBesideEachOther) {
  ThreadTeam team(3);
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> here{0};
    team.Run(3, 1, [&](int64_t, int64_t) {
      here.fetch_add(1);
      here.notify_all();
      for (int seen = here.load(); seen < 3; seen = here.load()) here.wait(seen);
    });
    EXPECT_EQ(here.load(), 3);
  }
}

TEST(ThreadTeam, AThreadThatIsSlowTakesFewerParts) {
  ThreadTeam team(2, /*parts_per_thread=*/4);
  std::atomic<int64_t> done{0}, of_slow{0};
  std::atomic<std::thread::id> slow;
  team.Run(8, 1, [&](int64_t begin, int64_t end) {
    if (begin == 0) {
      slow = std::this_thread::get_id();
      for (int64_t seen = done; seen < 8 - end; seen = done) done.wait(seen);
    }
    if (std::this_thread::get_id() == slow.load()) of_slow += end - begin;
    done += end - begin;
    done.notify_all();
  });
  EXPECT_EQ(done, 8);
  EXPECT_EQ(of_slow, 1);
}

TEST(ThreadTeam, AWorkerLeavesTheCoreOfItsCaller) {
  cpu_set_t cores, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(cores), &cores), 0);
  if (CPU_COUNT(&cores) < 2) GTEST_SKIP() << "one core";
  const int core = sched_getcpu();
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(core), &one);
  ThreadTeam team(2);
  const std::thread::id caller = std::this_thread::get_id();
  // Runs `work` in the worker while the caller waits.
  const auto in_worker = [&](const std::function<void()>& work) {
    std::atomic<bool> done{false};
    team.Run(2, 1, [&](int64_t, int64_t) {
      if (std::this_thread::get_id() == caller) return done.wait(false);
      work();
      done = true;
      done.notify_all();
    });
  };
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  in_worker([&] { EXPECT_EQ(sched_setaffinity(0, sizeof(one), &one), 0); });
  // A worker that begins a run before it has slept is not moved. Nothing else moves it.
  bool has_left = false;
  for (int run = 0; run < 1000 && !has_left; ++run)
    in_worker([&] { has_left = sched_getcpu() != core; });
  EXPECT_TRUE(has_left);
  ASSERT_EQ(sched_setaffinity(0, sizeof(cores), &cores), 0);
}

// The caller takes the last part while the worker wakes for it.
TEST(ThreadTeam, AWorkerThatFindsNoPartLeftGoesOnWaiting) {
  ThreadTeam team(2);
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> of_worker{0};
  for (int run = 0; run < 1'000'000; ++run) {
    team.Run(2, 1, [&](int64_t, int64_t) {
      if (std::this_thread::get_id() != caller) of_worker.fetch_add(1, std::memory_order_relaxed);
    });
  }
  EXPECT_GT(of_worker, 0);
  int workers = 0;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(thread.path() / "comm") >> std::ws, name);
    workers += name == "ebb-team" ? 1 : 0;
  }
  EXPECT_EQ(workers, 1);
}

TEST(ThreadTeam, NestedRunIsDoneByItsCallerWhole) {
  ThreadTeam team(2);
  std::atomic<int64_t> sum{0}, inner_calls{0};
  team.Run(2, 1, [&](int64_t, int64_t) {
    team.Run(100, 1, [&](int64_t begin, int64_t end) {
      inner_calls.fetch_add(1);
      for (int64_t i = begin; i < end; ++i) sum.fetch_add(i);
    });
  });
  EXPECT_EQ(inner_calls.load(), 2);
  EXPECT_EQ(sum.load(), 2 * 4950);
}

TEST(ThreadTeam, CallersOfSeveralThreadsEachGetTheirWholeResult) {
  ThreadTeam team(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      std::vector<int64_t> values(1000);
      for (int round = 0; round < 200; ++round) {
        team.Run(1000, 10, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) values[static_cast<size_t>(i)] = caller * round + i;
        });
        for (int64_t i = 0; i < 1000; ++i)
          wrong.fetch_add(values[static_cast<size_t>(i)] != caller * round + i ? 1 : 0);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

}  // namespace
}  // namespace ebb
