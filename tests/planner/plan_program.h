// Runs ebb-plan, in a folder of the test's own.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace ebb {

struct Ended {
  int code = 0;
  std::string printed;  // both streams
};

class PlanProgramTest : public ::testing::Test {
 protected:
  PlanProgramTest() { std::filesystem::create_directories(folder_); }
  ~PlanProgramTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return absl::StrCat(folder_, "/", name); }
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name), std::ios::binary) << text;
    return Path(name);
  }
  static std::string Read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }
  static Ended Run(const std::string& arguments, const char* errors = "2>&1") {
    FILE* pipe =
        popen(absl::StrCat("'" EBB_PLAN_PROGRAM "' ", arguments, " ", errors).c_str(), "r");
    Ended ended;
    char bytes[4096];
    while (const size_t got = std::fread(bytes, 1, sizeof(bytes), pipe))
      ended.printed.append(bytes, got);
    const int status = pclose(pipe);
    ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (ended.code == 0) ExpectNarrow(arguments, ended.printed);
    return ended;
  }
  // An answer has at most a hundred columns. Answers for programs, and remarks, which name files, may
  // have more.
  static void ExpectNarrow(const std::string& arguments, const std::string& printed) {
    for (const char* for_programs : {"--json", "--show-machine"}) {
      if (arguments.find(for_programs) != std::string::npos) return;
    }
    std::istringstream lines(printed);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("ebb-plan: ")) continue;
      EXPECT_LE(line.size(), 100u) << arguments << "\n" << line;
    }
  }
  static nlohmann::json Json(const std::string& arguments) {
    return nlohmann::json::parse(Run(arguments + " --json", "2>/dev/null").printed);
  }
  // One line, exit status 2.
  static void ExpectRefused(const std::string& arguments, const std::string& what) {
    const Ended ended = Run(arguments);
    EXPECT_EQ(ended.code, 2) << arguments;
    EXPECT_EQ(std::count(ended.printed.begin(), ended.printed.end(), '\n'), 1) << ended.printed;
    EXPECT_THAT(ended.printed, ::testing::HasSubstr(what)) << arguments;
  }

  const std::string folder_ = absl::StrCat(testing::TempDir(), "/plan_program_", getpid());
};

}  // namespace ebb
