// The log: what reaches standard error at which level. Each case is a child process, because the
// level is read once.
#include "ebb/runtime/trace/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

namespace ebb::log_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ExitedWithCode;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

void LogBothAndExit(const char* level) {
  if (level == nullptr) {
    unsetenv("EBB_LOG_LEVEL");
  } else {
    setenv("EBB_LOG_LEVEL", level, 1);
  }
  LogInfo("100% of {} read");
  LogWarning("nearly full");
  std::exit(0);
}

TEST(LogDeathTest, WritesTimeNameAndLevelToStandardError) {
  EXPECT_EXIT(LogBothAndExit(nullptr), ExitedWithCode(0),
              AllOf(ContainsRegex("[0-9]+-[0-9]+-[0-9]+ [0-9]+:[0-9]+:[0-9]+[.][0-9]+ ebb info: "
                                  "100% of \\{\\} read\n"),
                    ContainsRegex("ebb warning: nearly full\n")));
}

TEST(LogDeathTest, LeavesOutLinesBelowTheLevel) {
  EXPECT_EXIT(LogBothAndExit("warning"), ExitedWithCode(0),
              AllOf(Not(HasSubstr("read")), HasSubstr("nearly full")));
  EXPECT_EXIT(LogBothAndExit("off"), ExitedWithCode(0), IsEmpty());
}

TEST(LogDeathTest, SaysThatALevelIsUnknownAndUsesInfo) {
  EXPECT_EXIT(LogBothAndExit("debugg"), ExitedWithCode(0),
              AllOf(HasSubstr("EBB_LOG_LEVEL=debugg"), HasSubstr("debug, info"),
                    HasSubstr("100% of {} read")));
}

TEST(LogDeathTest, TheSurroundingFunctionWritesALineUnlessTheLevelLeavesItOut) {
  const auto log_and_exit = [] {
    setenv("EBB_LOG_LEVEL", "warning", 1);
    SurroundLogLines([](const std::function<void()>& write) {
      std::fputs("<", stderr);
      write();
      std::fputs(">", stderr);
    });
    LogInfo("left out");
    LogWarning("inside");
    SurroundLogLines({});
    LogWarning("alone");
    std::exit(0);
  };
  EXPECT_EXIT(log_and_exit(), ExitedWithCode(0),
              ::testing::MatchesRegex("<[^<>]*inside\n>[^<>]*alone\n"));
}

TEST(LogDeathTest, AProgramsOwnLogTakesTheLinesInsteadOfStandardError) {
  const auto log_and_exit = [] {
    setenv("EBB_LOG_LEVEL", "info", 1);
    std::string taken;
    SendLogTo([&](LogLevel level, std::string_view message) {
      taken += std::string(level == LogLevel::kWarning ? "warning:" : "info:");
      taken += std::string(message) + ";";
    });
    LogInfo("first");
    LogWarning("second");
    SendLogTo({});
    std::fputs((taken + "\n").c_str(), stderr);
    LogInfo("third");
    std::exit(0);
  };
  EXPECT_EXIT(log_and_exit(), ExitedWithCode(0),
              ::testing::MatchesRegex("info:first;warning:second;\n[^;]*third\n"));
}

}  // namespace
}  // namespace ebb::log_test
