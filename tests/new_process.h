// A separate process, for a test of something that happens once in a process: a warning, a choice.
// Other tests of the program may have caused it before.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>

namespace ebb::testing {

// Runs `body`, with this test's checks and GTEST_SKIP, in a new process of this program. Call it
// once in a test, before anything else, because the new process also runs the test up to here.
template <typename Body>
void InNewProcess(const Body& body) {
  constexpr int kFailed = 1, kSkipped = 77;
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // starts the program again
  bool skipped = false;
  const auto passed = [&](int status) {
    skipped = WIFEXITED(status) && WEXITSTATUS(status) == kSkipped;
    return skipped || (WIFEXITED(status) && WEXITSTATUS(status) == 0);
  };
  EXPECT_EXIT(
      {
        body();
        std::exit(::testing::Test::HasFailure()  ? kFailed
                  : ::testing::Test::IsSkipped() ? kSkipped
                                                 : 0);
      },
      passed, "");
  if (skipped) GTEST_SKIP() << "skipped in its own process";
}

}  // namespace ebb::testing
