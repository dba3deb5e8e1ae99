#include <gtest/gtest.h>
#include <sched.h>

#include <thread>
#include <vector>

#include "ebb/runtime/device/cores.h"

namespace ebb::callers_core_test {
namespace {

std::vector<int> AllowedCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(static_cast<size_t>(core), &set)) cores.push_back(core);
  return cores;
}

void StayOn(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(core), &set);
  ASSERT_EQ(sched_setaffinity(0, sizeof(set), &set), 0);
}

// Where a thread that was on `core` may run after Leave.
std::vector<int> AfterLeaving(const CallersCore& callers, int core) {
  std::vector<int> cores;
  std::thread([&] {
    StayOn(core);
    callers.Leave();
    cores = AllowedCores();
  }).join();
  return cores;
}

TEST(CallersCore, ThreadLeavesTheCoreOfTheTrainerAlone) {
  const std::vector<int> all = AllowedCores();
  if (all.size() < 2) GTEST_SKIP() << "one core";
  CallersCore callers;
  std::thread([&] {
    StayOn(all[0]);
    callers.Note();
  }).join();
  EXPECT_EQ(AfterLeaving(callers, all[0]), std::vector<int>(all.begin() + 1, all.end()));
  EXPECT_EQ(AfterLeaving(callers, all[1]), std::vector<int>{all[1]});
}

TEST(CallersCore, ThreadStaysWhereNothingIsKnownOfTheTrainer) {
  const std::vector<int> all = AllowedCores();
  EXPECT_EQ(AfterLeaving(CallersCore(), all[0]), std::vector<int>{all[0]});
}

TEST(CallersCore, ThreadStaysOnTheOnlyCore) {
  const std::vector<int> all = AllowedCores();
  std::vector<int> cores;
  std::thread([&] {
    StayOn(all[0]);
    CallersCore callers;
    callers.Note();
    callers.Leave();
    cores = AllowedCores();
  }).join();
  EXPECT_EQ(cores, std::vector<int>{all[0]});
}

}  // namespace
}  // namespace ebb::callers_core_test
