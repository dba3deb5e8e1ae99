#include "ebb/runtime/engine/failures.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace ebb {
namespace {

TEST(FailuresTest, TheFirstIsTheCause) {
  Failures failures;
  EXPECT_FALSE(failures.has_failed());
  EXPECT_TRUE(failures.Tell().ok());
  failures.Fail(absl::DataLossError("first"));
  failures.Fail(absl::InternalError("in its wake"));
  EXPECT_TRUE(failures.has_failed());
  EXPECT_EQ(failures.Tell(), absl::DataLossError("first"));
}

TEST(FailuresTest, IsUntoldUntilSomebodyAsks) {
  Failures failures;
  // Who asks too early has not heard of what comes later.
  EXPECT_TRUE(failures.Tell().ok());
  EXPECT_TRUE(failures.Untold().ok());
  failures.Fail(absl::DataLossError("first"));
  EXPECT_EQ(failures.Untold(), absl::DataLossError("first"));
  EXPECT_EQ(failures.failure(), absl::DataLossError("first"));
  EXPECT_EQ(failures.Untold(), absl::DataLossError("first")) << "told by who only looked";
  EXPECT_EQ(failures.Tell(), absl::DataLossError("first"));
  EXPECT_TRUE(failures.Untold().ok());
}

TEST(FailuresTest, KnowsWhereACommunicatorBroke) {
  Failures failures;
  const absl::Status broken = absl::UnavailableError("rank 1 has gone");
  EXPECT_TRUE(failures.NoteBroken(broken, "gather of unit 'a'"));
  EXPECT_FALSE(failures.NoteBroken(absl::AbortedError("another"), "reduce"));
  EXPECT_EQ(failures.broken(), broken);
  EXPECT_EQ(failures.WhereBroken(broken), "gather of unit 'a'");
  EXPECT_EQ(failures.WhereBroken(absl::AbortedError("another")), "");
  EXPECT_FALSE(failures.has_failed()) << "a step may end with it, and the engine go on";
}

TEST(FailuresTest, OfManyThreadsOneIsFirst) {
  Failures failures;
  constexpr int kThreads = 8;
  std::vector<int> first(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const std::string where = std::to_string(i);
      first[static_cast<size_t>(i)] = failures.NoteBroken(absl::AbortedError(where), where) ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  int firsts = 0;
  for (int i = 0; i < kThreads; ++i) {
    if (first[static_cast<size_t>(i)] == 0) continue;
    ++firsts;
    EXPECT_EQ(failures.broken().message(), std::to_string(i));
    EXPECT_EQ(failures.WhereBroken(failures.broken()), std::to_string(i));
  }
  EXPECT_EQ(firsts, 1);
}

}  // namespace
}  // namespace ebb
